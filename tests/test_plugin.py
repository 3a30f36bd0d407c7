"""The pytest plugin, over small gates in a folder of their own: exit status, summary, laziness, other people's kernels.

Sessions run inside this process where they can: importing torch takes longer than any of them, and what is imported
here is imported there.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import csa_gate
import csa_gate.fixtures.marks
from csa_gate._gate import narrowed_by
from csa_gate._summary import CLAIMS, CLAUSE, DEVICE, KERNEL, MACHINE, MAX_REASONS, Tally

KERNELS = """
import torch
from csa_gate.oracles import Contract

class Mine:
    name = "mine"
    claims = dict(zero_slots=True, memory=True)

    def __init__(self, name="mine", **claims):
        self.name, self.claims = name, claims or self.claims

    def contract(self, device):
        return Contract(**self.claims) if device.type == "cpu" else None

    def supports(self, problem):
        return None

    def forward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, *, ratio, coff, out):
        pass

    def backward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, *,
                 ratio, coff, grad_kv, grad_score, grad_ape):
        pass

class NoBackward(Mine):
    backward = None

class ShortForward(Mine):
    def forward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, *, ratio, coff):
        pass

class ClaimsByDict(Mine):
    def contract(self, device):
        return {"memory": True}

class Nowhere(Mine):
    def contract(self, device):
        return None

instance = Mine()

def broken():
    raise OSError("no\\nlibrary")
"""

SUITE = """
import pytest
from csa_gate.fixtures.marks import L0, L1, clause

class Suite:
    @L0
    @clause("zero_slots")
    @pytest.mark.parametrize("i", [0, 1, 2])
    def test_zero(self, kernel, device, i):
        assert kernel.name

    @L1
    @clause("memory")
    def test_memory(self, kernel, device):
        assert device.type == "cpu"

    @L0
    @clause("replay")
    def test_replay(self, kernel, device):
        assert False, "nobody claims it"
"""

MINE = "--csa-kernel=mine.py:Mine"


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with some kernels (mine.py) and a suite of three clauses (suite.py), not collected by itself."""
    pytester.makepyfile(mine=KERNELS, suite=SUITE)
    pytester.makeini("[pytest]\npythonpath = .\n")
    return pytester


@pytest.fixture
def gate(folder: pytest.Pytester) -> pytest.Pytester:
    """The folder with the suite over --csa-kernel."""
    folder.makepyfile(test_gate="from suite import Suite\nclass TestGate(Suite):\n    pass\n")
    return folder


# Hypothesis would be imported anew by each inner session, and all garbage collected ten times over by what watches for
# errors in destructors: either takes longer than the rest of it.
BARE = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:unraisableexception")


def run(folder: pytest.Pytester, *args: str) -> pytest.RunResult:
    return folder.runpytest_inprocess(*BARE, *args)


def the_error(result: pytest.RunResult) -> str:
    """The one line with which a run that never began has ended."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.errlines if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


def row(result: pytest.RunResult, clause: str, kernel: str = "mine") -> list[int]:
    """ran, passed, failed, skipped of a clause in a kernel's block of the summary."""
    lines = result.outlines[result.outlines.index(f"{kernel} on cpu") :]
    found = next(line for line in lines if line.startswith(f"  {clause} "))
    return [int(n) for n in found.split()[1:5]]


def test_gate_that_passes(gate):
    """Header and summary name kernel, device and versions; every clause has its counts and reasons."""
    result = run(gate, MINE)
    assert result.ret == 0
    assert row(result, "zero_slots") == [3, 3, 0, 0]
    assert row(result, "memory") == [1, 1, 0, 0]
    assert row(result, "replay") == [0, 0, 0, 1]
    assert "      1 x mine does not claim replay on cpu" in result.outlines
    assert "gate passed: mine on cpu (2 clauses)" in result.outlines
    header = result.outlines.index("kernel: mine (mine.py:Mine)")
    assert header < result.outlines.index("collected 5 items") + 2
    assert re.fullmatch(r"device: cpu \(.+\)", result.outlines[header + 1])
    assert result.outlines[header + 2].startswith(
        f"versions: csa-gate {csa_gate.__version__}, torch {torch.__version__}"
    )
    assert result.outlines.count(result.outlines[header]) == 2, "once above the tests, once in the summary"


def test_kernel_by_other_names(gate):
    """A module on the path, a class, an instance and a nested attribute all name a kernel."""
    for spec in ("mine:Mine", "mine:instance", f"{gate.path}/mine.py:instance"):
        assert run(gate, f"--csa-kernel={spec}").ret == 0, spec


def test_failure_counts(gate):
    """A test fails, be it in its teardown: its clause says so, and so does the last line."""
    gate.makepyfile(
        test_gate="""
        import pytest
        from suite import Suite, clause
        class TestGate(Suite):
            @pytest.fixture
            def breaks_after(self):
                yield
                raise OSError
            @clause("memory")
            def test_memory(self, breaks_after):
                pass
            @clause("memory")
            def test_memory_again(self):
                assert 0
        """
    )
    result = run(gate, MINE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert row(result, "memory") == [2, 0, 2, 0]
    assert "gate failed: 2 tests failed" in result.outlines


def test_claimed_but_never_ran(gate):
    """A claim that no test looked at fails the run with one line; a level, a folder or a file is no excuse."""
    line = "gate failed: mine on cpu claims memory, but no test of that ran"
    for args in (["-m", "L0"], ["-m", "not L1", "test_gate.py"], ["-m", "L0", "."]):
        result = run(gate, MINE, *args)
        assert result.ret == pytest.ExitCode.TESTS_FAILED, args
        assert [line] == [x for x in result.outlines if x.startswith("gate")]
        assert row(result, "memory") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["-k", "zero"], "-k"),
        (["test_gate.py::TestGate::test_zero"], "test_gate.py::TestGate::test_zero"),
        (["--deselect", "test_gate.py::TestGate::test_memory"], "--deselect"),
        (["-m", "L0 and not slow"], "-m"),
    ],
)
def test_narrowed_run_is_no_gate(gate, args, why):
    """Who picks single tests gets pytest's exit status and is told that it was no gate."""
    result = run(gate, MINE, *args)
    assert result.ret == 0
    assert f"no gate: a narrowed run ({why})" in result.outlines


def test_narrowed_by_the_cache_or_a_file_of_ours():
    """--lf, --stepwise and one file of csa_gate.suites narrow; the suites as a whole do not."""

    def reasons(*args: str, **options: object) -> list[str]:
        return narrowed_by(SimpleNamespace(args=list(args), getoption=options.get))

    suites = Path(csa_gate.__file__).parent / "suites"
    assert reasons("csa_gate.suites", str(suites), markexpr="L0 or (L1)") == []
    assert reasons(markexpr="", lf=True, stepwise=True) == ["--lf", "--stepwise"]
    assert reasons(str(suites / "numerics.py"), "csa_gate.suites.memory", markexpr="") == [
        str(suites / "numerics.py"),
        "csa_gate.suites.memory",
    ]


@pytest.mark.parametrize("args", [[], ["-k", "replay"]])
def test_all_skipped_fails(gate, args):
    """A run that passed nothing fails, be it narrowed or not."""
    gate.makepyfile(test_gate="from suite import Suite\nclass TestGate(Suite):\n    test_zero = test_memory = None\n")
    result = run(gate, MINE, *args)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "gate failed: no gate test passed, all were skipped" in result.outlines


def test_skipped_by_marker_is_no_run(gate):
    """A test skipped before any fixture is counted under its kernel, with its reason; its clause never ran."""
    gate.makepyfile(
        test_gate="""
        import pytest
        from suite import Suite, clause
        class TestGate(Suite):
            @clause("memory")
            @pytest.mark.skip(reason="too slow here")
            def test_memory(self, kernel): pass
            @clause("memory")
            @pytest.mark.xfail(reason="known")
            def test_memory_too(self, kernel): assert 0
        """
    )
    result = run(gate, MINE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert row(result, "memory") == [0, 0, 0, 2]
    assert {"      1 x too slow here", "      1 x expected to fail: known"} <= set(result.outlines)
    why = "too slow here; expected to fail: known"
    assert f"gate failed: mine on cpu claims memory, but no test of that ran: {why}" in result.outlines


def test_deselected_tests_take_no_part(gate):
    """Other tests run as ever when -m leaves the gate out, and a kernel that cannot be had does not matter then."""
    gate.makepyfile(test_other="import pytest\n@pytest.mark.L2\ndef test_it(): pass\n")
    gate.makeini("[pytest]\npythonpath = .\nmarkers = L2\naddopts = --csa-kernel=no.such:kernel\n")
    result = run(gate, "-m", "L2")
    assert result.ret == 0
    assert not [line for line in result.outlines if line.startswith(("kernel:", "gate")) or "= csa-gate =" in line]
    assert run(gate, "-m", "L2", "test_gate.py").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_kernel_given_but_no_gate_test(gate):
    """Naming a kernel asks for a gate: a run without gate tests then fails."""
    gate.makepyfile(test_other="def test_it(): pass\n")
    result = run(gate, MINE, "test_other.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    line = "gate failed: the command line names a kernel or a device, but no gate test took part"
    assert line in result.outlines
    assert run(gate, "test_other.py").ret == 0


def test_collecting_only_judges_nothing(gate):
    """--collect-only and --setup-plan run no test, so there is nothing to judge."""
    for flag in ("--collect-only", "--setup-plan"):
        result = run(gate, MINE, flag)
        assert result.ret == 0, flag
        assert not [line for line in result.outlines if line.startswith(("gate failed", "gate passed"))]


def test_stopped_run_is_no_gate(gate):
    """Ctrl-C and -x leave the exit status as it is, nonzero, and no clause is blamed for what did not run."""
    stop = "@clause('zero_slots')\ndef test_it(kernel): raise KeyboardInterrupt"
    gate.makepyfile(test_a=f"from suite import clause\n{stop}")
    result = gate.runpytest_inprocess(*BARE, MINE, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not [line for line in result.outlines if line.startswith("gate")]
    gate.makepyfile(test_a="def test_it(): pass\ndef test_fails(): assert 0")
    result = run(gate, MINE, "-x", "test_gate.py::TestGate::test_zero", "test_a.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "no gate: the run stopped before its end" in result.outlines


def test_failure_elsewhere_is_no_pass(gate):
    """A gate beside which other tests fail is not reported as passed."""
    gate.makepyfile(test_other="def test_it(): assert 0\n")
    result = run(gate, MINE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "no gate: the session failed outside the gate tests" in result.outlines


BAD_KERNELS = [
    ("nope", "kernel 'nope': need eager, fused, fused-portable, package.module:attr or path/to/file.py:attr"),
    ("no.such:kernel", "kernel 'no.such:kernel': importing no.such failed: ModuleNotFoundError: No module named 'no'"),
    ("mine.py:other", "kernel 'mine.py:other': mine.py has no attribute 'other'"),
    ("mine.py:NoBackward", "kernel 'mine.py:NoBackward': NoBackward has no method 'backward'"),
    ("mine.py:broken", "kernel 'mine.py:broken': making the kernel failed: OSError: no library"),
    ("mine.py:Nowhere", "kernel 'mine' does not run on cpu"),
    ("mine.py:ClaimsByDict", "kernel 'mine': contract(cpu) returned dict, need csa_gate.oracles.Contract or None"),
    (
        "mine.py:ShortForward",
        "kernel 'mine.py:ShortForward': forward() must take 5 positional arguments, ratio=, coff=, out=: "
        "got an unexpected keyword argument 'out'",
    ),
]


@pytest.mark.parametrize(("spec", "message"), BAD_KERNELS)
def test_bad_kernel_ends_the_run_at_once(gate, spec, message):
    """One line and exit status 4, before anything is collected, with xdist too."""
    for workers in ([], ["-n2"]):
        result = run(gate, f"--csa-kernel={spec}", "--csa-device=cpu", *workers)
        assert the_error(result) == f"ERROR: {message}"
        assert not [line for line in result.outlines if "collected" in line or "workers" in line]


def test_bad_kernel_of_the_configuration(gate):
    """A kernel that only the configuration names is looked for once a gate test was collected."""
    gate.makeini("[pytest]\npythonpath = .\naddopts = --csa-kernel=mine.py:other\n")
    assert the_error(run(gate)) == "ERROR: kernel 'mine.py:other': mine.py has no attribute 'other'"


def test_absent_device(gate, monkeypatch):
    """--csa-device=cuda without a CUDA device, or with a kernel that does not run there, ends the run at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert the_error(run(gate, "--csa-device=cuda")) == "ERROR: device 'cuda': torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert the_error(run(gate, "--csa-device=cuda", MINE)) == "ERROR: kernel 'mine' does not run on cuda"
    assert run(gate, MINE).ret == 0, "auto takes the CPU, where the kernel runs"


def test_marker_without_clause(gate):
    """A marker that names no clause ends the run, naming the test."""
    for marker in ("clause('zero_slot')", "clause()", "clause"):
        gate.makepyfile(test_typo=f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n")
        got = marker if "(" in marker else "clause()"
        assert the_error(run(gate)).startswith(f"ERROR: test_typo.py::test_it: got the marker {got}, need clause(name)")


OVERRIDES = {
    "attribute, an instance": "kernel = Mine('own', memory=True)",
    "attribute, a class": "kernel = Own",
    "attribute, a name": "kernel = 'mine_too.py:Own'",
    "fixture of the class": "@pytest.fixture\n    def kernel(self):\n        return Own()",
    "fixture on top of ours": "@pytest.fixture\n    def kernel(self, kernel):\n        assert kernel.name == 'mine'\n"
    "        return Own()",
    "class-scoped fixture": "@pytest.fixture(scope='class')\n    @classmethod\n    def kernel(cls): return Own()",
    "fixture of the module": "pass\n@pytest.fixture(scope='module')\ndef kernel():\n    return Own()",
    "parameter": "pytestmark = pytest.mark.parametrize('kernel', [Own()])",
}
OWN = """
import pytest
from mine import Mine
from suite import Suite

class Own(Mine):
    def __init__(self):
        super().__init__("own", memory=True)

class TestOwn(Suite):
"""


@pytest.mark.parametrize("how", OVERRIDES)
def test_class_with_a_kernel_of_its_own(gate, how):
    """It is judged by its own kernel's claims, beside the kernel of the command line, under its own name."""
    gate.makepyfile(mine_too=f"{OWN}    pass", test_own=f"{OWN}    {OVERRIDES[how]}")
    result = run(gate, MINE)
    assert result.ret == 0
    assert row(result, "zero_slots", "own") == [0, 0, 0, 3]
    assert "      3 x own does not claim zero_slots on cpu" in result.outlines
    assert row(result, "memory", "own") == [1, 1, 0, 0]
    assert row(result, "zero_slots") == [3, 3, 0, 0]
    assert "gate passed: mine on cpu (2 clauses), own on cpu (1 clauses)" in result.outlines


def test_own_kernel_is_enough(folder):
    """Where every class has its own kernel, the common one is never looked for; its claims are held against it."""
    folder.makeini("[pytest]\npythonpath = .\naddopts = --csa-kernel=no.such:kernel\n")
    folder.makepyfile(test_own=f"{OWN}    kernel = Own()")
    result = run(folder)
    assert result.ret == 0
    assert "kernel: own" in result.outlines
    result = run(folder, "-m", "L0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "gate failed: no gate test passed, all were skipped" in result.outlines


def test_kernels_of_one_name(gate):
    """They are told apart by their claims, so neither stands in for the other."""
    own = "kernel = Mine('mine', memory=True, replay=True)\n    test_replay = None"
    gate.makepyfile(test_own=f"{OWN}    {own}")
    result = run(gate, MINE)
    assert result.outlines.count("mine on cpu") == 2
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "gate failed: mine on cpu claims replay, but no test of that ran" in result.outlines


def test_every_kernel_has_to_pass_something(gate):
    """One kernel's passes do not hide that another's tests were all skipped."""
    gate.makepyfile(test_own=f"{OWN}    kernel = Own()\n    test_memory = None")
    result = run(gate, MINE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "gate failed: own on cpu: no test passed, all were skipped" in result.outlines


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("kernel = object()", "TestOwn.kernel: a object with name = None, need a non-empty string"),
        ("kernel = 'mine.py:Nowhere'", "kernel 'mine' does not run on cpu"),
        (
            "@pytest.fixture\n    def kernel(self):\n        return Mine",
            "fixture 'kernel': got the class Mine, need an instance of it",
        ),
    ],
)
def test_own_kernel_that_is_none(folder, own, message):
    """One of the class's tests fails, with the one line that says why; the others are skipped and not counted."""
    folder.makepyfile(test_own=f"{OWN}    {own}", test_other="def test_it(): pass\n")
    result = run(folder, "--csa-device=cpu", "-rs")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(errors=1, skipped=4, passed=1)
    assert result.outlines.count(message) == 1
    assert [line for line in result.outlines if f"{message}, see test_own.py::TestOwn::test_zero[0]" in line]
    table = result.outlines[result.outlines.index("tests without a kernel") + 2 :]
    assert [line.split() for line in table[:2]] == [
        ["zero_slots", "1", "0", "1", "0"],
        ["gate", "failed:", "1", "tests", "failed"],
    ]


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_own_kernels_that_are_none(gate, workers):
    """Each class fails for itself, beside one that passes; each worker may have a failure of its own."""
    nowhere = "class {}(Suite):\n    kernel = 'mine.py:Nowhere'\n"
    gate.makepyfile(test_own="from suite import Suite\n" + nowhere.format("TestA") + nowhere.format("TestB"))
    result = run(gate, MINE, "--csa-device=cpu", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    outcomes = result.parseoutcomes()
    assert 2 <= outcomes["errors"] <= (4 if workers else 2)
    assert outcomes["passed"] == 4
    assert {line.split("::")[1] for line in result.outlines if line.startswith("ERROR test_own")} == {"TestA", "TestB"}


def test_a_class_without_kernel_fails_whatever_hides_its_first_test(gate):
    """Neither an expected failure nor a second run of the same test takes the failure away."""
    gate.makepyfile(
        test_own=f"{OWN}    kernel = 'mine.py:Nowhere'\n"
        "    test_zero = pytest.mark.xfail(Suite.test_zero)\n"
        "    test_replay = None\n"
    )
    gate.makeconftest("def pytest_collection_modifyitems(items): items += items\n")
    result = run(gate, MINE, "--csa-device=cpu")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(errors=2, xfailed=6, passed=8, skipped=2)


LOOK = """
import sys
def pytest_unconfigure():
    heavy = {"torch", "numpy", "cutlass", "csa_gate.oracles", "csa_gate.fixtures"}
    print("IMPORTED:", sorted(heavy & set(sys.modules)))
"""


def test_nothing_heavy_before_a_gate_test(pytester):
    """Another project's tests, with the plugin installed, import none of it."""
    pytester.makeconftest(LOOK)
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('i', [1])\ndef test_it(i, tmp_path): pass\n")
    result = pytester.runpytest_subprocess(*BARE, "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["IMPORTED: []"])
    assert not [line for line in result.outlines if line.startswith(("kernel:", "gate")) or "= csa-gate =" in line]


def test_a_gate_test_does_import(gate):
    """The other side of the test above: its list would show what a gate test needs."""
    gate.makeconftest(LOOK)
    result = gate.runpytest_subprocess(*BARE, "-s", MINE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["IMPORTED: *'csa_gate.fixtures', 'csa_gate.oracles', 'numpy', 'torch'*"])


def test_workers_add_up(gate):
    """With xdist the reporting process counts what all workers did, and judges it as without."""
    result = run(gate, "-n2", "-m", "L0 or L1", MINE)
    assert result.ret == 0
    assert row(result, "zero_slots") == [3, 3, 0, 0]
    assert row(result, "replay") == [0, 0, 0, 1]
    assert "kernel: mine (mine.py:Mine)" in result.outlines
    assert "gate passed: mine on cpu (2 clauses)" in result.outlines


def test_workers_end_the_run_together(gate):
    """An error that only workers can see ends the run with one line and exit status 4."""
    gate.makeini("[pytest]\npythonpath = .\naddopts = --csa-kernel=mine.py:other\n")
    result = run(gate, "-n2")
    assert the_error(result) == "ERROR: kernel 'mine.py:other': mine.py has no attribute 'other'"


def report(tally: Tally, nodeid: str, outcome: str, reason: str = "", claims: str = "memory") -> None:
    properties = {CLAUSE: "memory", KERNEL: "k", DEVICE: "cuda", MACHINE: "H", CLAIMS: claims}
    tally.add(nodeid, properties, outcome, reason)


def test_worst_report_counts():
    """A test passes its call and fails its teardown: failed, in whatever order the reports come."""
    for outcomes in (("passed", "failed"), ("failed", "passed")):
        tally = Tally()
        for outcome in outcomes:
            report(tally, "a", outcome)
        assert tally.failed == 1
        assert tally.table()[2].split() == ["memory", "1", "0", "1", "0"]


def test_reasons_are_distinct_and_few():
    """Equal reasons share a line, the commonest first; what is beyond the limit is counted."""
    tally = Tally()
    for i in range(2 * MAX_REASONS):
        report(tally, f"a{i}", "skipped", f"reason {i}")
        report(tally, f"b{i}", "skipped", "the same")
    shown = tally.table()[3:]
    assert shown[0] == f"      {2 * MAX_REASONS} x the same"
    assert len(shown) == MAX_REASONS + 1
    assert shown[-1] == f"      and {MAX_REASONS + 1} more reasons"
