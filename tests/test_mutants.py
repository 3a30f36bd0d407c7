"""Planted faults: the catalogue as data, and that the command counts what it should and nothing else.

Sessions here run a handful of the suites' tests. All faults over all of L0 and L1 are a lane of their own.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import torch

from csa_gate import _mutants
from csa_gate.__main__ import main
from csa_gate._mutants_report import Fate, line, table
from csa_gate._mutants_session import End, run_session
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.fixtures.mutants import CATALOGUE, SOURCE, Device, Fault, misfit, plant
from csa_gate.oracles import CLAUSES

from .test_interrupted import listen

QUICK = ("--pyargs", "csa_gate.suites", "-k", "r4c2-d3-normal or (test_guards and one-row-nan)")
BY_ID = {fault.id: fault for fault in CATALOGUE}
ON_CPU = [fault for fault in CATALOGUE if "cpu" in fault.on]


def fault(name: str, before: str, after: str, file: str = "api.py", **more: object) -> Fault:
    return Fault(name, file, before, after, "forward_bits", "none", **more)  # type: ignore[arg-type]


SURVIVES = fault("survives", "Pool every `ratio` tokens", "Pool all the tokens")
FAILS_TO_IMPORT = fault("fails-to-import", "from . import compiled\n", "from . import nothing\n")
FAILS_TO_COMPILE = fault("fails-to-compile", "return mul(mul(go, v), p)", "return mul(mul(go, v), q)", "row.py")
RAISES = fault("raises", "    gradients = (", "    assert False, 'a fault'\n    gradients = (")
DIES = "    import os, signal\n\n    os.kill(os.getpid(), signal.SIGSEGV)\n    gradients = ("
DIES_UNMEANT = fault("dies", "    gradients = (", DIES)
DIES_AS_MEANT = fault("dies-as-meant", "    gradients = (", DIES, ends=("crash",))
LOST = "    import torch\n\n    raise torch.AcceleratorError('illegal memory access')\n    gradients = ("
LOSES_THE_GPU = fault("loses-the-gpu", "    gradients = (", LOST)
LOSES_IT_AS_MEANT = fault("loses-it-as-meant", "    gradients = (", LOST, ends=("crash",))
HANGS = fault("hangs", "    gradients = (", "    while True:\n        pass\n    gradients = (")
TWICE = fault("twice", "compiled.rerun(", "compiled.run(")
NOWHERE = fault("nowhere", "no such text", "no matter")


def tree() -> str:
    """A digest of the kernels' source."""
    files = sorted(path for path in SOURCE.rglob("*.py"))
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Few tests a session."""
    monkeypatch.setattr(_mutants, "SUITES", QUICK)
    return monkeypatch


def mutants(patch: pytest.MonkeyPatch, catalogue: list[Fault], *options: str) -> int:
    """The exit status of the command over another catalogue."""
    patch.setattr(_mutants, "CATALOGUE", tuple(catalogue))
    try:
        return main(["mutants", "--device", "cpu", "--level", "L0", *options])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


class TestCatalogue:
    def test_every_fault_fits_the_code_once(self) -> None:
        assert [why for f in CATALOGUE if (why := misfit(f)) is not None] == []

    def test_ids_are_unique(self) -> None:
        assert max(Counter(f.id for f in CATALOGUE).values()) == 1

    def test_no_fault_is_planted_twice(self) -> None:
        assert max(Counter((f.file, f.before, f.after) for f in CATALOGUE).values()) == 1

    def test_every_clause_of_the_kernels_has_a_fault(self) -> None:
        """On the CPU too, as far as they claim it there."""
        claims = load_kernel("fused").contract(torch.device("cpu"))
        assert claims is not None
        assert {f.clause for f in CATALOGUE} == set(CLAUSES)
        assert {f.clause for f in ON_CPU} == {clause for clause in CLAUSES if claims.claims(clause)}

    def test_there_are_enough(self) -> None:
        assert len(ON_CPU) >= 60
        assert sum(f.on == ("cuda",) for f in CATALOGUE) >= 15
        assert all(f.on and set(f.on) <= set(get_args(Device)) for f in CATALOGUE)


class TestPlanting:
    def test_copy_differs_in_the_fault_alone(self, tmp_path: Path) -> None:
        before = tree()
        planted = BY_ID["ape-left-out"]
        plant(planted, tmp_path / "copy")
        differing = [p.name for p in SOURCE.glob("*.py") if p.read_text() != (tmp_path / "copy" / p.name).read_text()]
        assert differing == [planted.file]
        text = (tmp_path / "copy" / planted.file).read_text()
        assert planted.after in text and planted.before not in text
        assert tree() == before

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (NOWHERE, "nowhere: got its text 0 times in api.py, need it once"),
            (TWICE, "twice: got its text 2 times in api.py, need it once"),
            (fault("no-file", "a", "b", "gone.py"), "no-file: there is no gone.py"),
            (fault("no-change", "from . import compiled\n", "from . import compiled\n"), "no-change: changes nothing"),
        ],
    )
    def test_a_fault_that_does_not_fit(
        self,
        wrong: Fault,
        why: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """It is an error of the catalogue, before anything runs, however many others fit."""
        assert misfit(wrong) == why
        with pytest.raises(ValueError, match=re.escape(why)):
            plant(wrong, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        report = tmp_path / "fates.json"
        assert mutants(monkeypatch, [BY_ID["ape-left-out"], wrong], "--json", str(report)) == 2
        captured = capsys.readouterr()
        assert why in captured.err and captured.out == ""
        assert not report.exists()


class TestCommand:
    def test_fates(self, quick: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A verdict kills, and a crash that is expected; what does not import, compile or return is no kill."""
        killed = [BY_ID["ape-left-out"], BY_ID["gradients-swapped"], DIES_AS_MEANT, LOSES_IT_AS_MEANT]
        errors = [FAILS_TO_IMPORT, FAILS_TO_COMPILE, RAISES, DIES_UNMEANT, LOSES_THE_GPU]
        elsewhere = BY_ID["grid-without-rowless"]
        report, page, before = tmp_path / "fates.json", tmp_path / "fates.html", tree()
        catalogue = [*killed, SURVIVES, *errors, elsewhere]
        assert mutants(quick, catalogue, "--json", str(report), "--html", str(page)) == 1
        assert tree() == before
        fates = json.loads(report.read_text())
        assert list(fates) == ["total", "killed", "survivors", "faults"]
        assert (fates["total"], fates["killed"], fates["survivors"]) == (10, 4, ["survives"])
        by_id = {fate["id"]: fate for fate in fates["faults"]}
        assert list(by_id) == [f.id for f in catalogue if f != elsewhere]
        assert [name for name, fate in by_id.items() if fate["killed"]] == [f.id for f in killed]
        assert [name for name, fate in by_id.items() if fate["error"]] == [f.id for f in errors]
        for name, clause, case in (
            ("ape-left-out", "forward_bits", "test_values[r4c2-d3-normal-forward_bits]"),
            # Another clause's test comes first in the suite, but not here.
            ("gradients-swapped", "error_bound", "test_values[r4c2-d3-normal-error_bound]"),
            ("dies-as-meant", "crash", None),
            ("loses-it-as-meant", "crash", "test_values[r4c2-d3-normal-forward_bits]"),
            ("survives", None, None),
            ("raises", None, None),
        ):
            assert (by_id[name]["clause"], by_id[name]["case"]) == (clause, case)
            assert by_id[name]["level"] == ("L0" if by_id[name]["killed"] else None)
        assert "name 'q' is not defined" in by_id["fails-to-compile"]["error"]
        out = capsys.readouterr().out
        assert "4 of 10 faults killed on cpu: 4 at L0" in out
        assert "1 not run here" in out
        for text in (out, page.read_text()):
            assert all(f.id in text for f in catalogue)
            assert "not run here" in text and "survived" in text

    def test_all_killed(self, quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert mutants(quick, [BY_ID["ape-left-out"], SURVIVES], "-k", "ape- or left-out", "-n", "1") == 0
        assert "1 of 1 faults killed on cpu: 1 at L0" in capsys.readouterr().out

    def test_control_refuses(
        self, quick: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Where the suites fail without a fault, a failure with one says nothing."""
        broken, report = tmp_path / "broken", tmp_path / "fates.json"
        plant(BY_ID["ape-left-out"], broken)
        quick.setattr(_mutants, "SOURCE", broken)
        assert mutants(quick, [BY_ID["gradients-swapped"]], "--json", str(report)) == 1
        out = capsys.readouterr().out
        assert "L0 without a fault: broken" in out
        assert "no fault was judged" in out and "forward_bits test_values[r4c2-d3-normal-forward_bits]" in out
        assert "gradients-swapped" not in out
        assert not report.exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["-k", "nosuch"], "-k: no fault has 'nosuch' in its id, file or clause"),
            (["-k", "leaf or nosuch"], "-k: no fault has 'nosuch' in its id, file or clause"),
            (["-k", " "], "-k: got ' ' with an empty word, need one on both sides of each ` or `"),
            (["-k", " or "], "-k: got ' or ' with an empty word"),
            (["-k", "leaf or "], "-k: got 'leaf or ' with an empty word"),
            (["-k", "leaf or  or tail"], "with an empty word"),
            (["--json", "same", "--html", "./same"], "--html: got same, need another file than that of --json"),
            (["--json", "/proc/self/x.json"], "--json: got /proc/self/x.json, need a file that can be written"),
            (["-k", "grid-"], "-k: none of the 3 faults chosen can be seen on cpu"),
            (["-n", "0"], "-n: got 0, need at least 1"),
            (["--json", "/no/such/folder/file"], "--json: got /no/such/folder/file, need a file in a folder"),
            (["--level", "L2"], "argument --level: invalid choice: 'L2'"),
        ],
    )
    def test_impossible_options(
        self, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert mutants(monkeypatch, list(CATALOGUE), *options) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""

    def test_choice(self) -> None:
        """The empty expression means all faults, any other those that have one of its words."""
        assert _mutants.choose(CATALOGUE, "") == list(CATALOGUE)
        assert _mutants.choose([SURVIVES, TWICE, NOWHERE], "twice or  surv") == [SURVIVES, TWICE]


class TestLevels:
    """What is run at which level, over made-up sessions."""

    ENDS: ClassVar[dict[tuple[str, str], End]] = {
        ("ape-left-out", "L0"): End("broken", "forward_bits", "test_quick"),
        ("gradients-swapped", "L1"): End("broken", "memory", "test_slow"),
        ("leaf-serial", "L0"): End("error", what="ImportError"),
    }

    def course(
        self, patch: pytest.MonkeyPatch, ends: dict[tuple[str, str], End]
    ) -> list[tuple[str, str, float | None]]:
        """The sessions that the command runs, each with its limit, one fault after the other."""
        sessions = []

        def session(fault: Fault | None, level: str, folder: Path, *, limit: float | None, **options: object) -> End:
            name = fault.id if fault else "control"
            sessions.append((name, level, limit))
            return ends.get((name, level), End("passed", seconds=20.0))

        patch.setattr(_mutants, "run_session", session)
        patch.setattr(
            _mutants, "CATALOGUE", tuple(BY_ID[n] for n in ("ape-left-out", "gradients-swapped", "leaf-serial"))
        )
        self.status = main(["mutants", "--device", "cpu", "-n", "1"])
        return sessions

    def test_what_passes_goes_on(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.course(monkeypatch, self.ENDS) == [
            ("control", "L0", None),
            ("ape-left-out", "L0", 200.0),
            ("gradients-swapped", "L0", 200.0),
            ("leaf-serial", "L0", 200.0),
            ("control", "L1", None),
            ("gradients-swapped", "L1", 200.0),
        ]
        assert self.status == 1
        out = capsys.readouterr().out
        assert "2 of 3 faults killed on cpu: 1 at L0, 1 at L1" in out
        assert "1 of them by the clause they were meant for" in out

    def test_no_level_without_its_control(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ends = {**self.ENDS, ("control", "L1"): End("broken", "replay", "test_slow")}
        assert self.course(monkeypatch, ends)[-1] == ("control", "L1", None)
        assert self.status == 1
        assert "the suites must pass without one, and do not: replay test_slow" in capsys.readouterr().out

    def test_all_killed_quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is left for L1, so that nothing runs there."""
        ends = {
            (name, "L0"): End("broken", "memory", "test")
            for name in ("ape-left-out", "gradients-swapped", "leaf-serial")
        }
        assert [level for _, level, _ in self.course(monkeypatch, ends)] == ["L0"] * 4
        assert self.status == 0


def test_a_hanging_process_is_ended(tmp_path: Path) -> None:
    """It kills the fault if the catalogue says so, and else is an error."""
    end = run_session(HANGS, "L0", tmp_path, device="cpu", threads=1, limit=5.0, suites=QUICK)
    assert (end.kind, end.clause) == ("hang", "hang")
    assert Fate.of(HANGS, "L0", end).word == "error"
    expected = fault("hangs", HANGS.before, HANGS.after, ends=("hang",))
    assert Fate.of(expected, "L0", end).word == "killed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_ends_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """Whatever is still running is killed, what came of it before has been said, and no file is written."""
    options = ["-k", "tail", "-n", "1", "--device", "cpu", "--json", "fates.json", "--html", "fates.html"]
    run = subprocess.Popen(
        [sys.executable, "-m", "csa_gate", "mutants", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )
    time.sleep(8)  # the control run alone takes many times as long
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (130, "python -m csa_gate mutants: stopped before its end\n")
    assert list(tmp_path.iterdir()) == []


def test_another_clause_first_is_told() -> None:
    fate = Fate.of(BY_ID["ape-left-out"], "L0", End("broken", "memory", "test_guards[one-row-nan]"))
    assert fate.killed and not fate.as_meant
    assert "killed at L0 by memory (meant for forward_bits)" in line(fate)
    (row,) = [text for text in table([fate], []) if text.startswith("ape-left-out")]
    marks = row.split()[1]
    assert marks[CLAUSES.index("memory")] == "#" and marks[CLAUSES.index("forward_bits")] == "o"
