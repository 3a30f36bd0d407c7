"""`fp64` against the definition in plain Python, whatever the chunks, in flat memory."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from csa_gate.oracles import Inputs, Problem, Result
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.fp64 import fp64

Array = NDArray[np.float64]

PROBLEMS = [
    Problem((), 4, 2, 2),
    Problem((), 3, 2, 2, row_capacity=2, token_capacity=5),
    Problem((0, 3, 0), 4, 1, 2),
    Problem((7, 3), 1, 1, 2),
    Problem((5, 1), 1, 2, 3, row_capacity=8),
    Problem((9, 0, 1, 4), 2, 2, 3, token_capacity=17),
    Problem((2, 9, 13), 3, 1, 5),
    Problem((1, 2, 13, 8), 4, 2, 5, row_capacity=8, token_capacity=30),
    Problem((3, 12), 4, 1, 4, row_capacity=5),
    Problem((11, 4, 26), 5, 2, 1),
    Problem((70, 31, 64), 32, 2, 2, row_capacity=6),
    Problem((150,), 4, 2, 2),
]


def brute_force(inputs: Inputs) -> tuple[Result, Result]:
    """The outputs by their definition, one element at a time, and the magnitudes that their errors scale with.

    Python floats, `math.exp`, and sums by `math.fsum`, which rounds once. Sums with Inf or NaN are left to `sum`.
    The magnitudes: sum p|kv|, |go p|, p(|go kv| + sum p|go kv|), and the sum of the latter over rows.
    """
    p = inputs.problem
    kv, score, go = (t.double().tolist() for t in (inputs.kv, inputs.score, inputs.grad_out))
    ape = inputs.ape.double().tolist()
    names = ("out", "grad_kv", "grad_score", "grad_ape")
    shapes = ((p.total_comp, p.head_dim), (p.total_tokens, p.width), (p.total_tokens, p.width), (p.ratio, p.width))
    value: dict[str, Array] = {name: np.zeros(shape) for name, shape in zip(names, shapes, strict=True)}
    scale: dict[str, Array] = {name: np.zeros(shape) for name, shape in zip(names, shapes, strict=True)}
    terms: dict[tuple[int, int], list[float]] = {}
    for row in range(p.total_comp):
        for column in range(p.head_dim):
            window = p.row_window(row, column)
            x = [-math.inf if e is None else score[e.token][e.column] + ape[e.ape_row][e.column] for e in window]
            values = [0.0 if e is None else kv[e.token][e.column] for e in window]
            top = math.nan if any(map(math.isnan, x)) else max(x)
            exps = [math.exp(v - top) for v in x]
            weights = [e / add(exps) for e in exps]
            out = [w * v for w, v in zip(weights, values, strict=True)]
            value["out"][row, column], scale["out"][row, column] = add(out), add([abs(v) for v in out])
            if row >= p.rows:
                continue
            g = go[row][column]
            products = [g * v for v in values]
            weighted = [w * v for w, v in zip(weights, products, strict=True)]
            mean, spread = add(weighted), add([abs(v) for v in weighted])
            for e, w, product in zip(window, weights, products, strict=True):
                if e is None:
                    continue
                at, r = (e.token, e.column), (e.ape_row, e.column)
                value["grad_kv"][at], scale["grad_kv"][at] = g * w, abs(g * w)
                value["grad_score"][at], scale["grad_score"][at] = w * (product - mean), w * (abs(product) + spread)
                terms.setdefault(r, []).append(value["grad_score"][at])
                scale["grad_ape"][r] += scale["grad_score"][at]
    for r, parts in terms.items():
        value["grad_ape"][r] = add(parts)
    as_result = [Result(**{name: torch.from_numpy(array) for name, array in d.items()}) for d in (value, scale)]
    return as_result[0], as_result[1]


def add(terms: list[float]) -> float:
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64)


def assert_agrees(got: Result, inputs: Inputs) -> None:
    """All four outputs equal `brute_force`, Inf and NaN patterns included, to the rounding errors of float64.

    Both sides start from the same x - max. In units of u = 2^-53 times the magnitude: exp is off by 2 (1 ulp) on
    each side, and so is the denominator, to which its sum adds window; division, products and the sum over the window
    add window + 3 on this side and 3 on the other. That is 2 * window + 14, and three times as much in grad_score,
    where p, S and their product meet; grad_ape adds 6 for its leaves and their sum. 1e-300 stands for underflow.
    """
    want, scale = brute_force(inputs)
    for (name, mine), (_, theirs), (_, magnitude) in zip(got.items(), want.items(), scale.items(), strict=True):
        assert mine.dtype == torch.float64
        assert mine.shape == theirs.shape
        assert torch.equal(mine.isnan(), theirs.isnan()), name
        assert torch.equal(mine[theirs.isinf()], theirs[theirs.isinf()]), name
        allowed = (3 * (2 * inputs.problem.window + 14) + 6) * 2.0**-53 * magnitude + 1e-300
        assert ((mine - theirs).abs() <= allowed)[theirs.isfinite()].all(), name


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_agrees_with_the_definition(problem: Problem, distribution: str) -> None:
    """Every kind of pack, ratio and distribution, against plain Python."""
    inputs = make_inputs(problem, 11, distribution)
    assert_agrees(fp64(inputs), inputs)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_zeros_are_positive(distribution: str) -> None:
    """No output holds -0, and slots that no row consumes hold +0, whatever lies in their tokens."""
    problem = Problem((9, 3, 14), 4, 2, 5, row_capacity=7, token_capacity=30)
    result = fp64(make_inputs(problem, 0, distribution))
    for name, tensor in result.items():
        assert not ((tensor == 0) & tensor.signbit()).any(), name
    unconsumed = torch.from_numpy(problem.slots != 0).repeat_interleave(5, dim=1)
    assert (integers(result.grad_kv)[unconsumed] == 0).all()
    assert (integers(result.grad_score)[unconsumed] == 0).all()


CHUNKED = [
    Problem((300, 7, 1, 95), 1, 2, 3, row_capacity=450),
    Problem((1031, 3, 700), 4, 2, 8, row_capacity=500, token_capacity=1800),
    Problem((129 * 32,), 32, 1, 2),
    Problem((2000,), 3, 2, 7),
]


@pytest.mark.parametrize("distribution", ["normal", "peaked", "nonfinite"])
@pytest.mark.parametrize("problem", CHUNKED, ids=str)
def test_chunks_do_not_show(problem: Problem, distribution: str) -> None:
    """Every chunk size gives the same bits in all four outputs, grad_ape included."""
    inputs = make_inputs(problem, 0, distribution)
    whole = fp64(inputs)
    row = 8 * problem.window * problem.head_dim
    for chunk_bytes in (1, 64 * row, 100 * row, 333 * row):
        for (name, want), (_, got) in zip(whole.items(), fp64(inputs, chunk_bytes=chunk_bytes).items(), strict=True):
            assert torch.equal(want.isnan(), got.isnan()), name
            assert torch.equal(integers(want.nan_to_num(7.0)), integers(got.nan_to_num(7.0))), name


@pytest.mark.parametrize("distribution", ["normal", "exact"])
def test_padding_changes_nothing(distribution: str) -> None:
    """Capacity of either kind changes no bit of real rows and tokens; padding rows equal each other."""
    tight = Problem((13, 3, 150), 4, 2, 6)
    roomy = replace(tight, row_capacity=50, token_capacity=200)
    want, got = fp64(make_inputs(tight, 1, distribution)), fp64(make_inputs(roomy, 1, distribution))
    assert torch.equal(integers(got.grad_ape), integers(want.grad_ape))
    assert torch.equal(integers(got.out)[: tight.rows], integers(want.out))
    for name in ("grad_kv", "grad_score"):
        assert torch.equal(integers(getattr(got, name))[: tight.tokens], integers(getattr(want, name)))
    padding = got.out[tight.rows :]
    assert torch.equal(padding, got.out[:1].expand_as(padding))  # token 0 starts a first block here


def test_padding_gradients_are_ignored() -> None:
    """NaN in the incoming gradient of padding rows reaches no output."""
    problem = Problem((13, 3), 4, 2, 6, row_capacity=9)
    inputs = make_inputs(problem)
    want = fp64(inputs)
    inputs.grad_out[problem.rows :] = torch.nan
    for (name, a), (_, b) in zip(want.items(), fp64(inputs).items(), strict=True):
        assert torch.equal(integers(a), integers(b)), name


def test_ape_under_the_missing_overlap_of_a_first_block_is_not_seen() -> None:
    """A pack of first blocks alone never reads the first-half columns of ape, NaN included."""
    inputs = make_inputs(Problem((4, 7, 5), 4, 2, 3))
    inputs.ape[:, :3] = torch.nan
    result = fp64(inputs)
    assert all(tensor.isfinite().all() for _, tensor in result.items())
    assert (integers(result.grad_ape)[:, :3] == 0).all()


def test_grad_ape_keeps_its_rounding_errors() -> None:
    """A large gradient that cancels between two distant leaves costs the sum of those between them nothing.

    With kv = 1, -1 and equal scores a row of gradient g gives dscore = g/2, -g/2; 1984 rows of gradient 1 remain.
    """
    go = torch.ones(2048, 1)
    go[:32] = go[-32:] = 0
    go[0], go[-1] = 2.0**60, -(2.0**60)
    inputs = replace(
        make_inputs(Problem((4096,), 2, 1, 1)),
        kv=torch.tensor([1.0, -1.0]).repeat(2048)[:, None].bfloat16(),
        score=torch.zeros(4096, 1).bfloat16(),
        ape=torch.zeros(2, 1),
        grad_out=go.bfloat16(),
    )
    assert fp64(inputs).grad_ape.flatten().tolist() == [992.0, -992.0]


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_bad_chunk(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_bytes: got {chunk_bytes}, need an integer >= 1"):
        fp64(make_inputs(Problem((4,), 4, 1, 1)), chunk_bytes=chunk_bytes)


MEASURE = """
import resource, torch
from csa_gate.oracles import Inputs, Problem, fp64
torch.set_num_threads(1)
p = Problem((16384,), 4, 2, 512)
tokens, rows = (torch.ones((n, w), dtype=torch.bfloat16) for n, w in ((16384, 1024), (4096, 512)))
inputs = Inputs(p, tokens, tokens, torch.ones(4, 1024), rows, *map(torch.from_numpy, (p.cu_seqlens, p.cu_seqlens_comp)))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
fp64(inputs, chunk_bytes=2**23)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in KiB")
def test_memory_is_flat() -> None:
    """At an eighth of 131,072 tokens x 512: the fp64 outputs, nine chunk tensors and 32 MiB of allocator slack.

    The same at full size, with the default chunk of 64 MiB, is 2.1 GiB + 0.6 GiB. A window tensor of all rows is
    128 MiB here, so an implementation that makes three of them does not pass.
    """
    extra = int(subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout)
    outputs = 8 * (2 * 16384 * 1024 + 4096 * 512)
    assert extra < outputs + 9 * 2**23 + 2**25


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_agrees_with_the_definition_on_a_gpu(problem: Problem) -> None:
    """CUDA's float64 exp is off by at most 1 ulp too, so the bound is that of the CPU."""
    inputs = make_inputs(problem, 11)
    assert_agrees(fp64(inputs.to("cuda")).to("cpu"), inputs)


@needs_cuda
def test_memory_on_a_gpu() -> None:
    """131,072 tokens x 512 at ratio 4, coff 2: under 4 GiB beside the inputs."""
    problem = Problem((131072,), 4, 2, 512)
    small = make_inputs(Problem((64,), 4, 2, 512), device="cuda")
    inputs = Inputs(
        problem,
        kv=small.kv.repeat(2048, 1),
        score=small.score.repeat(2048, 1),
        ape=small.ape,
        grad_out=small.grad_out.repeat(2048, 1),
        cu_seqlens=torch.from_numpy(problem.cu_seqlens.copy()).cuda(),
        cu_seqlens_comp=torch.from_numpy(problem.cu_seqlens_comp.copy()).cuda(),
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fp64(inputs)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
