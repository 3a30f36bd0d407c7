"""`ordered` against `eager`, bit for bit on CUDA; what holds whatever the order; the portable bits on every machine."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from csa_gate.oracles import Inputs, Problem
from csa_gate.oracles.bits import differs, same_bits
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.eager import eager
from csa_gate.oracles.ordered import _BLOCK, Exp, ordered

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FP32 = torch.float32
F = np.float32


# Against eager.


@pytest.mark.parametrize(("ratio", "coff", "head_dim"), [(4, 2, 16), (128, 1, 24), (6, 1, 5), (64, 2, 8)])
def test_close_to_eager_where_the_order_differs(ratio: int, coff: int, head_dim: int) -> None:
    """Standard error analysis of both, to first order in u = 2^-24, with 1 % for the higher orders.

    Both take exp of the same x - max: `ordered` within 1 ulp (2u), `eager` within 20 (40u, what PyTorch states for
    the exp of its CPU softmax). A weight is then off, relatively, by twice that, w - 1 additions and a division: the
    two weights differ by (2w + 84) u. Each product adds u and each sum of w terms (w - 1) u, in both. So t differs
    by (2w + 88) u, S by (4w + 86) u * sum |t|, p S by (6w + 172) u * p sum |t|, and their difference rounds once more.
    """
    inputs = make_inputs(Problem((9 * ratio + 1, 3 * ratio), ratio, coff, head_dim), 1)
    w, p = coff * ratio, inputs.problem
    got, want = (f(inputs, output_dtype=FP32) for f in (ordered, eager))
    kv, score, go = (t.double().numpy() for t in (inputs.kv, inputs.score, inputs.grad_out))
    ape, unit = inputs.ape.double().numpy(), 1.01 * 2.0**-24
    error = {name: (tensor.double() - getattr(want, name).double()).abs().numpy() for name, tensor in got.items()}
    for row, column in itertools.product(range(p.rows), range(head_dim)):
        slots = [s for s in p.row_window(row, column) if s is not None]
        x = np.array([score[s.token, s.column] + ape[s.ape_row, s.column] for s in slots])
        v, g = np.array([kv[s.token, s.column] for s in slots]), abs(go[row, column])
        # Here x is not rounded, which moves the weights by 2 |x| u, far inside the 1 %.
        weights = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        pooled = np.abs(v * weights).sum()
        t = g * np.abs(v) * weights
        assert error["out"][row, column] <= unit * (4 * w + 84) * pooled
        for slot, pk, tk in zip(slots, weights, t, strict=True):
            assert error["grad_kv"][slot.token, slot.column] <= unit * (2 * w + 86) * g * pk
            limit = unit * ((2 * w + 90) * tk + (6 * w + 174) * pk * t.sum())
            assert error["grad_score"][slot.token, slot.column] <= limit


@pytest.mark.parametrize("exp", ["native", "portable"])
@pytest.mark.parametrize(("ratio", "coff", "head_dim"), [(4, 2, 64), (128, 1, 32), (2, 2, 7), (4, 1, 2), (128, 2, 6)])
def test_exact_problems_have_eagers_bits(ratio: int, coff: int, head_dim: int, exp: Exp) -> None:
    """Where no operation rounds, order does not matter: all bits of all outputs, zeros and padding included."""
    lens = (9 * ratio + 1, 3 * ratio, ratio - 1, 0, ratio)
    problem = Problem(lens, ratio, coff, head_dim, row_capacity=17, token_capacity=sum(lens) + 3)
    inputs = make_inputs(problem, 1, "exact")
    for (name, got), (_, want) in zip(ordered(inputs, exp=exp).items(), eager(inputs).items(), strict=True):
        assert same_bits(got, want), name


@pytest.mark.parametrize("distribution", ["masked", "nonfinite"])
@pytest.mark.parametrize(("ratio", "coff", "head_dim"), [(4, 2, 16), (64, 1, 8), (3, 2, 5)])
def test_nonfinite_where_eager_is(ratio: int, coff: int, head_dim: int, distribution: str) -> None:
    inputs = make_inputs(Problem((9 * ratio + 1, 3 * ratio), ratio, coff, head_dim, row_capacity=14), 1, distribution)
    want = eager(inputs)
    assert torch.isnan(want.out).any()
    exps: tuple[Exp, ...] = ("native", "portable")
    for exp in exps:
        for (name, got), (_, expected) in zip(ordered(inputs, exp=exp).items(), want.items(), strict=True):
            assert torch.equal(torch.isnan(got), torch.isnan(expected)), name
            infinite = torch.isinf(expected)
            assert torch.equal(torch.isinf(got), infinite), name
            assert torch.equal(got[infinite], expected[infinite]), name


CUDA_WINDOWS = [
    *((w, 1) for w in (1, 2, 3, 4, 6, 8, 16, 32, 64, 96, 128, 192, 256, 512)),
    *((r, 2) for r in (1, 2, 3, 4, 16, 48, 64, 96, 128, 256)),
]
CUDA_HEAD_DIMS = [*range(2, 9), 12, 16, 24, 31, 32, 33, 48, 63, 64, 65, 66, 96, 127, 128, 130, 192, 256, 511, 512]
CUDA_ROWS = [1, 2, 3, 4, 5, 8, 15, 16, 31, 33, 64, 100, 128, 255, 257, 300]
CUDA_ENTRIES = 1 << 19  # window entries of one configuration at most: keeps the whole to seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("ratio", "coff"), CUDA_WINDOWS)
def test_eagers_bits_on_cuda(ratio: int, coff: int) -> None:
    """Every fp32 bit of out, grad_kv and grad_score; each head_dim with one row count, the distributions in turn."""
    wrong = []
    for i, head_dim in enumerate(CUDA_HEAD_DIMS):
        few = [r for r in CUDA_ROWS if r * ratio * coff * head_dim <= CUDA_ENTRIES]
        rows = few[(7 * i + ratio) % len(few)]
        first = rows // 3
        lens = (first * ratio, (rows - first) * ratio + ratio // 2)
        problem = Problem(lens, ratio, coff, head_dim, row_capacity=rows + i % 3)
        distribution = DISTRIBUTIONS[i % len(DISTRIBUTIONS)]
        inputs = make_inputs(problem, i, distribution, "cuda")
        got, want = (f(inputs, output_dtype=FP32) for f in (ordered, eager))
        for name in ("out", "grad_kv", "grad_score"):
            count = int(differs(getattr(got, name), getattr(want, name)).sum())
            if count:
                wrong.append(f"{count} bit patterns of {name}, {problem}, {distribution}")
    assert not wrong, "\n".join(wrong)


# What holds whatever the order.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exp", ["native", "portable"])
def test_unconsumed_slots_are_positive_zero(exp: Exp, device: str) -> None:
    problem = Problem((9, 3, 0, 8), 4, 2, 4, token_capacity=25)
    inputs = make_inputs(problem, 0, "nonfinite", device)
    result = ordered(inputs, exp=exp)
    idle = torch.from_numpy(problem.slots != 0).repeat_interleave(4, dim=1)
    assert idle.any()
    for grad in (result.grad_kv, result.grad_score):
        assert not grad.cpu().view(torch.int16)[idle].any()


@pytest.mark.parametrize("exp", ["native", "portable"])
def test_gradients_hold_no_negative_zero(exp: Exp) -> None:
    inputs = make_inputs(Problem((400,), 4, 2, 8), 0, "peaked")
    result = ordered(inputs, exp=exp, output_dtype=FP32)
    for grad in (result.grad_kv, result.grad_score, result.grad_ape):
        assert (grad == 0).any() or grad is result.grad_ape
        assert not (grad.view(torch.int32) == -(2**31)).any()


@pytest.mark.parametrize("exp", ["native", "portable"])
def test_padding_rows_and_tokens_change_no_bit(exp: Exp) -> None:
    """head_dim and window are such that the row count does not enter the native order either."""
    plain = Problem((17, 0, 9), 4, 2, 8)
    padded = replace(plain, row_capacity=40, token_capacity=31)
    few, many = (make_inputs(p, 4) for p in (plain, padded))
    many.grad_out[plain.rows :] = torch.nan
    many.kv[plain.tokens :] = torch.nan
    a, b = ordered(few, exp=exp), ordered(many, exp=exp)
    assert same_bits(a.out, b.out[: plain.rows])
    assert same_bits(b.out[plain.rows :], a.out[:1].expand(40 - plain.rows, -1))
    assert same_bits(a.grad_kv, b.grad_kv[: plain.tokens])
    assert same_bits(a.grad_score, b.grad_score[: plain.tokens])
    assert same_bits(a.grad_ape, b.grad_ape)


def test_first_block_ignores_the_overlap_half_of_ape() -> None:
    inputs = make_inputs(Problem((4,), 4, 2, 3))
    before = ordered(inputs, exp="portable")
    inputs.ape[:, :3] = torch.nan
    after = ordered(inputs, exp="portable")
    assert all(same_bits(x, y) for (_, x), (_, y) in zip(before.items(), after.items(), strict=True))
    assert not after.grad_ape[:, :3].view(torch.int32).any()


@pytest.mark.parametrize("window", [8, 128])
def test_portable_rows_do_not_depend_on_their_neighbours(window: int) -> None:
    ratio, coff = (4, 2) if window == 8 else (128, 1)
    both = make_inputs(Problem((3 * ratio, 2 * ratio + 1), ratio, coff, 12))
    alone = Inputs(
        Problem((3 * ratio,), ratio, coff, 12),
        kv=both.kv[: 3 * ratio],
        score=both.score[: 3 * ratio],
        ape=both.ape,
        grad_out=both.grad_out[:3],
        cu_seqlens=both.cu_seqlens[:2],
        cu_seqlens_comp=both.cu_seqlens_comp[:2],
    )
    a, b = ordered(both, exp="portable"), ordered(alone, exp="portable")
    assert same_bits(a.out[:3], b.out)
    assert same_bits(a.grad_kv[: 3 * ratio], b.grad_kv)
    assert same_bits(a.grad_score[: 3 * ratio], b.grad_score)


@pytest.mark.parametrize("block", [1, 500, 5000])
def test_block_size_changes_no_bit(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows worked on one by one, in parts of a leaf, and a few leaves at a time."""
    inputs = make_inputs(Problem((500, 70), 4, 2, 4, row_capacity=170))
    want = ordered(inputs, exp="portable", output_dtype=FP32)
    monkeypatch.setitem(_BLOCK, "cpu", block)
    got = ordered(inputs, exp="portable", output_dtype=FP32)
    for (name, x), (_, y) in zip(got.items(), want.items(), strict=True):
        assert same_bits(x, y), name


@pytest.mark.parametrize("exp", ["native", "portable"])
@pytest.mark.parametrize("problem", [Problem((), 4, 2, 8), Problem((3, 0, 2), 4, 1, 8, token_capacity=9)], ids=str)
def test_no_rows(problem: Problem, exp: Exp) -> None:
    result = ordered(make_inputs(problem), exp=exp)
    assert result.out.shape == (0, 8)
    assert not any(t.float().view(torch.int32).any() for _, t in result.items())


def test_fp32_results_round_once_to_the_bf16_ones() -> None:
    inputs = make_inputs(Problem((50,), 4, 2, 8))
    fine, coarse = ordered(inputs, output_dtype=FP32), ordered(inputs)
    assert {t.dtype for t in (coarse.out, coarse.grad_kv, coarse.grad_score)} == {torch.bfloat16}
    assert coarse.grad_ape.dtype == FP32
    for (name, x), (_, y) in zip(fine.items(), coarse.items(), strict=True):
        assert same_bits(x.to(y.dtype), y), name


def test_bad_arguments_name_what_came() -> None:
    inputs = make_inputs(Problem((4,), 4, 1, 2))
    with pytest.raises(ValueError, match=r"exp: got 'fast', need"):
        ordered(inputs, exp="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"output_dtype: got torch.float16, need"):
        ordered(inputs, output_dtype=torch.float16)


# The portable bits, everywhere.


def integer_inputs(problem: Problem, *, peak: int) -> Inputs:
    """kv and grad_out in steps of 1/64 below 4, scores in steps of peak/64 below 4 * peak, from integer hashing."""

    def values(salt: int, rows: int, columns: int, unit: float) -> Tensor:
        n = np.arange(rows * columns, dtype=np.uint64) + np.uint64(salt << 32)
        n = (n ^ (n >> np.uint64(15))) * np.uint64(0x9E3779B97F4A7C15)
        n = (n ^ (n >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        signed = (n >> np.uint64(55)).astype(np.int64) - 255  # -255 to 256: exact in bf16
        return torch.from_numpy(signed.astype(F).reshape(rows, columns) * F(unit))

    return Inputs(
        problem,
        kv=values(1, problem.total_tokens, problem.width, 1 / 64).bfloat16(),
        score=values(2, problem.total_tokens, problem.width, peak / 64).bfloat16(),
        ape=values(3, problem.ratio, problem.width, 3 / 1024),
        grad_out=values(4, problem.total_comp, problem.head_dim, 1 / 64).bfloat16(),
        cu_seqlens=torch.from_numpy(problem.cu_seqlens),
        cu_seqlens_comp=torch.from_numpy(problem.cu_seqlens_comp),
    )


PORTABLE = {
    (4, 2, 64, 130, 1): "e3baa3c56052211d84363a7f6e2015d58af572c30e26585b96acd444ba617684",
    (4, 2, 64, 130, 32): "1409e4f4de629d45f1c12abfafba6ebaa8d9a98bfca77278f91ffc90a07abd33",
    (2, 2, 7, 70, 4): "7ab86d99e4dabb0de706e1329deaf47f87452e0c6733e47fd071e5c2526c8632",
    (128, 1, 16, 35, 1): "fd94cbb7545c36a89779e8c810244559b393c42f9bdf1884b9fa9662f35968e9",
    (128, 1, 66, 8, 8): "a6bc9cf2e69661c7bad1f25b42ddb3207b75221606c7ffc9faf4bf48a7f90fcb",
    (128, 2, 5, 34, 1): "860c1dfc023322c5bb4234ac413eaee80125a335abbeaaeffe88c9486048fa45",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("ratio", "coff", "head_dim", "rows", "peak"), PORTABLE)
def test_portable_bits_are_the_same_on_every_machine(
    ratio: int, coff: int, head_dim: int, rows: int, peak: int, threads: int, device: str
) -> None:
    """SHA-256 over the bytes of the four fp32 outputs, in the order of `Result`; all values are finite."""
    lens = ((rows - 3) * ratio + 1, 0, ratio - 1, 3 * ratio)
    inputs = integer_inputs(Problem(lens, ratio, coff, head_dim, row_capacity=rows + 2), peak=peak)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = ordered(inputs.to(device), exp="portable", output_dtype=FP32).to("cpu")
    finally:
        torch.set_num_threads(before)
    digest = hashlib.sha256()
    for _, tensor in result.items():
        assert torch.isfinite(tensor).all()
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == PORTABLE[ratio, coff, head_dim, rows, peak]
