"""`error_bound` holds for every way to compute in fp32, scales with the data, and catches less than fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from csa_gate.oracles import bound
from csa_gate.oracles.bound import C_EXP, error_bound
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.eager import eager
from csa_gate.oracles.fp64 import fp64
from csa_gate.oracles.inputs import Inputs, Result
from csa_gate.oracles.ordered import ordered
from csa_gate.oracles.problem import Problem
from csa_gate.oracles.windows import gather, logits, scatter, scatter_ape, valid

PROBLEMS = {
    "4x2": Problem((64, 7, 0, 33), 4, 2, 8, row_capacity=30, token_capacity=110),
    "2x2": Problem((301,), 2, 2, 6),
    "128x1": Problem((512,), 128, 1, 4),
    "1x1": Problem((16,), 1, 1, 4),
}
U, ETA = 2.0**-24, 2.0**-149


def serial(t: Tensor) -> Tensor:
    total = torch.zeros_like(t[:, :1])
    for k in range(t.shape[1]):
        total = total + t[:, k : k + 1]
    return total


def reversed_(t: Tensor) -> Tensor:
    return serial(t.flip(1))


def pairwise(t: Tensor) -> Tensor:
    while t.shape[1] > 1:
        t = torch.cat((t, torch.zeros_like(t[:, : t.shape[1] % 2])), dim=1)
        t = t[:, ::2] + t[:, 1::2]
    return t


def whole(t: Tensor) -> Tensor:
    return t.sum(1, keepdim=True)


def rough_exp(x: Tensor) -> Tensor:
    """Exp with errors up to C_EXP ulp, signs alternating from entry to entry."""
    bits = x.double().exp().float().view(torch.int32)
    step = torch.tensor([C_EXP - 1, 1 - C_EXP]).int().repeat(x.shape[1])[: x.shape[1], None]
    return torch.where(bits > 2 * C_EXP, bits + step, bits).view(torch.float32).where(x != 0, 1.0)


@dataclass(frozen=True)
class Variant:
    """One way to compute in fp32."""

    add: Callable[[Tensor], Tensor] = serial
    exp: Callable[[Tensor], Tensor] = torch.exp
    reciprocal: bool = False
    gradient: str = "t - pS"
    weights: torch.dtype = torch.float32

    def __call__(self, inputs: Inputs) -> Result:
        """All outputs in fp32."""
        p = inputs.problem
        kv = gather(inputs.kv, p, 0.0).float()
        x = logits(inputs.score, inputs.ape, p)
        go = inputs.grad_out.float()[:, None]
        e = self.exp(x - x.amax(1, keepdim=True))
        w = e * (1 / self.add(e)) if self.reciprocal else e / self.add(e)
        w = w.to(self.weights).float()
        out = self.add(kv * w)
        dscore = {
            "t - pS": lambda: go * kv * w - w * self.add(go * kv * w),
            "p (h - S)": lambda: w * (go * kv - self.add(w * (go * kv))),
            "dkv (kv - out)": lambda: (go * w) * (kv - out),
        }[self.gradient]()
        grads = [torch.zeros(inputs.kv.shape) for _ in range(2)]
        for windows, grad in zip((go * w, dscore), grads, strict=True):
            scatter(windows, p, grad)
        real = valid(p, "cpu") & (torch.arange(p.total_comp) < p.rows)[:, None, None]
        dape = self.add(dscore.where(real, 0.0).transpose(0, 1))[:, 0]
        return Result(out[:, 0], grads[0], grads[1], scatter_ape(dape, p))


VARIANTS = {
    "serial": Variant(),
    "reversed, reciprocal": Variant(reversed_, reciprocal=True, gradient="p (h - S)"),
    "pairwise": Variant(pairwise, gradient="dkv (kv - out)"),
    "torch.sum": Variant(whole, gradient="p (h - S)"),
    "rough exp": Variant(exp=rough_exp),
}


def rounded(result: Result) -> Result:
    """out, grad_kv and grad_score rounded to bf16."""
    return Result(result.out.bfloat16(), result.grad_kv.bfloat16(), result.grad_score.bfloat16(), result.grad_ape)


def broken(got: Result, exact: Result, bound: Result) -> dict[str, float]:
    """For each output, which share of the elements with a finite bound is not within it."""
    shares = {}
    for (name, a), (_, b), (_, limit) in zip(got.items(), exact.items(), bound.items(), strict=True):
        judged = limit.isfinite()
        wrong = ~((a.double() - b).abs() <= limit) & judged
        shares[name] = wrong.sum().item() / max(1, judged.sum().item())
    return shares


NONE = {"out": 0.0, "grad_kv": 0.0, "grad_score": 0.0, "grad_ape": 0.0}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_way_to_compute_in_fp32_breaks_it(distribution: str, problem: Problem) -> None:
    """Before the rounding to bf16, and after it."""
    inputs = make_inputs(problem, 11, distribution)
    exact, bound = fp64(inputs), error_bound(inputs)
    fine = error_bound(inputs, output_dtype=torch.float32)
    for name, variant in VARIANTS.items():
        got = variant(inputs)
        assert broken(got, exact, fine) == NONE, name
        assert broken(rounded(got), exact, bound) == NONE, name


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_oracles_are_within_it(distribution: str) -> None:
    inputs = make_inputs(PROBLEMS["4x2"], 12, distribution)
    exact, bound = fp64(inputs), error_bound(inputs)
    for got in (eager(inputs), ordered(inputs), ordered(inputs, exp="portable")):
        assert broken(got, exact, bound) == NONE


@pytest.mark.parametrize(
    ("kv", "grad_out", "score"),
    [(-130, 0, 0), (0, -130, 0), (-70, -70, 0), (-60, -72, 3), (120, -100, 0), (124, 0, 2), (60, 62, 5), (0, 0, 20)],
)
def test_small_and_large_magnitudes(kv: int, grad_out: int, score: int) -> None:
    """kv, grad_out and score times these powers of 2: results among the subnormals, and up to overflow."""
    inputs = scaled(make_inputs(PROBLEMS["4x2"], 13), kv=kv, grad_out=grad_out, score=score)
    exact, bound = fp64(inputs), error_bound(inputs)
    fine = error_bound(inputs, output_dtype=torch.float32)
    for variant in VARIANTS.values():
        assert broken(variant(inputs), exact, fine) == NONE
        assert broken(rounded(variant(inputs)), exact, bound) == NONE
    assert bool(bound.out.isfinite().all()), "out cannot overflow here"


def scaled(inputs: Inputs, **exponents: int) -> Inputs:
    """Tensors times powers of 2, rounded where they become subnormal."""
    return replace(inputs, **{k: (getattr(inputs, k).double() * 2.0**e).bfloat16() for k, e in exponents.items()})


@pytest.mark.parametrize("exponent", [-40, 40])
def test_it_scales_with_the_data(exponent: int) -> None:
    """Exactly but for terms of underflow, which are negligible next to normal data."""
    inputs = make_inputs(PROBLEMS["4x2"], 14)
    bound, factor = error_bound(inputs), 2.0**exponent
    by_kv, by_go = (error_bound(scaled(inputs, **{name: exponent})) for name in ("kv", "grad_out"))
    one = torch.tensor(1.0).double()
    expected = {
        "out": (factor, 1),
        "grad_kv": (1, factor),
        "grad_score": (factor, factor),
        "grad_ape": (factor, factor),
    }
    for (name, a), (_, b), (_, c) in zip(bound.items(), by_kv.items(), by_go.items(), strict=True):
        torch.testing.assert_close(b, a * expected[name][0] * one, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(c, a * expected[name][1] * one, rtol=1e-12, atol=0.0)


def test_weights_rounded_to_bf16_break_it() -> None:
    """In many elements of every output of ordinary data, after the rounding to bf16 too."""
    inputs = make_inputs(PROBLEMS["2x2"], 15)
    exact, bound = fp64(inputs), error_bound(inputs)
    shares = broken(rounded(Variant(weights=torch.bfloat16)(inputs)), exact, bound)
    assert shares["out"] > 0.25
    assert shares["grad_kv"] > 0.15
    assert shares["grad_score"] > 0.25
    assert shares["grad_ape"] > 0.9
    assert broken(eager(inputs, numerics="megatron"), exact, bound)["out"] > 0.25


def test_two_values_of_bf16_are_within_it_at_most() -> None:
    """The nearest, and where the exact result is next to the middle, the second nearest; never the third."""
    inputs = make_inputs(PROBLEMS["2x2"], 16)
    exact, bound = fp64(inputs), error_bound(inputs)
    for name in ("out", "grad_kv", "grad_score"):
        want, limit = getattr(exact, name), getattr(bound, name)
        judged = limit > 0
        assert bool(judged.any())
        below, above = neighbours(want.bfloat16())
        away = torch.where(want.bfloat16().double() >= want, above, below)  # the third nearest
        wrong = (away.double() - want).abs() > limit
        # Left out: results that cancel so much that their fp32 error is no longer small next to their bf16 ulp.
        plain = judged & (want.abs() > 2.0**-8 * want.abs().amax())
        assert bool(wrong[plain].all()), name
        second = torch.where(want.bfloat16().double() >= want, below, above)
        allowed = ((second.double() - want).abs() <= limit) & plain
        assert allowed.sum() <= 0.01 * plain.sum(), name


def neighbours(t: Tensor) -> tuple[Tensor, Tensor]:
    """The next lower and the next higher value of nonzero bf16 values."""
    step = torch.where(t > 0, 1, -1).short()
    return (t.view(torch.int16) - step).view(torch.bfloat16), (t.view(torch.int16) + step).view(torch.bfloat16)


def test_the_worst_logits_and_exponentials_come_close() -> None:
    """Exponents and exp off by all they may be, in the worst direction, use up much of the bound and no more.

    All else is exact, so the rest of the bound is for roundings of weights, products and sums.
    """
    inputs = make_inputs(PROBLEMS["4x2"], 17)
    p = inputs.problem
    kv, x = gather(inputs.kv, p, 0.0).double(), logits(inputs.score, inputs.ape.double(), p)
    top, out = x.amax(1, keepdim=True), fp64(inputs).out
    sign = torch.sign(kv - out[:, None])
    moved = x + sign * U * (x.abs() + (x - top).abs()).nan_to_num(posinf=0.0)
    e = torch.exp(moved - top) * (1 + sign * 2 * C_EXP * U)
    got = (e * kv).sum(1) / e.sum(1)
    share = (got - out).abs() / error_bound(inputs, output_dtype=torch.float32).out
    assert share.max() <= 1
    assert share.median() > 0.1


def one_window(score: list[float], kv: list[float], go: float, *, total_comp: int = 1) -> Inputs:
    """One row of one column over all the tokens."""
    p = Problem((len(kv),), len(kv), 1, 1, row_capacity=total_comp)
    return Inputs(
        p,
        kv=torch.tensor(kv).bfloat16()[:, None],
        score=torch.tensor(score).bfloat16()[:, None],
        ape=torch.zeros((len(kv), 1)),
        grad_out=torch.full((total_comp, 1), go).bfloat16(),
        cu_seqlens=torch.from_numpy(p.cu_seqlens.copy()),
        cu_seqlens_comp=torch.from_numpy(p.cu_seqlens_comp.copy()),
    )


@pytest.mark.parametrize(
    ("unit", "half_ulps"),  # out = -0.64 units, grad_kv[0] = 0.48, grad_score[0] = 1.26 units
    [(1.0, (2.0**-9, 2.0**-10, 2.0**-8)), (2.0**-131, (2.0**-134, 2.0**-10, 2.0**-134))],
)
def test_the_formula_in_numbers(unit: float, half_ulps: tuple[float, float, float]) -> None:
    """Two entries, step by step in scalars; with kv so small, the terms of underflow are the main ones."""
    x, v, go, n = [1.0, 3.0], [2.0 * unit, -1.0 * unit], 4.0, 2
    u = U * (1 + 2**-16)
    p = [math.exp(t) / sum(map(math.exp, x)) for t in x]
    a = [u * (abs(t) + abs(t - 3) + u * (abs(t) + 3)) for t in x]
    shift = max(
        math.log(sum(q * math.exp(b) for q, b in zip(p, a, strict=True))),
        -math.log(sum(q * math.exp(-b) for q, b in zip(p, a, strict=True))),
    )
    alpha = [b + shift + (4 * C_EXP + n + 1) * u for b in a]
    w = [q * math.expm1(b) + (C_EXP + 2) * ETA for q, b in zip(p, alpha, strict=True)]
    w = [min(b, c + math.expm1((n + 1) * u) + n * (C_EXP + 2) * ETA) for b, c in zip(w, reversed(w), strict=True)]
    q = [b + c for b, c in zip(p, w, strict=True)]
    out = sum(b * c for b, c in zip(p, v, strict=True))
    e_out = sum(abs(c) * (b + d * math.expm1(n * u)) for b, c, d in zip(w, v, q, strict=True)) + 2 * n * ETA
    e_dkv = go * (w[0] + q[0] * math.expm1(u)) + ETA
    h, s = [go * c for c in v], go * out
    e_s = sum(abs(c) * (b + d * math.expm1((n + 1) * u)) for b, c, d in zip(w, h, q, strict=True))
    e_s += 4 * n * (1 + go) * ETA
    e_dscore = w[0] * abs(h[0] - s) + q[0] * e_s + q[0] * (abs(h[0]) + abs(s) + e_s) * math.expm1(3 * u)
    e_dscore += 4 * (1 + abs(v[0]) + abs(out)) * ETA
    inputs = one_window(x, v, go)
    fine, bound = error_bound(inputs, output_dtype=torch.float32), error_bound(inputs)
    errors = (e_out, e_dkv, e_dscore)
    for result, rounding in ((fine, (0.0, 0.0, 0.0)), (bound, half_ulps)):
        got = (result.out.item(), result.grad_kv[0].item(), result.grad_score[0].item())
        for value, error, half_ulp in zip(got, errors, rounding, strict=True):
            # 1e-8: where fp64 subtracts nearly equal numbers, it leaves u correct to about 2^-29.
            assert math.isclose(value, error + half_ulp, rel_tol=1e-8, abs_tol=0.0)
    assert math.isclose(fine.grad_ape[0].item(), e_dscore, rel_tol=1e-8, abs_tol=0.0)
    assert bound.grad_ape[0].item() == fine.grad_ape[0].item()


def test_the_bound_of_grad_ape_in_numbers() -> None:
    """E + (V + E) g(r - 1) over r rows, padding rows left out."""
    p = Problem((128 * 3 + 5,), 128, 1, 2, row_capacity=5)
    inputs = make_inputs(p, 20)
    fine, exact = error_bound(inputs, output_dtype=torch.float32), fp64(inputs)
    e, v = (t[: 128 * 3].reshape(3, 128, 2).abs().sum(0) for t in (fine.grad_score, exact.grad_score))
    want = e + (v + e) * math.expm1(2 * U * (1 + 2**-16))
    torch.testing.assert_close(fine.grad_ape, want, rtol=1e-10, atol=0.0)


INF, NAN, MAX = math.inf, math.nan, float(torch.finfo(torch.bfloat16).max)


@pytest.mark.parametrize(
    ("score", "kv", "go", "out", "dkv", "dscore"),  # whether the bound is finite
    [
        ([0, 1], [1, 2], 1, True, [True, True], [True, True]),
        ([0, NAN], [1, 2], 1, False, [False, False], [False, False]),
        ([0, INF], [1, 2], 1, False, [False, False], [False, False]),
        ([-INF, -INF], [1, 2], 1, False, [False, False], [False, False]),
        ([0, -INF], [1, 2], 1, True, [True, True], [True, True]),
        ([0, -INF], [1, NAN], 1, False, [True, True], [False, False]),
        ([0, 1], [1, INF], 1, False, [True, True], [False, False]),
        ([0, 1], [1, 2], INF, True, [False, False], [False, False]),
        ([0, 1], [1, 2], NAN, True, [False, False], [False, False]),
        ([0, 1], [MAX, MAX], 1, True, [True, True], [False, False]),
        ([0, -INF], [1, MAX], 2, True, [True, True], [False, False]),  # Inf * 0 in fp32
        ([0, -200], [0, MAX], 0.25, True, [True, True], [True, True]),
    ],
)
def test_where_there_is_no_bound(
    score: list[float], kv: list[float], go: float, out: bool, dkv: list[bool], dscore: list[bool]
) -> None:
    """Inf where the exact result or an fp32 intermediate may be Inf or NaN; finite elsewhere."""
    bound = error_bound(one_window(score, kv, go))
    assert bound.out.isfinite().item() is out
    assert bound.grad_kv[:, 0].isfinite().tolist() == dkv
    assert bound.grad_score[:, 0].isfinite().tolist() == dscore
    assert bound.grad_ape[:, 0].isfinite().tolist() == dscore
    assert not any(bool(t.isnan().any()) for _, t in bound.items())


def test_a_towering_logit_leaves_it_tight() -> None:
    """Its weight is 1 whatever rounding does to logits of this size: half a bf16 ulp, and some roundings in fp32."""
    inputs = one_window([2.0**40, 2.0**39], [1, 100], 1)
    bound = error_bound(inputs)
    assert bound.out.item() < 2.0**-8 + 16 * U
    assert bound.grad_kv[0].item() < 2.0**-8 + 16 * U
    assert bound.grad_kv[1].item() < 2.0**-130  # exactly 0
    assert broken(rounded(Variant()(inputs)), fp64(inputs), bound) == NONE
    towers = error_bound(one_window([2.0**40, 2.0**40], [1, 100], 1), output_dtype=torch.float32)
    assert math.isclose(towers.out.item(), 101, rel_tol=32 * U)  # weights may be anything in [0, 1]


def test_logits_that_overflow_fp32_have_no_bound() -> None:
    inputs = one_window([MAX, MAX], [1, 2], 1)
    inputs.ape.fill_(2.0**120)
    assert bool(error_bound(inputs).out.isinf().all())
    inputs.ape.fill_(2.0**118)  # rounds to the largest fp32
    assert bool(error_bound(inputs).out.isfinite().all())


def test_unconsumed_slots_and_padding() -> None:
    """0 where no row consumes; what stands there and the gradients of padding rows have no effect."""
    p = PROBLEMS["4x2"]
    inputs = make_inputs(p, 18)
    want = error_bound(inputs)
    free = torch.from_numpy(p.slots != 0).repeat_interleave(p.head_dim, dim=1)
    for tensor in (inputs.kv, inputs.score):
        tensor[free] = NAN
    inputs.grad_out[p.rows :] = NAN
    got = error_bound(inputs)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert torch.equal(a, b), name
    for gradient in (got.grad_kv, got.grad_score):
        assert bool((gradient[free] == 0).all())
        assert bool((gradient[~free] > 0).all())
    assert torch.equal(got.out[p.rows :], got.out[:1].expand(p.total_comp - p.rows, -1))


def test_chunks_are_as_small_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays flat: a chunk has the rows that its bytes allow, and at least one."""
    seen: list[int] = []

    def row_errors(inputs: Inputs, rows: slice) -> bound._RowErrors:
        seen.append(rows.stop - rows.start)
        return whole(inputs, rows)

    whole = bound._row_errors
    monkeypatch.setattr(bound, "_row_errors", row_errors)
    inputs = make_inputs(PROBLEMS["2x2"])
    row_bytes = 8 * bound._LIVE * inputs.problem.window * inputs.problem.head_dim
    for chunk_bytes, most in ((1, 1), (row_bytes, 1), (4 * row_bytes, 4)):
        seen.clear()
        error_bound(inputs, chunk_bytes=chunk_bytes)
        assert max(seen) == most and sum(seen) == inputs.problem.total_comp


def test_chunks_do_not_matter() -> None:
    """grad_ape is summed chunk by chunk, in fp64; the rest is the same to the bit."""
    inputs = make_inputs(PROBLEMS["4x2"], 19)
    for (name, a), (_, b) in zip(error_bound(inputs).items(), error_bound(inputs, chunk_bytes=1).items(), strict=True):
        if name == "grad_ape":
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0.0)
        else:
            assert torch.equal(a, b), name


def test_no_rows() -> None:
    bound = error_bound(make_inputs(Problem((3, 0), 4, 2, 2), 0))
    assert bound.out.shape == (0, 2)
    assert all(t.dtype == torch.float64 and not bool(t.any()) for _, t in bound.items())


def test_bad_arguments_are_refused() -> None:
    inputs = make_inputs(PROBLEMS["1x1"])
    with pytest.raises(ValueError, match=r"output_dtype: got torch.float16, need one of torch.bfloat16, torch.float32"):
        error_bound(inputs, output_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"chunk_bytes: got 0, need an integer >= 1"):
        error_bound(inputs, chunk_bytes=0)
