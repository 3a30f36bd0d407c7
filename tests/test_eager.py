"""`eager` is the plain PyTorch region, with the roundings of other implementations as switches."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from csa_gate.oracles import Inputs, Problem, Result
from csa_gate.oracles.bits import same_bits
from csa_gate.oracles.distributions import make_inputs
from csa_gate.oracles.eager import NUMERICS, Numerics, eager

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BF16, FP32 = torch.bfloat16, torch.float32
PROBLEMS = [
    Problem((13, 0, 3, 9), 4, 2, 6, row_capacity=7, token_capacity=31),
    Problem((11,), 2, 2, 5),
    Problem((9, 14), 6, 1, 4, row_capacity=5),
    Problem((5, 2), 1, 1, 3),
]


def closed_form(inputs: Inputs) -> tuple[Result, Result]:
    """The operator by its formulas, entry by entry in fp64, and how far fp32 numerics may be from it.

    The error, to first order in u = 2^-24 and 1 % for the higher orders: rounding x and x - max moves a weight by
    6 max|x| u relatively, an exp within 20 ulp (what PyTorch states for its CPU softmax) by 80u in numerator and sum,
    the sum of w of them by (w - 1) u, the division by u: by c u together, with c = w + 80 + 6 max|x|. Each later
    product adds u and each sum of w terms (w - 1) u; t = g p is off by c + 2, S by c + w + 1, p S by 2c + w + 2.
    """
    p, w, u = inputs.problem, inputs.problem.window, 1.01 * 2.0**-24
    kv, score, ape, go = (t.double().cpu().numpy() for t in (inputs.kv, inputs.score, inputs.ape, inputs.grad_out))
    out, grad_kv, grad_score, grad_ape = (np.zeros(a.shape) for a in (go, kv, kv, ape))
    out_error, kv_error, score_error, ape_error = (np.zeros(a.shape) for a in (go, kv, kv, ape))
    for row, column in itertools.product(range(p.total_comp), range(p.head_dim)):
        slots = [s for s in p.row_window(row, column) if s is not None]
        x = np.array([score[s.token, s.column] + ape[s.ape_row, s.column] for s in slots])
        v = np.array([kv[s.token, s.column] for s in slots])
        weights = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        c = w + 80 + 6 * np.abs(x[np.isfinite(x)]).max()
        out[row, column] = (v * weights).sum()
        out_error[row, column] = u * (c + w) * np.abs(v * weights).sum()
        if row >= p.rows:
            continue
        g = go[row, column]
        t = g * v * weights
        for s, pk, tk in zip(slots, weights, t, strict=True):
            dscore = tk - pk * t.sum()
            grad_kv[s.token, s.column] = g * pk + 0.0
            grad_score[s.token, s.column] = dscore + 0.0
            grad_ape[s.ape_row, s.column] += dscore
            error = u * ((c + 3) * abs(tk) + (2 * c + w + 3) * pk * np.abs(t).sum())
            kv_error[s.token, s.column] = u * (c + 1) * abs(g * pk)
            score_error[s.token, s.column] = error
            ape_error[s.ape_row, s.column] += error + u * p.rows * (abs(tk) + pk * np.abs(t).sum())
    values = [torch.from_numpy(a) for a in (out, grad_kv, grad_score, grad_ape)]
    errors = [torch.from_numpy(a) for a in (out_error, kv_error, score_error, ape_error)]
    return Result(*values).to(inputs.device), Result(*errors).to(inputs.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_exact_problems_have_the_bits_of_the_formulas(problem: Problem, numerics: str, device: str) -> None:
    """Nothing rounds there, in bf16 either, and a finite mask underflows: every numerics must be exact."""
    inputs = make_inputs(problem, 1, "exact", device)
    exact, _ = closed_form(inputs)
    for (name, got), (_, want) in zip(eager(inputs, numerics=numerics).items(), exact.items(), strict=True):
        # A sum that starts from +0 is never -0; the formula's may be.
        assert same_bits(got, (want + 0.0).to(got.dtype)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_fp32_numerics_are_within_their_error(problem: Problem, device: str) -> None:
    """Every output before the last rounding; weights rounded to bf16 break the limits of all but one-entry windows."""
    inputs = make_inputs(problem, 1, "normal", device)
    want, limit = closed_form(inputs)

    def broken(numerics: str) -> list[str]:
        got = eager(inputs, numerics=numerics, output_dtype=FP32)
        return [
            name
            for (name, x), (_, y), (_, most) in zip(got.items(), want.items(), limit.items(), strict=True)
            if not ((x.double() - y).abs() <= most).all()
        ]

    assert broken("fp32") == []
    assert len(broken("megatron")) == (4 if problem.window > 1 else 0)


def pair(seed: int = 0) -> tuple[Inputs, list[Tensor]]:
    """Windows of two entries, whose sums have one order, and kv, score, ape, grad_out as they see it."""
    inputs = make_inputs(Problem((400,), 2, 1, 8), seed)
    kv, score = (t.view(200, 2, 8) for t in (inputs.kv, inputs.score))
    return inputs, [kv, score, inputs.ape, inputs.grad_out[:, None]]


def by_steps(kv: Tensor, weights: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a region that multiplies and sums in bf16 makes of fp32 softmax weights.

    Returns out, grad_kv, fp32 grad_score, and how far grad_score may be off.

    PyTorch computes it as t - p S or as (g - S) p, with t = g p and S their sum. To first order in u = 2^-24 either
    is off by 2u |t| + 4u p sum |t|, so two of them by twice that; 1 % is for the higher orders.
    """
    rounded = weights.to(BF16)
    products = kv * rounded
    out = (products[:, 0].float() + products[:, 1].float()).to(BF16)
    t = (grad_out * kv).float() * weights
    grad_score = t - weights * (t[:, :1] + t[:, 1:])
    error = 1.01 * 2.0**-24 * (4 * t.abs() + 8 * weights * (t[:, :1].abs() + t[:, 1:].abs()))
    return out, grad_out * rounded, grad_score, error


def test_megatron_rounds_weights_products_and_sum_to_bf16() -> None:
    inputs, (kv, score, ape, grad_out) = pair()
    out, grad_kv, grad_score, error = by_steps(kv, torch.softmax(score + ape, dim=1), grad_out)
    got = eager(inputs, numerics="megatron", output_dtype=FP32)
    assert same_bits(got.out, out.float())
    assert same_bits(got.grad_kv.view_as(kv), grad_kv.float() + 0.0)
    assert ((got.grad_score.view_as(kv) - grad_score).abs() <= error).all()


def test_transformers_rounds_ape_and_logits_too() -> None:
    """grad_score is rounded to bf16 where the logits were, and grad_ape where ape was."""
    inputs, (kv, score, ape, grad_out) = pair()
    logits = score + ape.to(BF16)
    assert logits.dtype == BF16
    out, grad_kv, grad_score, error = by_steps(kv, torch.softmax(logits.float(), dim=1), grad_out)
    got = eager(inputs, numerics="transformers", output_dtype=FP32)
    assert same_bits(got.out, out.float())
    assert same_bits(got.grad_kv.view_as(kv), grad_kv.float() + 0.0)
    assert ((got.grad_score.view_as(kv) - grad_score).abs() <= error + 2.0**-8 * (grad_score.abs() + error)).all()
    for grad in (got.grad_score, got.grad_ape):
        assert same_bits(grad, grad.to(BF16).float())


@pytest.mark.parametrize(
    ("field", "numerics"),
    [
        ("ape_dtype", Numerics(ape_dtype=BF16)),
        ("logit_dtype", Numerics(logit_dtype=BF16)),
        ("weight_dtype", Numerics(weight_dtype=BF16)),
        ("product_dtype", Numerics(product_dtype=BF16)),
    ],
)
def test_each_rounding_is_where_its_name_says(field: str, numerics: Numerics) -> None:
    inputs, (kv, score, ape, _) = pair()
    got = eager(inputs, numerics=numerics, output_dtype=FP32).out

    def rounded(t: Tensor, name: str) -> Tensor:
        return t.to(BF16).float() if name == field else t

    logits = rounded(score + rounded(ape, "ape_dtype"), "logit_dtype")
    weights = rounded(torch.softmax(logits, dim=1), "weight_dtype")
    products = rounded(kv.float() * rounded(weights, "product_dtype"), "product_dtype")
    want = rounded(products[:, 0] + products[:, 1], "product_dtype")
    assert same_bits(got, want)
    assert not same_bits(got, eager(inputs, output_dtype=FP32).out)


def test_the_mask_is_the_logit_of_invalid_entries() -> None:
    """Where every valid logit is -inf: 0 / 0 with -inf, all weight on the zeros of the overlap with a finite mask."""
    inputs = make_inputs(Problem((4,), 4, 2, 3))
    inputs.score.fill_(-torch.inf)
    assert torch.isnan(eager(inputs).out).all()
    assert (eager(inputs, numerics="sglang").out == 0).all()
    inputs.score.fill_(-20000.0)
    assert (eager(inputs).out != 0).all()
    assert (eager(inputs, numerics="maxtext").out == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_invalid_entries_never_enter(numerics: str, device: str) -> None:
    """NaN in the overlap half of ape, and in the tokens before a first block, where its overlap would lie."""
    clean = make_inputs(Problem((8, 4), 4, 2, 3), 0, "normal", device)
    inputs = replace(clean, kv=clean.kv.clone(), score=clean.score.clone(), ape=clean.ape.clone())
    inputs.ape[:, :3] = torch.nan
    inputs.kv[:8] = torch.nan
    inputs.score[:8] = torch.nan
    a, b = eager(clean, numerics=numerics), eager(inputs, numerics=numerics)
    assert same_bits(a.out[2], b.out[2])
    assert same_bits(a.grad_kv[8:], b.grad_kv[8:])
    assert same_bits(a.grad_score[8:], b.grad_score[8:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_padding_rows_pool_token_0_and_give_no_gradient(numerics: str, device: str) -> None:
    """Their grad_out is NaN; on one thread of a CPU the row count enters no order, so no bit of the rest may change."""
    plain = Problem((17, 0, 9), 4, 2, 8)
    few = make_inputs(plain, 4, "normal", device)
    many = make_inputs(replace(plain, row_capacity=9, token_capacity=31), 4, "normal", device)
    many.grad_out[plain.rows :] = torch.nan
    many.kv[plain.tokens :] = torch.nan
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = eager(few, numerics=numerics), eager(many, numerics=numerics)
    torch.set_num_threads(threads)
    assert same_bits(b.out[: plain.rows], a.out)
    assert same_bits(b.out[plain.rows :], a.out[:1].expand(3, -1))
    assert same_bits(b.grad_kv[: plain.tokens], a.grad_kv)
    assert same_bits(b.grad_score[: plain.tokens], a.grad_score)
    assert torch.isfinite(b.grad_ape).all()
    if device == "cpu":
        assert same_bits(b.grad_ape, a.grad_ape)


@pytest.mark.parametrize("device", DEVICES)
def test_nonfinite_padding_rows_give_no_gradient(device: str) -> None:
    """Padding rows alone pool a NaN block: the only segment is too short for a row of its own."""
    inputs = make_inputs(Problem((3,), 4, 1, 2, row_capacity=2, token_capacity=4), 0, "normal", device)
    inputs.kv.fill_(torch.nan)
    result = eager(inputs)
    assert torch.isnan(result.out).all()
    assert not any(t.float().view(torch.int32).any() for t in (result.grad_kv, result.grad_score, result.grad_ape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_zeros_of_gradients_are_positive(numerics: str, device: str) -> None:
    """Unconsumed slots are +0, and so is a product that is -0, since autograd accumulates it into +0.

    That is so before the last rounding, in which a negative fp32 subnormal may still become a bf16 -0.
    """
    problem = Problem((401, 3, 0, 8), 4, 2, 4, token_capacity=420)
    inputs = make_inputs(problem, 0, "peaked", device)
    idle = torch.from_numpy(problem.slots != 0).repeat_interleave(4, dim=1).to(device)
    result = eager(inputs, numerics=numerics, output_dtype=FP32)
    for grad in (result.grad_kv, result.grad_score):
        assert not grad.view(torch.int32)[idle].any()
        assert (grad[~idle] == 0).any()
        assert not (grad.view(torch.int32) == -(2**31)).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "problem", [Problem((), 4, 2, 8), Problem((0, 0), 4, 1, 8), Problem((3, 0, 2), 4, 2, 8, token_capacity=9)], ids=str
)
def test_no_rows(problem: Problem, device: str) -> None:
    result = eager(make_inputs(problem, device=device))
    assert result.out.shape == (0, 8)
    assert not any(t.float().view(torch.int32).any() for _, t in result.items())


def test_results_have_their_dtypes_and_inputs_stay() -> None:
    inputs = make_inputs(Problem((50,), 4, 2, 8))
    kept = {f.name: v.clone() for f in fields(Inputs) if isinstance(v := getattr(inputs, f.name), Tensor)}
    with torch.no_grad():
        coarse, fine = eager(inputs), eager(inputs, output_dtype=FP32)
    assert [t.dtype for _, t in coarse.items()] == [BF16, BF16, BF16, FP32]
    assert [t.dtype for _, t in fine.items()] == [FP32] * 4
    assert not any(t.requires_grad for _, t in coarse.items())
    for (name, x), (_, y) in zip(fine.items(), coarse.items(), strict=True):
        assert same_bits(x.to(y.dtype), y), name
    assert all(torch.equal(getattr(inputs, name), value) for name, value in kept.items())
    assert inputs.ape.grad is None and not inputs.ape.requires_grad


def test_unknown_numerics_are_named() -> None:
    with pytest.raises(ValueError, match="numerics: got 'fp8', need a Numerics or one of fp32, megatron"):
        eager(make_inputs(Problem((4,), 4, 1, 2)), numerics="fp8")
