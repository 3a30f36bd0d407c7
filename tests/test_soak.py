"""`python -m csa_gate soak`: what it finds, counts, writes, and how it ends."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from csa_gate import _soak
from csa_gate.__main__ import main
from csa_gate._soak import Soak
from csa_gate.fixtures.adapters.eager import kernel as eager
from csa_gate.fixtures.adapters.fused import portable
from csa_gate.fixtures.drawn import FAMILIES
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.oracles import Contract, Problem

PLANTED = Path(__file__).with_name("outside") / "planted.py"
CPU = torch.device("cpu")

KERNELS = '''
from csa_gate.fixtures.adapters.eager import EagerKernel
from csa_gate.oracles import Contract

class Refuses(EagerKernel):
    def supports(self, problem):
        return "not today"

class RefusesLong(EagerKernel):
    def supports(self, problem):
        return "too long" if problem.window > 32 else None

class ClaimsReplay(EagerKernel):
    def contract(self, device):
        return Contract(replay=True)

class Raises(EagerKernel):
    def backward(self, *inputs, **outputs):
        raise RuntimeError("boom")

class Interrupted(EagerKernel):
    """As if someone pressed Ctrl-C in the sixth call."""
    calls = 0

    def forward(self, *inputs, **outputs):
        self.calls += 1
        if self.calls == 6:
            raise KeyboardInterrupt
        super().forward(*inputs, **outputs)

class LateFault(EagerKernel):
    """Writes no last row once there are more than two."""
    def forward(self, *inputs, out, **options):
        kept = out[2:].clone()
        super().forward(*inputs, out=out, **options)
        out[2:] = kept
'''


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels_of_soak.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute has 100 ticks, and each look at the clock takes one: the end comes whatever the machine is like."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(_soak, "monotonic", lambda: 0.6 * next(ticks))


def soak(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["soak", "--device", "cpu", *options])
    return status, capsys.readouterr().out


def test_a_sound_kernel_passes(capsys: pytest.CaptureFixture[str], short: None, tmp_path: Path) -> None:
    """Every clause that can be judged is, in every family; the file has what the table has."""
    file = tmp_path / "soak.json"
    status, out = soak(capsys, "--minutes", "0.8", "--kernel", "eager", "--seed", "3", "--json", str(file))
    assert status == 0, out
    report = json.loads(file.read_text())
    assert out.splitlines()[0] == "kernel eager, device cpu, seed 3, 0.8 minutes"
    assert out.splitlines()[-1] == f"soak passed: {report['problems']} problems"
    assert (report["kernel"], report["device"], report["seed"], report["stopped"]) == ("eager", "cpu", 3, False)
    assert report["failures"] == []
    assert report["problems"] > 60
    assert sum(sum(report["ratios"][family.name].values()) for family in FAMILIES) == report["problems"]
    assert "not reached" not in out
    table = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:-4]}
    for clause in ("error_bound", "zero_slots", "row_padding", "token_padding", "nonfinite", "memory", "deterministic"):
        counts = report["counts"][clause]
        assert [int(n) for n in table[clause]] == [*(counts[f.name]["kept"] for f in FAMILIES), 0]
    assert " ".join(table["replay"]) == "claimed, but not judged here"
    assert "forward_bits" not in table


def test_what_a_short_run_did_not_reach(
    capsys: pytest.CaptureFixture[str], short: None, kernels: Path, tmp_path: Path
) -> None:
    """Two problems, for three families: it passes, and says which windows and ratios that is worth nothing for."""
    file = tmp_path / "soak.json"
    status, out = soak(capsys, "--minutes", "0.03", "--kernel", "eager", "--seed", "3", "--json", str(file))
    assert status == 0
    lines = out.splitlines()
    assert re.fullmatch(r"short windows, 1-8: 1 problems, ratios \d", lines[-4])
    assert re.fullmatch(r"middle windows, 9-32: 1 problems, ratios \d+", lines[-3])
    assert lines[-2:] == [
        "long windows, 33-512: not reached",
        "soak passed: 2 problems; not reached: windows 33-512",
    ]
    ratios = json.loads(file.read_text())["ratios"]
    assert list(ratios) == ["short", "middle", "long"] and len(ratios["short"]) == 1 and not ratios["long"]
    status, out = soak(capsys, "--minutes", "0.4", "--kernel", f"{kernels}:RefusesLong", "--seed", "3")
    assert status == 0
    assert out.endswith("; not reached: windows 33-512\n")


def test_ratios_in_short() -> None:
    assert [_soak._runs(numbers) for numbers in ([], [4], [1, 2, 3, 7, 9, 10])] == ["", "4", "1-3, 7, 9-10"]


def test_a_seed_gives_the_same_problems() -> None:
    """And another seed others."""
    drawn = []
    for seed in (1, 1, 2):
        soak = Soak(eager, "eager", CPU, seed)
        for _ in range(30):
            soak.step()
        drawn.append((soak.counts, soak.cases))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("kernel", "clause"),
    [
        ("LeavesTails", "zero_slots"),
        ("ScalesInPlace", "memory"),
        ("RoundsApe", "error_bound"),
        ("LeaksPadding", "row_padding"),
    ],
)
def test_faults_are_found_counted_and_seen_again(
    kernel: str, clause: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that a failure prints breaks the same clause again."""
    monkeypatch.setattr(_soak, "draw_shape", lambda *_, **__: (4, 2, 8))  # one compilation is enough
    spec = f"{PLANTED}:{kernel}"
    soak = Soak(load_kernel(spec), spec, CPU, 0)
    for _ in range(60):
        soak.step()
    broken = [failure for failure in soak.failures if clause in failure["clauses"]]
    assert broken
    assert sum(soak.counts[clause, family.name, False] for family in FAMILIES) == len(broken)
    assert capsys.readouterr().out.count("reproduce: ") == min(len(soak.failures), _soak._SHOWN)
    command = re.search(r"reproduce: python -m csa_gate (.*)", broken[0]["message"])[1]
    assert main(shlex.split(command)) == 1
    assert clause in capsys.readouterr().out.splitlines()[0]


def test_failures_end_with_1(capsys: pytest.CaptureFixture[str], short: None, kernels: Path, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    status, out = soak(
        capsys, "--minutes", "0.3", "--kernel", f"{kernels}:LateFault", "--seed", "0", "--json", str(file)
    )
    assert status == 1
    assert "contract broken: " in out
    report = json.loads(file.read_text())
    assert f"soak failed: {len(report['failures'])} failures in {report['problems']} problems" in out
    assert all("reproduce: python -m csa_gate check" in failure["message"] for failure in report["failures"])


def test_a_kernel_that_raises_fails(capsys: pytest.CaptureFixture[str], short: None, kernels: Path) -> None:
    status, out = soak(capsys, "--minutes", "0.2", "--kernel", f"{kernels}:Raises", "--seed", "0")
    assert status == 1
    assert "kernel eager raised RuntimeError: boom\nreproduce: python -m csa_gate check" in out
    assert re.search(r"^raised +\d+ ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("Refuses", "nothing was judged in 0 problems; the last refused: not today"),
        ("ClaimsReplay", "nothing was judged in "),
    ],
)
def test_nothing_judged_is_a_failure(
    kernel: str, why: str, capsys: pytest.CaptureFixture[str], short: None, kernels: Path
) -> None:
    status, out = soak(capsys, "--minutes", "0.2", "--kernel", f"{kernels}:{kernel}")
    assert status == 1
    assert f"soak failed: {why}" in out


def test_ctrl_c_prints_the_counts_so_far(capsys: pytest.CaptureFixture[str], kernels: Path, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    status, out = soak(
        capsys, "--minutes", "60", "--kernel", f"{kernels}:Interrupted", "--seed", "0", "--json", str(file)
    )
    assert status == 130
    assert re.search(r"^error_bound +[1-9]", out, re.MULTILINE)
    assert out.endswith("stopped before its end\n")
    assert json.loads(file.read_text())["stopped"] is True


def test_significance_and_unspecified_bits_are_left_out() -> None:
    """dape_accuracy never; for one column on CUDA not the bits of `eager`, whose order is not known there."""
    soak = Soak(portable, "fused-portable", CPU, 0)
    for _ in range(3):
        soak.step()
    assert not any(clause == "dape_accuracy" for clause, _, _ in soak.counts)
    soak.device, soak.contract = torch.device("cuda"), Contract(forward_bits="eager", gradient_bits="eager")
    assert "forward_bits" in soak._left_out(Problem((8,), 4, 2, 1))
    assert "forward_bits" not in soak._left_out(Problem((8,), 4, 2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --minutes"),
        (["--minutes", "0"], "--minutes: got 0.0, need a number above 0"),
        (["--minutes", "nan"], "--minutes: got nan, need a number above 0"),
        (["--minutes", "1", "--seed", "-1"], "--seed: got -1, need an integer in [0, 2**64)"),
        (["--minutes", "1", "--json", "/no/such/folder/f.json"], "--json: got /no/such/folder/f.json, need a file"),
        (["--minutes", "1", "--kernel", "nosuch"], "nosuch"),
    ],
)
def test_options_that_make_no_sense(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["soak", *options])
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
