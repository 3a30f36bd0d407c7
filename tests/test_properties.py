"""Relations between runs: each is broken by a planted fault, shrunk, and seen again by the command it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

import csa_gate.suites.properties as suite
from csa_gate.__main__ import main
from csa_gate.fixtures.adapters.eager import EagerKernel
from csa_gate.fixtures.adapters.fused import portable
from csa_gate.fixtures.cases import Case
from csa_gate.fixtures.drawn import FAMILIES, Family, Pick, draw_case, draw_shape
from csa_gate.fixtures.relate import relate
from csa_gate.fixtures.relations import RELATIONS
from csa_gate.oracles import DISTRIBUTIONS, Contract, Problem, Slot, parse_problem
from csa_gate.oracles.contract import CLAUSES
from csa_gate.oracles.ordered import ordered
from csa_gate.oracles.orders import pool_lanes, softmax_lanes

from .test_plugin import BARE

PLANTED = Path(__file__).with_name("outside") / "planted_properties.py"
SUITE = f"{Path(suite.__file__).parent / 'test_compressor.py'}::TestCompressor::test_property"
COMMON = (*BARE, "--import-mode=importlib", "--csa-device=cpu")
RELATION = {relation.name: relation for relation in RELATIONS}

FAULTS: dict[str, list[str]] = {
    "Wavers": ["repeated-deterministic-short", "repeated-dape_deterministic-short"],
    "NumbersSegments": ["permuted-segments-batch_invariance-short"],
    "SeesThePack": ["segment-alone-batch_invariance-middle"],
    "CountsSegments": ["empty-segment-batch_invariance-short"],
    "CountsBlocks": ["split-segment-batch_invariance-short"],
    "CountsRows": ["grown-rows-row_padding-short"],
    "CountsTokens": ["grown-tokens-token_padding-short"],
    "RoundsLogits": [
        f"shifted-logits-{c}-short" for c in ("forward_bits", "gradient_bits", "dape_bits", "error_bound")
    ],
    "HalfValues": [f"scaled-kv-{c}-short" for c in ("forward_bits", "gradient_bits", "dape_bits", "error_bound")],
    "ClipsLargeGradients": [f"scaled-grad-out-{c}-short" for c in ("gradient_bits", "dape_bits", "error_bound")],
    "ClipsGradients": ["summed-gradients-error_bound-short"],
    "FavoursAColumn": [f"permuted-columns-{c}-short" for c in ("forward_bits", "gradient_bits", "dape_bits")],
    "CopiesAColumn": ["permuted-columns-error_bound-short"],
}
"""Kernel, and the tests that must fail."""


def run(pytester: pytest.Pytester, kernel: str, tests: list[str]) -> dict[str, pytest.TestReport]:
    """The reports of some tests of the suite, by test, run over a planted kernel."""
    recorder = pytester.inline_run(SUITE, "-k", " or ".join(tests), f"--csa-kernel={PLANTED}:{kernel}", *COMMON)
    reports: list[pytest.TestReport] = recorder.getreports("pytest_runtest_logreport")
    return {re.search(r"\[(.*)\]", r.nodeid)[1]: r for r in reports if r.when == "call"}


def test_sound_kernel_keeps_what_the_faulty_ones_break(pytester: pytest.Pytester) -> None:
    tests = [test for some in FAULTS.values() for test in some]
    reports = run(pytester, "Sound", tests)
    assert [r.longreprtext for r in reports.values() if not r.passed] == []
    assert len(reports) == len(tests)


@pytest.mark.parametrize("kernel", FAULTS)
def test_fault_is_caught_and_seen_again(
    pytester: pytest.Pytester, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failure names clause, relation and a small problem; `check` with what it prints breaks the same clause."""
    reports = run(pytester, kernel, FAULTS[kernel])
    assert set(reports) == set(FAULTS[kernel])
    for test, report in reports.items():
        relation, clause, _ = re.fullmatch(rf"(.*)-({'|'.join(CLAUSES)})-(\w+)", test).groups()
        assert report.failed, test
        text = report.longreprtext
        assert f"contract broken: {clause}\n" in text, text
        assert f"({relation})" in text
        command = re.search(r"reproduce: python -m csa_gate (check .*)", text)
        assert command is not None, text
        argv = shlex.split(command[1])
        assert argv[-4:] == ["--property", relation, "--clause", clause]
        shrunk = parse_problem(argv[argv.index("--problem") + 1])
        assert shrunk.tokens <= 4 * shrunk.ratio, f"not shrunk: {shrunk}"
        capsys.readouterr()
        assert main(argv) == 1
        assert f"contract broken: {clause}\n" in capsys.readouterr().out
    assert not list(pytester.path.rglob(".hypothesis")), "hypothesis left files in the current folder"


def test_a_kernel_that_raises_fails_with_the_command(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        mine="""
        from csa_gate.fixtures.adapters.eager import EagerKernel

        class Raises(EagerKernel):
            def forward(self, *inputs, out, **kwargs):
                if len(out):
                    raise RuntimeError("no rows, please")
        """
    )
    (report,) = (
        r
        for r in pytester.inline_run(
            SUITE, "-k", "repeated-deterministic-short", f"--csa-kernel={pytester.path}/mine.py:Raises", *COMMON
        ).getreports("pytest_runtest_logreport")
        if r.when == "call"
    )
    assert report.failed
    assert "no rows, please" in report.longreprtext
    assert "reproduce: python -m csa_gate check --kernel" in report.longreprtext


@pytest.mark.parametrize("refuses", ["everything", "nothing to look at"])
def test_nothing_to_look_at_is_skipped(pytester: pytest.Pytester, refuses: str) -> None:
    """Where no drawn problem shows the relation, the test says so instead of passing."""
    only = "'not today'" if refuses == "everything" else "None if len(problem.lens) < 2 else 'one segment only'"
    pytester.makepyfile(
        mine=f"""
        from csa_gate.fixtures.adapters.fused import FusedKernel

        class Picky(FusedKernel):
            def __init__(self):
                super().__init__("picky", "portable")

            def supports(self, problem):
                return {only}
        """
    )
    recorder = pytester.inline_run(
        SUITE, "-k", "permuted-segments and short", f"--csa-kernel={pytester.path}/mine.py:Picky", *COMMON
    )
    (report,) = (r for r in recorder.getreports("pytest_runtest_logreport") if r.when == "call")
    assert report.skipped
    assert ("not today" if refuses == "everything" else "one segment only") in str(report.longrepr)


def test_nightly_draws_more_and_any_shape(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """HYPOTHESIS_PROFILE=nightly; another profile is of other tests and changes nothing here."""
    pytester.makepyfile(
        mine="""
        from csa_gate.fixtures.adapters.eager import EagerKernel

        class Watched(EagerKernel):
            def supports(self, problem):
                with open("seen", "a") as file:
                    print(problem.ratio, problem.coff, problem.head_dim, file=file)
                return "only watching"
        """
    )
    monkeypatch.setattr(suite, "NIGHTLY", hypothesis.settings(suite.NIGHTLY, max_examples=60))
    shapes = {}
    for profile in ("nightly", "theirs"):
        monkeypatch.setenv("HYPOTHESIS_PROFILE", profile)
        pytester.inline_run(
            SUITE, "-k", "repeated-deterministic-short", f"--csa-kernel={pytester.path}/mine.py:Watched", *COMMON
        )
        seen = pytester.path / "seen"
        shapes[profile] = [tuple(map(int, line.split())) for line in seen.read_text().splitlines()]
        seen.unlink()
    assert len(shapes["theirs"]) <= suite.QUICK.max_examples
    assert set(shapes["theirs"]) <= set(FAMILIES[0].shapes)
    assert len(shapes["nightly"]) > suite.QUICK.max_examples
    assert not set(shapes["nightly"]) <= set(FAMILIES[0].shapes)


# What is drawn.


def picker(seed: int) -> Pick:
    rng = np.random.default_rng(seed)
    return lambda low, high: int(rng.integers(low, high, endpoint=True))


def traits(case: Case) -> set[str]:
    """What is in a drawn case."""
    p = case.problem
    found = {case.distributions[0]}
    found |= {Slot(s).name for s in np.unique(p.slots)}
    for name, there in {
        "no segments": not p.lens,
        "no rows": not p.rows,
        "empty segment": 0 in p.lens,
        "padding rows": p.total_comp > p.rows,
        "more than a leaf": p.rows > 32,
        "many segments": len(p.lens) > 5,
        "token 0's block in padding": p.total_comp > p.rows and p.tokens < p.ratio,
    }.items():
        found |= {name} if there else set()
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("any_shape", [False, True])
def test_problems_drawn_reach_every_kind(family: Family, any_shape: bool) -> None:
    pick, found, windows = picker(0), set(), set()
    for _ in range(1500):
        shape = draw_shape(pick, family) if any_shape else family.shapes[pick(0, len(family.shapes) - 1)]
        case = draw_case(pick, shape)
        p = case.problem
        assert (p.ratio, p.coff, p.head_dim) == shape
        found |= traits(case)
        windows.add(p.window)
        assert p.total_comp * p.window * p.head_dim <= max(2**16, 5 * p.window * p.head_dim), "slow to judge"
    wanted = {*DISTRIBUTIONS, *Slot.__members__, "no segments", "no rows", "empty segment", "padding rows"}
    wanted |= {"token 0's block in padding"} if family.windows[0] > 1 else set()
    wanted |= {"more than a leaf", "many segments"} if family.name == "short" or any_shape else set()
    assert found >= wanted
    low, high = family.windows
    assert min(windows) >= low
    assert max(windows) <= high
    if any_shape and family.name != "long":
        assert {low, high} <= windows


def test_long_shapes_have_lanes_in_both_orders_and_in_each_alone() -> None:
    lanes = {(softmax_lanes(c * r, d) > 1, pool_lanes(c * r, d) > 1) for r, c, d in FAMILIES[-1].shapes}
    assert lanes == {(True, True), (True, False), (False, True)}


def test_the_same_picks_draw_the_same_case() -> None:
    for seed in range(20):
        assert draw_case(picker(seed), (4, 2, 8)) == draw_case(picker(seed), (4, 2, 8))


# What relations derive.

PACK = Problem((9, 0, 3, 16, 7), 4, 2, 6, row_capacity=9, token_capacity=40)


def derived(name: str, distribution: str, seed: int = 0, problem: Problem = PACK):
    inputs = Case("", problem, (distribution,), seed=seed).inputs("cpu")
    return RELATION[name].derive(inputs, np.random.default_rng(seed))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_shifted_logits_are_exact(distribution: str) -> None:
    """No sum of score and ape rounds, shifted or not, and the shift is really there."""
    for seed in range(5):
        pair = derived("shifted-logits", distribution, seed)
        for inputs in (*pair.given, pair.subject):
            score = inputs.score.view(-1, 1, 12)
            exact = score.double() + inputs.ape.double()
            assert torch.equal((score.float() + inputs.ape).double().nan_to_num(), exact.nan_to_num())
        assert (pair.subject.ape != pair.given[0].ape).any()


@pytest.mark.parametrize("name", ["scaled-kv", "scaled-grad-out"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scaled_results_are_normal(distribution: str, name: str) -> None:
    """Neither run has a subnormal in any result of fp32, nor an Inf that its inputs do not have."""
    for seed in range(5):
        pair = derived(name, distribution, seed)
        for inputs in (*pair.given, pair.subject):
            finite = all(bool(t.isfinite().all()) for t in (inputs.kv, inputs.score, inputs.ape, inputs.grad_out))
            for _, tensor in ordered(inputs, exp="portable", output_dtype=torch.float32).items():
                size = tensor.abs()
                assert not ((size > 0) & (size < 2.0**-126)).any()
                assert not (finite and torch.isinf(tensor).any())


def test_a_split_with_overlap_leaves_out_what_changes_and_no_more() -> None:
    """The row after the cut and what it alone feeds on: of each side, exactly those groups differ."""
    problem = Problem((12,), 4, 2, 5)
    for seed in range(6):
        pair = derived("split-segment", "normal", seed, problem)
        want, got = (ordered(i, exp="portable") for i in (pair.given[0], pair.subject))
        for name in ("out", "grad_kv", "grad_score"):
            same = (getattr(want, name) == getattr(got, name)).view(len(getattr(got, name)), -1, 5)
            assert torch.equal(same.all(-1), pair.groups[name])
        assert not pair.groups["out"].all()


def test_claims_decide_what_is_compared() -> None:
    """A clause that is not claimed is not judged; padding compares what the kernel claims to repeat."""
    inputs = Case("", PACK).inputs("cpu")
    kernel = EagerKernel()
    assert relate(RELATION["permuted-segments"], kernel, Contract(), inputs, CLAUSES) == []
    assert relate(RELATION["grown-rows"], kernel, Contract(row_padding=True), inputs, CLAUSES) == []
    (verdict,) = relate(RELATION["grown-tokens"], portable, portable.contract(inputs.device), inputs, CLAUSES)
    assert verdict
    assert verdict.checked == ("token_padding",)


def test_every_relation_has_a_planted_fault() -> None:
    caught = {test.removesuffix(f"-{clause}-{family.name}") for some in FAULTS.values() for test in some
              for clause in CLAUSES for family in FAMILIES}  # fmt: skip
    assert set(RELATION) <= caught
