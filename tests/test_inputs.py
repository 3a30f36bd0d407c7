"""`make_inputs`: the same bits everywhere, what each distribution promises, and what `Inputs` refuses."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from csa_gate.oracles import Inputs, Problem, Slot
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.fp64 import fp64
from csa_gate.oracles.windows import gather, gather_ape, logits, scatter, scatter_ape, valid

OPERANDS = ("kv", "score", "ape", "grad_out")
SMALL = Problem((9, 0, 3, 14, 4), 4, 2, 6, row_capacity=9, token_capacity=35)
SEVERAL_BLOCKS = Problem((600,), 4, 2, 512)  # more elements than are drawn at a time
HCA = Problem((300, 1, 128), 128, 1, 5)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def digest(inputs: Inputs) -> str:
    sha = hashlib.sha256()
    for name in (*OPERANDS, "cu_seqlens", "cu_seqlens_comp"):
        array = bits(getattr(inputs, name)).numpy()
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


DIGESTS = [
    (SMALL, 0, "normal", "356ac76f530612b90cd012df753e0180519bc438f07129983cf7929552190877"),
    (SMALL, 0, "wide", "c61f74196ba215fcc0b58bd2ae48905afd2904ef763a5e35a297d7953b013040"),
    (SMALL, 0, "peaked", "fda1a6900e8f538e6248b42532183fb5d6ea4eb8452e3a4861895b909b94fc2b"),
    (SMALL, 0, "ties", "6f258543a4f46cf3c27be80b3a6a02f4025ca39d78d92fe7660ea9a6ca00ba11"),
    (SMALL, 0, "masked", "68946f9a19a879571bcf6fdabb12f53594c3b9fa44952452b26414f69cf037be"),
    (SMALL, 0, "nonfinite", "2edac8c40b69d879150b86eb50398b035e6e451fb96ca55852e81ef7211a34cc"),
    (SMALL, 0, "exact", "31160e128a0152816a3b1e5bf9453ee853c271ac0fb7a09088fb295cc2091f55"),
    (SEVERAL_BLOCKS, 1, "normal", "00009cfaecf9591f711703042f4f7b1ab5d00b2d062d8a1d241272934a06ce5b"),
    (SEVERAL_BLOCKS, 1, "exact", "83fb607c9cfbb197ee62ee4ff352646eb711ae17712febcfb031284ae2d57642"),
    (HCA, 2**64 - 1, "wide", "3dba6d64851098a97318fedfa8eff849728f7ba6d8a87f2f593bfc3accc91e9e"),
    (HCA, 2**64 - 1, "exact", "cce4f1c1e9c0ac565eb4b89806f301da9fa4bb967d5434f53f65e778c08da326"),
]


@pytest.mark.parametrize(("problem", "seed", "distribution", "want"), DIGESTS, ids=str)
def test_the_bits_never_change(problem: Problem, seed: int, distribution: str, want: str) -> None:
    """SHA-256 of all six tensors. A new value here is a new stream: every recorded vector goes with it."""
    assert digest(make_inputs(problem, seed, distribution)) == want


def test_normals_are_sums_of_twelve_uniforms() -> None:
    """kv and ape element by element, in Python integers, from the raw words of the two Philox streams."""
    problem, seed = Problem((6,), 3, 2, 2), 2**64 - 1
    inputs = make_inputs(problem, seed)
    for name, number, scale in (("kv", 0, 1.0), ("score", 4, 1.5), ("ape", 8, 0.25), ("grad_out", 12, 1.0)):
        got: Tensor = getattr(inputs, name)
        words = np.random.Philox(key=np.array([seed, number], dtype=np.uint64)).random_raw(3 * got.numel()).tolist()
        want = []
        for i in range(got.numel()):
            total = sum((word >> shift) & 0xFFFF for word in words[3 * i : 3 * i + 3] for shift in (0, 16, 32, 48))
            want.append((total - 393210) / 65536 * scale)
        assert torch.equal(bits(got).flatten(), bits(torch.tensor(want, dtype=torch.float32).to(got.dtype)))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("lens", [(9, 0, 3, 14, 4), (1, 2, 9), (2, 3), (3,)], ids=str)
def test_capacity_changes_no_real_value(distribution: str, lens: tuple[int, ...]) -> None:
    """Real tokens and rows keep their bits when either capacity grows, and padding is not left at zero."""
    tight = make_inputs(Problem(lens, 4, 2, 6), 5, distribution)
    roomy = make_inputs(Problem(lens, 4, 2, 6, row_capacity=15, token_capacity=50), 5, distribution)
    rows, tokens = tight.problem.rows, tight.problem.tokens
    for name, count in (("kv", tokens), ("score", tokens), ("ape", 4), ("grad_out", rows)):
        small, large = getattr(tight, name), getattr(roomy, name)
        assert torch.equal(bits(small), bits(large)[:count])
        assert name == "ape" or large[count:].count_nonzero() > 0


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many elements are drawn at a time changes no bit."""
    problem = Problem((3, 90, 41), 4, 2, 6, row_capacity=40)
    whole = [digest(make_inputs(problem, 3, distribution)) for distribution in DISTRIBUTIONS]
    monkeypatch.setattr("csa_gate.oracles.distributions._BLOCK", 30)
    assert [digest(make_inputs(problem, 3, distribution)) for distribution in DISTRIBUTIONS] == whole


def test_seeds_and_operands_differ() -> None:
    """Two seeds share no tensor, and no operand repeats another's draws."""
    one, two = make_inputs(SMALL, 1), make_inputs(SMALL, 2)
    assert not any(torch.equal(getattr(one, name), getattr(two, name)) for name in OPERANDS)
    assert not torch.equal(one.kv * 1.5, one.score)
    assert not torch.equal(one.kv[: SMALL.total_comp, :6], one.grad_out)
    assert (one.seed, one.distribution, one.problem) == (1, "normal", SMALL)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "0", None, True])
def test_bad_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed: got .*, need an integer in \[0, 2\*\*64\)"):
        make_inputs(SMALL, seed)


def test_bad_distribution() -> None:
    with pytest.raises(ValueError, match="distribution: got 'gauss', need one of normal, wide"):
        make_inputs(SMALL, 0, "gauss")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("problem", [Problem((), 4, 2, 3), Problem((0, 3), 4, 2, 1), Problem((2,), 2, 1, 1)], ids=str)
def test_smallest_problems(problem: Problem, distribution: str) -> None:
    """Empty tensors and single rows are drawn too."""
    inputs = make_inputs(problem, 0, distribution)
    assert inputs.kv.shape == (problem.total_tokens, problem.width)


LARGE = Problem((1000, 1003, 2), 4, 2, 32, row_capacity=510)


def softmax32(inputs: Inputs) -> Tensor:
    return logits(inputs.score, inputs.ape, inputs.problem).softmax(dim=1)


def test_normal_has_the_moments_it_names() -> None:
    """Mean and deviation within five standard errors, at 128,320 elements; grad_out has an eighth of them."""
    inputs = make_inputs(LARGE)
    for name, scale in (("kv", 1.0), ("score", 1.5), ("grad_out", 1.0), ("ape", 0.25)):
        values: Tensor = getattr(inputs, name).double() / scale
        error = 5 * values.numel() ** -0.5
        assert abs(values.mean().item()) < error
        assert abs(values.std().item() - 1) < error


def test_wide_spans_120_binades_and_stays_finite() -> None:
    """Exponents reach both ends; no fp32 intermediate of forward or backward leaves the finite range."""
    inputs = make_inputs(LARGE, 0, "wide")
    for name in ("kv", "score", "grad_out"):
        magnitudes = getattr(inputs, name).double().abs()
        assert magnitudes.max() > 2.0**57
        assert magnitudes.min() < 2.0**-60
    weights, kv = softmax32(inputs), gather(inputs.kv, LARGE, 0.0).float()
    products = inputs.grad_out[:, None].float() * kv
    dscore = weights * (products - (weights * products).sum(1, keepdim=True))
    assert all(t.isfinite().all() for t in (weights, products, dscore, dscore.sum(0), (weights * kv).sum(1)))
    assert 0.1 < ((weights > 0.01) & (weights < 0.99)).double().mean() < 0.9


def test_peaked_weights_underflow() -> None:
    """In fp32 over a third of the valid weights are exactly 0, and most windows have one above 0.99."""
    weights = softmax32(make_inputs(LARGE, 0, "peaked"))
    assert (weights[1:250] == 0).double().mean() > 1 / 3
    assert (weights.amax(1) > 0.99).double().mean() > 0.8


def test_ties_share_the_maximum() -> None:
    """Most windows have several equal maxima, not always a power of two of them; -0 is among the values."""
    inputs = make_inputs(LARGE, 0, "ties")
    x = logits(inputs.score, inputs.ape, LARGE)
    counts = (x == x.amax(1, keepdim=True)).sum(1)
    assert (counts > 1).double().mean() > 0.3
    assert (counts == 3).any()
    for name in ("kv", "grad_out"):
        assert set(getattr(inputs, name).flatten().tolist()) == {-1, -0.5, 0, 0.5, 1}
        assert (bits(getattr(inputs, name)) == -(2**15)).any()


def test_masked_has_infinite_scores_and_whole_windows_of_them() -> None:
    """3 in 10 scores are -inf; in every fourth column so are 1 in 4 windows, which alone make NaN."""
    inputs = make_inputs(LARGE, 0, "masked")
    share = (inputs.score == -torch.inf).double().mean()
    assert 0.3 < share < 0.4
    whole = (logits(inputs.score, inputs.ape, LARGE) == -torch.inf).all(1)
    assert 0.2 < whole[:, ::4].double().mean() < 0.3
    assert whole.double().mean() < 0.08
    assert torch.equal(fp64(inputs).out.isnan(), whole)


def test_nonfinite_reaches_every_operand_and_leaves_most_results_finite() -> None:
    """Inf, -Inf and NaN in all four operands, fp32 overflow of score + ape, and three finite columns in four."""
    problem = replace(LARGE, head_dim=128)
    inputs = make_inputs(problem, 0, "nonfinite")
    clean = torch.arange(128) % 4 != 0
    for name in OPERANDS:
        values: Tensor = getattr(inputs, name)
        assert {str(v) for v in values[~values.isfinite()].tolist()} == {"inf", "-inf", "nan"}
        assert values.view(-1, 128)[:, clean].isfinite().all()
    score, ape = gather(inputs.score, problem, 0.0).float(), gather_ape(inputs.ape, problem)
    overflow = (score + ape)[score.isfinite() & ape.isfinite()]
    assert (overflow == torch.inf).any()
    assert (overflow == -torch.inf).any()
    out = fp64(inputs).out
    assert 0.02 < (~out.isfinite()).double().mean() < 0.25
    assert out[:, clean].isfinite().all()


EXACT = [
    SMALL,
    Problem((1, 2, 9, 30), 4, 2, 8, row_capacity=14),
    Problem((3, 12), 4, 1, 8, row_capacity=9),
    Problem((3,), 4, 2, 5, row_capacity=2, token_capacity=6),
    Problem((), 3, 2, 5, row_capacity=2, token_capacity=7),
    Problem((6, 19), 5, 2, 7, row_capacity=6),
    Problem((40,), 1, 2, 4),
    Problem((700,), 128, 2, 6),
    Problem((600, 3), 2, 2, 16),
]


def entries(windows: Tensor) -> list[Tensor]:
    return [windows[:, k : k + 1] for k in range(windows.shape[1])]


def total(terms: list[Tensor], order: str) -> Tensor:
    """The sum of terms, rounded to their dtype at every step."""
    if order == "tree" and len(terms) > 2:
        half = len(terms) // 2
        return total(terms[:half], order) + total(terms[half:], order)
    if order == "reverse":
        terms = terms[::-1]
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


@pytest.mark.parametrize("problem", EXACT, ids=str)
@pytest.mark.parametrize("order", ["forward", "reverse", "tree"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exact_has_one_answer(problem: Problem, order: str, dtype: torch.dtype) -> None:
    """bf16 or fp32 throughout, in three orders, with exp or exp2 and two forms of the gradient: all equal fp64."""
    inputs = make_inputs(problem, 2, "exact")
    want = fp64(inputs)
    x = logits(inputs.score, inputs.ape, problem).to(dtype)
    kv, go = gather(inputs.kv, problem, 0.0).to(dtype), inputs.grad_out[:, None].to(dtype)
    top = x.amax(1, keepdim=True)
    log2e = torch.tensor(1.4426950408889634, dtype=dtype)
    scaled = x.double() * log2e - (top * log2e).double()  # a fused multiply-add: one rounding, below
    for e in ((x - top).exp(), scaled.to(dtype).exp2()):
        p = e / total(entries(e), order)
        out = total(entries(kv * p), order)[:, 0]
        s = total(entries(go * kv * p), order)
        dscore = p * (go * kv - s)
        assert torch.equal(dscore, go * kv * p - p * s)
        assert torch.equal(out.double(), want.out)
        for windows, slots in ((go * p, want.grad_kv), (dscore, want.grad_score)):
            got = torch.zeros_like(inputs.kv, dtype=dtype)
            scatter(windows, problem, got)
            assert torch.equal(got.double(), slots)
        if problem.rows:
            dape = total(list(dscore[: problem.rows].float()), order)
            assert torch.equal(scatter_ape(dape, problem).double(), want.grad_ape)
    assert torch.equal(want.out, want.out.bfloat16().double())


def test_exact_uses_every_weight_it_may() -> None:
    """1, 2, 4 and 8 entries share the maximum, every window entry is chosen somewhere, and gradients are nonzero."""
    problem = Problem((700, 700), 7, 2, 16)
    inputs = make_inputs(problem, 0, "exact")
    weights = softmax32(inputs)[problem.row_is_first == 0]
    assert set(weights.flatten().tolist()) == {0, 0.125, 0.25, 0.5, 1}
    assert (weights > 0).any(0).all()
    assert (fp64(inputs).grad_score != 0).double().mean() > 0.05


def test_exact_gradients_stop_where_fp32_sums_might_round() -> None:
    """Real rows past 2^16 have a zero gradient, padding rows do not."""
    problem = Problem((2**16 + 3,), 1, 1, 1, row_capacity=2**16 + 100)
    grad_out = make_inputs(problem, 0, "exact").grad_out
    assert grad_out[: 2**16].count_nonzero() > 2**15
    assert grad_out[2**16 : problem.rows].count_nonzero() == 0
    assert grad_out[problem.rows :].count_nonzero() > 0


REFUSED: list[tuple[str, Any, str]] = [
    ("kv", None, "kv: got NoneType, need a torch.Tensor"),
    ("kv", torch.zeros(35, 12), "kv: got dtype torch.float32, need torch.bfloat16"),
    ("score", torch.zeros(35, 11).bfloat16(), r"score: got shape \(35, 11\), need \(35, 12\)"),
    ("ape", torch.zeros(3, 12), r"ape: got shape \(3, 12\), need \(4, 12\)"),
    ("grad_out", torch.zeros(8, 6).bfloat16(), r"grad_out: got shape \(8, 6\), need \(9, 6\)"),
    ("ape", torch.zeros(4, 12, device="meta"), "ape: got device meta, need cpu"),
    ("cu_seqlens", torch.zeros(6), "cu_seqlens: got dtype torch.float32, need torch.int32"),
    ("cu_seqlens", torch.zeros(5, dtype=torch.int32), r"cu_seqlens: got shape \(5,\), need \(6,\)"),
    ("cu_seqlens", torch.tensor([0, 9, 9, 12, 27, 30]).int(), r"cu_seqlens\[4\]: got 27, need 26"),
    ("cu_seqlens_comp", torch.tensor([0, 2, 2, 2, 5, 7]).int(), r"cu_seqlens_comp\[5\]: got 7, need 6"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_tensors_that_do_not_fit(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_inputs(SMALL), **{name: value})


def test_windows_are_those_of_the_problem() -> None:
    """`gather`, `logits` and `valid` entry by entry against `row_window`, with NaN in ape under invalid entries."""
    inputs = make_inputs(SMALL)
    inputs.ape[1, :6] = torch.nan
    kv, x, ok = gather(inputs.kv, SMALL, 7.0), logits(inputs.score, inputs.ape, SMALL), valid(SMALL, "cpu")
    for row in range(SMALL.total_comp):
        for column in range(SMALL.head_dim):
            for k, entry in enumerate(SMALL.row_window(row, column)):
                assert bool(ok[row, k, 0]) == (entry is not None)
                if entry is None:
                    assert kv[row, k, column] == 7
                    assert x[row, k, column] == -torch.inf
                    continue
                token, at, r = entry
                assert kv[row, k, column] == inputs.kv[token, at]
                want = inputs.score[token, at].float() + inputs.ape[r, at]
                assert torch.equal(x[row, k, column].isnan(), want.isnan())
                assert want.isnan() or x[row, k, column] == want


@pytest.mark.parametrize("coff", [1, 2])
def test_scatter_inverts_gather_on_consumed_slots(coff: int) -> None:
    """Every consumed slot comes back, in pieces too, nothing else is written; ape likewise."""
    problem = replace(SMALL, coff=coff)
    inputs = make_inputs(problem)
    into = torch.full_like(inputs.kv, 9.0)
    for start in range(0, problem.total_comp, 4):
        rows = slice(start, start + 4)
        scatter(gather(inputs.kv, problem, 5.0, rows), problem, into, rows)
    consumed = torch.from_numpy(problem.slots == Slot.CONSUMED).repeat_interleave(problem.head_dim, 1)
    assert torch.equal(into, torch.where(consumed, inputs.kv, 9.0))
    assert torch.equal(scatter_ape(gather_ape(inputs.ape, problem), problem), inputs.ape)
