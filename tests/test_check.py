"""`python -m csa_gate check`: exit status and output for kept, broken and impossible cases."""

import importlib.metadata
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import csa_gate
from csa_gate.__main__ import COMMANDS, main
from csa_gate.oracles import CLAUSES
from csa_gate.oracles.judge import SINGLE_RESULT

PROBLEM = "Problem(lens=(9, 3), ratio=4, coff=2, head_dim=8, row_capacity=3)"

KERNELS = '''
import torch
from csa_gate.fixtures.adapters.eager import EagerKernel
from csa_gate.oracles import Contract

class Late(EagerKernel):
    """Does not write the last row of out."""
    name = "late"

    def forward(self, *args, out, **kwargs):
        row = out[-1].clone()
        super().forward(*args, out=out, **kwargs)
        out[-1] = row

class Stale(EagerKernel):
    """Does not write the tail's gradients."""
    name = "stale"

    def backward(self, *args, grad_kv, **kwargs):
        tail = grad_kv[8].clone()
        super().backward(*args, grad_kv=grad_kv, **kwargs)
        grad_kv[8] = tail

class Greedy(EagerKernel):
    """Adds ape to score in place."""
    name = "greedy"

    def forward(self, kv, score, *args, **kwargs):
        super().forward(kv, score, *args, **kwargs)
        score[2, 5] += 1

class Picky(EagerKernel):
    name = "picky"

    def supports(self, problem):
        return f"ratio {problem.ratio} is not 128" if problem.ratio != 128 else None

class Silent(EagerKernel):
    name = "silent"

    def contract(self, device):
        return Contract(replay=True)

class Sloppy(EagerKernel):
    """Leaves an element of out as it was."""
    name = "sloppy"

    def forward(self, *args, out, **kwargs):
        kept = out[0, 0].clone()
        super().forward(*args, out=out, **kwargs)
        out[0, 0] = kept

class Padded(EagerKernel):
    name = "padded"

    def contract(self, device):
        return Contract(row_padding=True)

class Elsewhere(EagerKernel):
    name = "elsewhere"

    def contract(self, device):
        return None
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "kernels_of_check.py"
    path.write_text(textwrap.dedent(KERNELS))
    return path


def check(capsys, kernel, *options, problem=PROBLEM):
    """Exit status, stdout and stderr of one run of the command in this process, on the CPU."""
    argv = ["check", "--kernel", str(kernel), "--problem", problem, "--device", "cpu", *options]
    try:
        status = main(argv)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("poison", ["nan", "aa", "zero"])
def test_kept_contract(capsys, poison):
    """The eager adapter keeps what it claims: status 0, the clauses listed."""
    status, out, err = check(capsys, "eager", "--poison", poison, "--distribution", "peaked", "--seed", "5")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "contract kept"
    assert lines[1] == f"kernel eager, {PROBLEM}, distribution peaked, seed 5, device cpu"
    assert lines[2:] == ["kept: memory, error_bound, zero_slots, row_padding, nonfinite"]


@pytest.mark.parametrize(
    ("name", "clause", "poison", "where"),
    [
        ("Late", "row_padding", "nan", "first out[2, 0]: got nan (0x7FC0)"),
        ("Stale", "zero_slots", "aa", "all wrong elements hold the same bits: -3.01980663e-13 (0xAAAA)"),
        ("Greedy", "memory", "nan", "score: 1 elements of this input were changed, first score[2, 5]"),
    ],
)
def test_broken_contract(capsys, kernels, name, clause, poison, where):
    """A planted fault gives status 1, names clause and place, and the printed command gives the same again."""
    status, out, _ = check(capsys, f"{kernels}:{name}", "--poison", poison)
    assert status == 1
    assert out.startswith(f"contract broken: {clause}\n")
    assert where in out
    command = shlex.split(next(line for line in out.splitlines() if line.startswith("reproduce: ")))[1:]
    assert command[:3] == ["python", "-m", "csa_gate"]
    again = main(command[3:])
    assert (again, capsys.readouterr().out) == (status, out)


def test_poison_can_hide_a_fault(capsys, kernels):
    """A slot left unwritten passes over a buffer of zeros, which is why the command names the poison."""
    assert check(capsys, f"{kernels}:Stale", "--poison", "zero")[0] == 0


def test_one_clause(capsys, kernels):
    """--clause narrows what is judged; it may be repeated."""
    kernel = f"{kernels}:Stale"
    status, out, _ = check(capsys, kernel, "--clause", "row_padding", "--clause", "error_bound")
    assert (status, out.splitlines()[-1]) == (0, "kept: error_bound, row_padding")
    assert check(capsys, kernel, "--clause", "zero_slots")[0] == 1
    status, out, _ = check(capsys, kernel, "--clause", "memory")
    assert (status, out.splitlines()[-1]) == (0, "kept: memory")


def test_property(capsys, kernels):
    """--property judges a relation between runs in place of a single run, under all its clauses or some."""
    status, out, err = check(capsys, "eager", "--property", "grown-rows", "--distribution", "masked")
    assert (status, err, out.splitlines()[-1]) == (0, "", "kept: row_padding")
    status, out, _ = check(capsys, f"{kernels}:Sloppy", "--property", "repeated", "--clause", "deterministic")
    assert status == 1
    assert out.startswith("contract broken: deterministic\n")
    assert "(repeated)" in out
    command = shlex.split(next(line for line in out.splitlines() if line.startswith("reproduce: ")))[1:]
    assert command[-4:] == ["--property", "repeated", "--clause", "deterministic"]
    again = main(command[3:])
    assert (again, capsys.readouterr().out) == (status, out)


@pytest.mark.parametrize(
    ("kernel", "problem", "options", "message"),
    [
        ("nosuch", PROBLEM, [], "nosuch"),
        ("no.such.module:k", PROBLEM, [], "no.such.module"),
        ("{}:Nothing", PROBLEM, [], "Nothing"),
        ("{}:Picky", PROBLEM, [], "--problem: kernel picky does not take it: ratio 4 is not 128"),
        ("{}:Silent", PROBLEM, [], "--kernel: silent claims no clause that a single run can show"),
        ("{}:Elsewhere", PROBLEM, [], "does not run on cpu"),
        ("{}:Padded", "Problem(lens=(9,), ratio=4, coff=1, head_dim=2)", [], "row_padding has nothing to look at in"),
        ("eager", "Problem(lens=(9,), ratio=0, coff=1, head_dim=2)", [], "ratio: got 0, need an integer >= 1"),
        ("eager", "__import__('os')", [], "problem: got"),
        ("eager", PROBLEM, ["--seed", "-1"], "seed: got -1"),
        ("eager", PROBLEM, ["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        ("eager", PROBLEM, ["--distribution", "odd"], "argument --distribution: invalid choice: 'odd'"),
        ("eager", PROBLEM, ["--poison", "odd"], "argument --poison: invalid choice: 'odd'"),
        ("eager", PROBLEM, ["--clause", "replay"], "argument --clause: invalid choice: 'replay'"),
        ("eager", PROBLEM, ["--clause", "deterministic"], "--clause: got deterministic, need one that a single"),
        ("eager", PROBLEM, ["--property", "odd"], "argument --property: invalid choice: 'odd'"),
        ("eager", PROBLEM, ["--property", "repeated", "--clause", "memory"], "need one that --property repeated can"),
        ("eager", PROBLEM, ["--property", "segment-alone"], "claims no clause that --property segment-alone can show"),
        ("eager", "Problem(lens=(2,), ratio=4, coff=1, head_dim=2)", ["--property", "grown-rows"], "nothing to look"),
        ("eager", PROBLEM, ["--clause", "dape_bits"], "--clause: kernel eager does not claim dape_bits"),
        ("eager", PROBLEM, ["--speed"], "unrecognized arguments: --speed"),
    ],
)
def test_impossible_cases(capsys, kernels, kernel, problem, options, message):
    """What cannot be judged ends with status 2 and one line on stderr that says why."""
    status, out, err = check(capsys, kernel.format(kernels), *options, problem=problem)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("python -m csa_gate check: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1


def test_single_run_clauses_are_clauses():
    """What the command can judge is a part of what a contract can claim."""
    assert set(SINGLE_RESULT) | {"memory"} < set(CLAUSES)


def test_unknown_commands(capsys):
    """An unknown or missing command is an error of one line that lists the known ones."""
    for argv in (["nosuch"], []):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("python -m csa_gate: error: ")
        assert err.count("\n") == 1


def test_version(capsys):
    """--version prints the number of the distribution, which is that of the package."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    number = importlib.metadata.version("csa-gate")
    assert capsys.readouterr().out == f"csa-gate {number}\n"
    assert csa_gate.__version__ == number


def test_help_lists_every_command(capsys):
    """--help names each command and what it does, and each command has a help of its own."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert name in out
        assert text in out
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"python -m csa_gate {name}" in capsys.readouterr().out


def test_as_a_process(kernels):
    """The module runs as a command, and its exit status is the process's."""
    argv = [sys.executable, "-m", "csa_gate", "check", "--problem", PROBLEM, "--device", "cpu", "--kernel"]
    done = subprocess.run([*argv, f"{kernels}:Stale"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("contract broken: zero_slots\n")


RAISES = """
import torch
from csa_gate.oracles import Contract

class Raises:
    name = "raises"
    def contract(self, device):
        return Contract(zero_slots=True)
    def supports(self, problem):
        return None
    def forward(self, *inputs, ratio, coff, out):
        raise {error}
    def backward(self, *inputs, ratio, coff, grad_kv, grad_score, grad_ape):
        pass

class Refuses(Raises):
    def supports(self, problem):
        return False
"""


@pytest.mark.parametrize("error", ["SystemExit(0)", "ValueError('boom')"])
def test_a_kernel_that_raises_fails(error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a kernel raises, the command ends with status 1 and says which kernel it was."""
    path = tmp_path / "mine.py"
    path.write_text(RAISES.format(error=error))
    assert (
        main(["check", "--kernel", f"{path}:Raises", "--problem", "Problem(lens=(9,), ratio=4, coff=2, head_dim=8)"])
        == 1
    )
    assert f"kernel raises raised {error.partition('(')[0]}" in capsys.readouterr().out


def test_supports_says_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RAISES.format(error="OSError"))
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--kernel", f"{path}:Refuses", "--problem", "Problem(lens=(9,), ratio=4, coff=2, head_dim=8)"])
    assert "supports() returned False, need None or the reason why not" in capsys.readouterr().err
