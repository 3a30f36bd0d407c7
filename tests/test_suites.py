"""The suites catch what they are for: kernels with one fault each fail in that fault's clause, and others may subclass.

Sessions run inside this process, over single tests, so that nothing is imported, collected or compiled twice.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest

import csa_gate.suites.static
from csa_gate._summary import CLAUSE, Tally
from csa_gate.fixtures.adapters import fused  # noqa: F401 - compiled code lives as long as its module
from csa_gate.oracles import CLAUSES

from .test_plugin import BARE

PLANTED = Path(__file__).with_name("outside") / "planted.py"
SUITE = f"{Path(csa_gate.suites.__file__).parent / 'test_compressor.py'}::TestCompressor"
# Assertions would be rewritten once a session.
COMMON = (*BARE, "--import-mode=importlib")


FAULTS: list[tuple[str, str, str]] = [
    ("LeavesTails", "test_zero_slots[every-class-nan]", "zero_slots"),
    ("LeavesTails", "test_zero_slots[tail-aa]", "zero_slots"),
    ("ClearsNaNOnly", "test_zero_slots[every-class-random]", "zero_slots"),
    ("NegativeZeros", "test_zero_slots[last-block-nan]", "zero_slots"),
    ("NegativeZeros", "test_values[r4c2-d128-peaked-gradient_bits]", "gradient_bits"),
    ("SpreadsNaN", "test_unconsumed_values[every-class-zero_slots-nan]", "zero_slots"),
    ("LeaksPadding", "test_padding_gradients[r4c2-noise]", "row_padding"),
    ("SkipsPaddingRows", "test_padding_rows[r4c2]", "row_padding"),
    ("SkipsPaddingTokens", "test_padding_tokens[r4c2-noise]", "token_padding"),
    ("ScalesInPlace", "test_guards[one-row-nan]", "memory"),
    ("RoundsPointersDown", "test_storage_offset[one-row-outputs]", "memory"),
    ("MergesSegments", "test_alone[r4c2-12-11]", "batch_invariance"),
    ("Alternates", "test_run_to_run[r4c2-d128-deterministic]", "deterministic"),
    ("Alternates", "test_back_to_back[r4c2-d128-deterministic]", "deterministic"),
    ("AtomicApe", "test_run_to_run[r4c2-d128-dape_deterministic]", "dape_deterministic"),
    ("RoundsApe", "test_values[r4c2-d128-normal-dape_accuracy]", "dape_accuracy"),
    ("RoundsApe", "test_values[r4c2-d128-normal-dape_bits]", "dape_bits"),
    ("Spills", "test_compiled[sm_90a-sample]", "static"),
    ("Contracts", "test_compiled[sm_120a]", "static"),
    ("AddsAtomically", "test_compiled[sm_80]", "static"),
    ("HidesNaN", "test_values[r4c2-d128-nonfinite-nonfinite]", "nonfinite"),
]
"""Kernel, test that must fail, clause that the failure must name."""


def run(pytester: pytest.Pytester, spec: str, tests: list[str], device: str = "cpu") -> list[pytest.TestReport]:
    """The reports of some tests of the suite, run over the kernel that `spec` names."""
    functions = dict.fromkeys(f"{SUITE}::{test.partition('[')[0]}" for test in tests)
    which = " or ".join(tests)
    recorder = pytester.inline_run(*functions, "-k", which, f"--csa-kernel={spec}", f"--csa-device={device}", *COMMON)
    reports: list[pytest.TestReport] = recorder.getreports("pytest_runtest_logreport")
    return [report for report in reports if report.when == "call"]


def test_sound_kernel_passes_what_the_faulty_ones_fail(pytester: pytest.Pytester) -> None:
    tests = list(dict.fromkeys(test for _, test, _ in FAULTS))
    reports = run(pytester, f"{PLANTED}:Sound", tests)
    assert [r.longreprtext for r in reports if not r.passed] == []
    assert len(reports) == len(tests)


@pytest.mark.parametrize(("kernel", "test", "clause"), FAULTS)
def test_fault_is_caught_in_its_clause(pytester: pytest.Pytester, kernel: str, test: str, clause: str) -> None:
    (report,) = run(pytester, f"{PLANTED}:{kernel}", [test])
    assert report.failed
    assert dict(report.user_properties)[CLAUSE] == clause
    assert f"contract broken: {clause}" in report.longreprtext
    command = r"reproduce: python -m (csa_gate (check|static)|pytest --pyargs csa_gate.suites) .*"
    assert re.search(command, report.longreprtext)


@pytest.mark.parametrize(
    ("kernel", "tool", "reason"),
    [
        ("Sound", False, "cuobjdump: found none"),
        ("CannotCompile", True, "planted has no method compile_for(arch)"),
    ],
)
def test_what_cannot_be_compiled_or_read_is_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kernel: str, tool: bool, reason: str
) -> None:
    """A skip, which the gate of a whole level counts as a claim that was not put to the test."""
    if not tool:
        monkeypatch.setattr(csa_gate.suites.static, "find_cuobjdump", _no_tool)
    (report,) = run(pytester, f"{PLANTED}:{kernel}", ["test_compiled[sm_90a-sample]"])
    assert report.skipped
    assert reason in str(report.longrepr)
    tally = Tally()
    tally.add(report.nodeid, dict(report.user_properties), "skipped", reason)
    tally.add("other", dict(report.user_properties) | {CLAUSE: "memory"}, "passed")
    (fault,) = tally.faults(whole=True)
    assert "static" in fault
    assert fault.endswith(f"but no test of that ran: {reason}")


def _no_tool() -> NoReturn:
    raise ValueError("cuobjdump: found none")


@pytest.mark.parametrize("kind", ["check", "pytest"])
def test_command_of_a_failure_reproduces_it(pytester: pytest.Pytester, kind: str) -> None:
    kernel, test = {
        "check": ("LeavesTails", "test_zero_slots[every-class-random]"),
        "pytest": ("SkipsPaddingTokens", "test_padding_tokens[r4c2-noise]"),
    }[kind]
    (report,) = run(pytester, f"{PLANTED}:{kernel}", [test])
    command = re.search(r"reproduce: python (.*)", report.longreprtext)
    assert command is not None
    again = subprocess.run(f"{sys.executable} {command[1]}", shell=True, capture_output=True, text=True, timeout=240)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "contract broken" in again.stdout


class Collected:
    """Keeps the tests of a session."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def test_every_test_has_one_clause_one_level_and_a_name_of_its_own(pytester: pytest.Pytester) -> None:
    collected = Collected()
    pytester.inline_run(SUITE, "--collect-only", *COMMON, plugins=[collected])
    quick = set()
    for item in collected.items:
        levels = [mark.name for mark in item.iter_markers() if mark.name in ("L0", "L1")]
        clauses = [mark.args[0] for mark in item.iter_markers("clause")]
        assert len(levels) == len(clauses) == 1, item.nodeid
        quick |= set(clauses if levels == ["L0"] else ())
        assert re.fullmatch(r"test_\w+\[[\w.-]+\]", item.name), f"{item.name} cannot be named with -k"
    assert quick == set(CLAUSES)
    assert max(Counter(item.name for item in collected.items).values()) == 1


DOWNSTREAM = """
import pytest
from csa_gate.suites import CompressorSuite
from planted import LeavesTails, Sound

class TestAttribute(CompressorSuite):
    kernel = LeavesTails

class TestFixture(CompressorSuite):
    @pytest.fixture
    def kernel(self):
        return Sound()
"""


def test_subclass_in_another_repository(tmp_path: Path) -> None:
    """By attribute and by fixture; each class is held to its own kernel's claims."""
    shutil.copy(PLANTED, tmp_path)
    (tmp_path / "test_mine.py").write_text(DOWNSTREAM)
    tests = [f"test_mine.py::{c}::test_zero_slots" for c in ("TestAttribute", "TestFixture")]
    command = [sys.executable, "-m", "pytest", *tests, "-k", "tail", "-p", "no:cacheprovider", "--csa-device=cpu"]
    session = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert session.returncode == 1
    assert "4 failed, 4 passed" in session.stdout
    assert "reproduce: python -m pytest " in session.stdout
