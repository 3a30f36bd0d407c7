"""`mp` on ties, on results a hair from a tie, and on Inf and NaN: windows by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import pytest
import torch

from csa_gate.oracles.bits import classes, same_bits
from csa_gate.oracles.eager import eager
from csa_gate.oracles.inputs import Inputs
from csa_gate.oracles.mp import mp
from csa_gate.oracles.problem import Problem

FAR = -(2.0**100)  # a logit whose weight is positive, but out of reach of any working precision
E = 2.0**-7  # one bf16 ulp of 1
TINY = 2.0**-133  # the least bf16
MAX = float(torch.finfo(torch.bfloat16).max)

Row = tuple[Sequence[float], Sequence[float], float]  # scores, kv and incoming gradient of one window


def one_window(score: Sequence[float], kv: Sequence[float], go: float) -> Inputs:
    """A single row of one column over all the tokens, with a zero ape."""
    return rows(len(score), [(score, kv, go)])


def rows(ratio: int, windows: Sequence[Row]) -> Inputs:
    """One column without overlap."""
    p = Problem((ratio * len(windows),), ratio, 1, 1)

    def column(values: list[float]) -> torch.Tensor:
        exact = torch.tensor(values, dtype=torch.float64)[:, None]
        cast = exact.to(torch.bfloat16)
        assert torch.equal(cast.double().nan_to_num(), exact.nan_to_num()), "a value that is not bf16"
        return cast

    return Inputs(
        p,
        kv=column([v for _, kv, _ in windows for v in kv]),
        score=column([s for score, _, _ in windows for s in score]),
        ape=torch.zeros((ratio, 1)),
        grad_out=column([go for _, _, go in windows]),
        cu_seqlens=torch.from_numpy(p.cu_seqlens.copy()),
        cu_seqlens_comp=torch.from_numpy(p.cu_seqlens_comp.copy()),
    )


def assert_value(got: torch.Tensor, want: float) -> None:
    assert same_bits(got, torch.tensor(want, dtype=torch.float64).to(got.dtype)), f"got {got.item()!r}, want {want!r}"


OUT_TIES = [
    ("tie to even below", [0, 0], [1, 1 + E], 1),
    ("tie to even above", [0, 0], [1 + E, 1 + 2 * E], 1 + 2 * E),
    ("the tie of equal logits at any place", [FAR, FAR], [1, 1 + E], 1),
    ("a hair above the tie", [0, 0, FAR], [1, 1 + E, 2], 1 + E),
    ("a hair below the tie", [0, 0, FAR], [1 + E, 1 + 2 * E, 0], 1 + E),
    ("a hair above, negative", [0, 0, FAR], [-1, -1 - E, -1], -1),
    ("a hair below, negative", [0, 0, FAR], [-1, -1 - E, -2], -1 - E),
    ("the nearer of two hairs decides", [0, 2 * FAR, 0, FAR], [1, 0, 1 + E, 2], 1 + E),
    ("hairs of one length that cancel leave the next", [0, FAR, 0, FAR, 2 * FAR], [1, 2, 1 + E, E, 2], 1 + E),
    ("a third of an ulp", [0, 0, 0], [1, 1, 1 + E], 1),
    ("a sixth of the least above the tie", [0] * 6, [2, 2, 1 + E, 1, 2 * E, TINY], 1 + E),
    ("subnormal tie, down", [0, 0], [TINY, 0], 0),
    ("subnormal tie, up", [0, 0], [TINY, 2 * TINY], 2 * TINY),
    ("a hair above half the least", [0, 0, FAR], [TINY, 0, 1], TINY),
    ("negative tie at zero is +0", [0, 0], [-TINY, 0], 0),
    ("negative and below the least is +0", [0, FAR], [0, -1], 0),
    ("the largest", [0, 1], [MAX, MAX], MAX),
    ("the largest at both ends", [0, 0], [MAX, -MAX], 0),
]


@pytest.mark.parametrize(("score", "kv", "want"), [c[1:] for c in OUT_TIES], ids=[c[0] for c in OUT_TIES])
def test_out_at_ties(score: list[float], kv: list[float], want: float) -> None:
    assert_value(mp(one_window(score, kv, 0)).out[0, 0], want)


@pytest.mark.parametrize(
    ("score", "go", "want"),
    [
        ([0, 0], 3 * TINY, 2 * TINY),
        ([0, 0], TINY, 0),
        ([0, 0], -TINY, 0),
        ([0, 0, FAR], 3 * TINY, TINY),  # the weight is a hair below 1/2
        ([0, 0, FAR], -3 * TINY, -TINY),
        ([0, 0, FAR], TINY, 0),
        ([FAR, 0], 1, 0),
        ([0, FAR], MAX, MAX),
        ([0, 0, 0], 3, 1),
    ],
)
def test_grad_kv_at_ties(score: list[float], go: float, want: float) -> None:
    assert_value(mp(one_window(score, [1] * len(score), go)).grad_kv[0, 0], want)


# grad_score of the first entry. With weights 1/2, 1/2 and a hair h for c, go = 1: ((a - b) + h (b - c)) / 4 to first
# order, and (a - b) (1 + h) / (2 + h)^2 < (a - b) / 4 if b = c. In the first six cases (a - b) / 4 is a tie.
LOW, MIDDLE, HIGH = 0.5, 0.5 + E / 2, 0.5 + E
SCORE_TIES = [
    ("tie to even below", [0, 0], [1, -1 - E], LOW),
    ("tie to even above", [0, 0], [1 + E, -1 - 2 * E], HIGH),
    ("a hair above", [0, 0, FAR], [1, -1 - E, -2], MIDDLE),
    ("a hair below", [0, 0, FAR], [1 + E, -1 - 2 * E, 0], MIDDLE),
    ("a hair below, of second order", [0, 0, FAR], [1 + E, -1 - 2 * E, -1 - 2 * E], MIDDLE),
    ("a hair above, negative", [0, 0, FAR], [-1 - E, 1 + 2 * E, 0], -MIDDLE),
    ("equal values", [0, 0.5, -3], [3, 3, 3], 0),
    ("a mean that is exact", [0, 0, 0], [1, 0, 2], 0),
    ("a mean that is exact with irrational weights", [0, 1, 1], [1, 0, 2], 0),
    ("negative and below the least is +0", [0, FAR], [0, 1], 0),
    ("overflow", [0, 0], [MAX, -MAX], inf),
    ("negative overflow", [0, 0], [-MAX, MAX], -inf),
]


@pytest.mark.parametrize(("score", "kv", "want"), [c[1:] for c in SCORE_TIES], ids=[c[0] for c in SCORE_TIES])
def test_grad_score_at_ties(score: list[float], kv: list[float], want: float) -> None:
    go = MAX if abs(want) == inf else 1
    assert_value(mp(one_window(score, kv, go)).grad_score[0, 0], want)


def half(value: float) -> Row:
    """A row of two entries with grad_score[0] = value, rational."""
    return [0, 0], [4, 0], value


def hair(sign: float, far: float = FAR) -> Row:
    """A row of two entries with a grad_score[0] of this sign and irrational, less than any working precision sees."""
    return [0, far], [1, 0], sign


U = 2.0**-24  # half an fp32 ulp of 1
APE_TIES = [
    ("tie to even below", [half(1), half(U)], 1),
    ("tie to even above", [half(1), half(3 * U)], 1 + 4 * U),
    ("a hair above", [half(1), hair(1), half(U)], 1 + 2 * U),
    ("a hair below", [half(1), hair(-1), half(3 * U)], 1 + 2 * U),
    ("two unlike hairs above", [half(1), half(U), hair(1), hair(1, 2 * FAR)], 1 + 2 * U),
    ("two unlike hairs below", [half(1), half(3 * U), hair(-1), hair(-1, 2 * FAR)], 1 + 2 * U),
    ("two like hairs that cancel", [half(1), half(3 * U), hair(-1), hair(1)], 1 + 4 * U),
    ("irrational rows that cancel", [half(1), ([0, 1], [1, 0], 1), half(U), ([3, 4], [0, -1], -1)], 1),
    ("rows that cancel to zero", [([0, 1], [1, 0], 1), ([0.5, 1.5], [1, 0], -1)], 0),
    ("overflow", [half(MAX), half(MAX)], inf),
]


@pytest.mark.parametrize(("windows", "want"), [c[1:] for c in APE_TIES], ids=[c[0] for c in APE_TIES])
def test_grad_ape_at_ties(windows: list[Row], want: float) -> None:
    assert_value(mp(rows(2, windows)).grad_ape[0, 0], want)


def test_grad_ape_merges_rows_whose_denominators_are_proportional() -> None:
    """(1 + e) and 2 (1 + e): the two irrational rows cancel, what remains is a tie."""
    pair: list[Row] = [([0, 1, -inf, -inf], [1, 0, 0, 0], 1), ([0, 0, 1, 1], [1, 1, 0, 0], -2)]
    ties: list[Row] = [([0, 0, 0, 0], [4, 0, 0, 4], value) for value in (0.5, 0.5 * U)]
    only = mp(rows(4, ties)).grad_ape[0, 0]
    assert_value(only, 0.25)
    assert_value(mp(rows(4, [ties[0], *pair, ties[1]])).grad_ape[0, 0], 0.25)


# Inf and NaN.

NONFINITE = [  # score, kv, go; out, grad_kv, grad_score (None: any finite value)
    ([-inf, -inf], [1, 2], 1, nan, [nan, nan], [nan, nan]),
    ([inf, 0], [1, 2], 1, nan, [nan, nan], [nan, nan]),
    ([nan, -inf], [1, 2], 0, nan, [nan, nan], [nan, nan]),
    ([-inf, 0], [1, 2], 3, 2, [0, 3], [0, 0]),
    ([-inf, 0], [inf, 2], 3, nan, [0, 3], [nan, nan]),
    ([-inf, 0], [1, 2], inf, 2, [nan, inf], [nan, nan]),
    ([0, 0], [inf, 2], 3, inf, [1.5, 1.5], [nan, -inf]),
    ([0, 0], [2, -inf], -3, -inf, [-1.5, -1.5], [-inf, nan]),
    ([0, 0], [inf, -inf], 3, nan, [1.5, 1.5], [nan, nan]),
    ([0, 0], [inf, 1], 0, inf, [0, 0], [nan, nan]),
    ([0, 0], [nan, 2], 3, nan, [1.5, 1.5], [nan, nan]),
    ([0, 0], [1, 2], inf, 1.5, [inf, inf], [nan, nan]),
    ([0, 0], [0, 2], -inf, 1, [-inf, -inf], [nan, nan]),
    ([0, 0], [1, 2], nan, 1.5, [nan, nan], [nan, nan]),
    ([0, -200], [1, inf], 3, nan, [3, 0], [nan, nan]),  # the second weight rounds to zero in fp32
    ([0, -80], [1, inf], -3, inf, [-3, None], [inf, nan]),
]


@pytest.mark.parametrize(("score", "kv", "go", "out", "dkv", "dscore"), NONFINITE)
def test_inf_and_nan(
    score: list[float], kv: list[float], go: float, out: float, dkv: list[float | None], dscore: list[float]
) -> None:
    """Each case by hand; the eager reference has Inf and NaN in the same places."""
    inputs = one_window(score, kv, go)
    got, reference = mp(inputs), eager(inputs)
    assert_value(got.out[0, 0], out)
    for tensor, wants in ((got.grad_kv, dkv), (got.grad_score, dscore), (got.grad_ape, dscore)):
        for element, want in zip(tensor[:, 0], wants, strict=True):
            if want is None:
                assert torch.isfinite(element)
            else:
                assert_value(element, want)
    for (name, a), (_, b) in zip(got.items(), reference.items(), strict=True):
        assert torch.equal(classes(a), classes(b)), name


def test_finite_inputs_whose_fp32_intermediates_overflow_have_finite_results() -> None:
    """Score + ape = 2^129 (1 - 2^-8) in both entries: weights 1/2."""
    inputs = one_window([MAX, MAX], [1, 2], 2)
    inputs.ape.fill_(MAX)
    got = mp(inputs)
    assert_value(got.out[0, 0], 1.5)
    assert_value(got.grad_score[1, 0], 0.5)
