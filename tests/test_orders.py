"""`ordered` follows its orders to the bit: against the same rules in scalar loops, written once more."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from csa_gate.oracles import Inputs, Problem, Result, fp32
from csa_gate.oracles.bits import differs, same_bits
from csa_gate.oracles.distributions import make_inputs
from csa_gate.oracles.ordered import Exp, _AxisSum, ordered
from csa_gate.oracles.orders import pool_lanes, softmax_lanes

FP32 = torch.float32
F = np.float32
Floats = NDArray[np.float32]


# The order rules once more, entry by entry, in plain Python over NumPy scalars.


def softmax_rule(window: int, head_dim: int) -> int:
    if not (head_dim <= 64 and window >= 64):
        return 1
    return max(d for d in (1 << i for i in range(11)) if head_dim * d <= 1024 and d <= window)


def pool_rule(window: int, head_dim: int, rows: int | None) -> int:
    v = 4 if head_dim % 4 == 0 else 2 if head_dim % 2 == 0 else 1

    def floor2(z: int) -> int:
        return max(1 << i for i in range(20) if 1 << i <= z)

    width = min(512 // v, 32) if rows is None else min(floor2(rows * head_dim // v), 512 // v, 32)
    height = min(floor2(window), 512 // v, 512 // v // width)
    return height if window >= min(16 * height, 256) else 1


def tree(lanes: list[F]) -> F:
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[x] + lanes[x + half] for x in range(half)]
    return lanes[0]


def softmax_order_sum(terms: list[F], d: int) -> F:
    lanes = [F(0)] * d
    for k, term in enumerate(terms):
        lanes[k % d] = lanes[k % d] + term
    return tree(lanes)


def pool_order_sum(terms: list[F], y: int) -> F:
    lanes = [[F(0)] * 4 for _ in range(y)]
    for k, term in enumerate(terms):
        turn = k // y % 4
        lanes[k % y][turn] = lanes[k % y][turn] + term
    return tree([((a[0] + a[1]) + a[2]) + a[3] for a in lanes])


def exp_of(x: list[F], exp: Exp) -> list[F]:
    t = torch.tensor(np.array(x))
    return list((fp32.exp_portable(t) if exp == "portable" else torch.exp(t)).numpy())


def fma_of(a: list[F], b: F, c: list[F]) -> list[F]:
    return list(fp32.fma(torch.tensor(np.array(a)), torch.tensor(b), torch.tensor(np.array(c))).numpy())


def by_scalars(inputs: Inputs, exp: Exp, d: int, y: int) -> dict[str, Floats]:
    """out, grad_kv and grad_score in fp32, one row and column at a time, with D = d and Y = y."""
    p = inputs.problem
    kv, score, go = (t.float().numpy() for t in (inputs.kv, inputs.score, inputs.grad_out))
    ape = inputs.ape.numpy()
    result = {
        "out": np.empty((p.total_comp, p.head_dim), F),
        "grad_kv": np.zeros((p.total_tokens, p.width), F),
        "grad_score": np.zeros((p.total_tokens, p.width), F),
    }
    for row, column in itertools.product(range(p.total_comp), range(p.head_dim)):
        window = p.row_window(row, column)
        x = [F(-np.inf) if s is None else score[s.token, s.column] + ape[s.ape_row, s.column] for s in window]
        v = [F(0) if s is None else kv[s.token, s.column] for s in window]
        e = exp_of([xk - max(x) for xk in x], exp)
        den = softmax_order_sum(e, d)
        weights = [ek / den for ek in e]
        result["out"][row, column] = pool_order_sum([vk * pk for vk, pk in zip(v, weights, strict=True)], y)
        if row >= p.rows:
            continue
        g = go[row, column]
        t = [(g * vk) * pk for vk, pk in zip(v, weights, strict=True)]
        dscore = fma_of([-pk for pk in weights], softmax_order_sum(t, d), t)
        for slot, pk, ds in zip(window, weights, dscore, strict=True):
            if slot is not None:
                result["grad_kv"][slot.token, slot.column] = g * pk + F(0)
                result["grad_score"][slot.token, slot.column] = ds + F(0)
    return result


def wrong_bits(result: Result, want: dict[str, Floats]) -> list[int]:
    """Elements of out, grad_kv and grad_score whose bits differ."""
    return [int(differs(getattr(result, name), torch.from_numpy(array)).sum()) for name, array in want.items()]


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("exp", ["native", "portable"])
@pytest.mark.parametrize("distribution", ["normal", "peaked", "wide", "ties"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem((13, 0, 3, 9), 4, 2, 3, row_capacity=7, token_capacity=31),
        Problem((7, 1), 1, 1, 2),
        Problem((11,), 3, 2, 4),
        Problem((9, 14), 6, 1, 1, row_capacity=5),
    ],
    ids=str,
)
def test_bits_of_small_windows(problem: Problem, distribution: str, exp: Exp) -> None:
    inputs = make_inputs(problem, 3, distribution)
    want = by_scalars(inputs, exp, 1, 1)
    assert wrong_bits(ordered(inputs, exp=exp, output_dtype=FP32), want) == [0, 0, 0]


@pytest.mark.parametrize("exp", ["native", "portable"])
@pytest.mark.parametrize(
    ("ratio", "coff", "head_dim", "rows"),
    [
        (64, 1, 4, 2),  # D = 64
        (96, 1, 3, 1),  # D = 64 over 96 entries: lanes of two and of one
        (32, 2, 6, 2),  # D = 64 with a first block's invalid half
        (128, 1, 12, 1),  # D = 64, Y 4 or more
        (192, 1, 2, 1),  # D = 128 over 192 entries
        (128, 2, 5, 2),  # D = 128, Y of an odd head_dim
        (256, 1, 6, 1),  # D = 128, Y of head_dim % 4 == 2
        (128, 1, 68, 1),  # D = 1, Y > 1
    ],
)
def test_bits_of_long_windows(ratio: int, coff: int, head_dim: int, rows: int, exp: Exp) -> None:
    problem = Problem((ratio * rows,), ratio, coff, head_dim)
    inputs = make_inputs(problem, 5)
    result = ordered(inputs, exp=exp, output_dtype=FP32)
    d = softmax_rule(problem.window, head_dim)
    y = pool_rule(problem.window, head_dim, rows if exp == "native" else None)
    assert wrong_bits(result, by_scalars(inputs, exp, d, y)) == [0, 0, 0]
    serial = wrong_bits(result, by_scalars(inputs, exp, 1, 1))
    assert (serial[1] > 0) == (d > 1)
    assert serial[0] > 0 or (d == 1 and y == 1)


def test_lanes_of_every_shape() -> None:
    """The closed forms against the rules by search, and the production shapes by their values."""
    for window, head_dim in itertools.product(range(1, 513), [*range(1, 34), 48, 63, 64, 65, 66, 96, 128, 129, 512]):
        assert softmax_lanes(window, head_dim) == softmax_rule(window, head_dim)
    for window, head_dim, rows in itertools.product(
        [1, 2, 3, 8, 63, 64, 96, 127, 128, 200, 255, 256, 257, 512], [1, 2, 3, 4, 6, 32, 130, 512], [1, 2, 3, 9]
    ):
        assert pool_lanes(window, head_dim, rows) == pool_rule(window, head_dim, rows)
    assert [pool_lanes(8, d) for d in (64, 128, 512)] == [1, 1, 1]
    assert [pool_lanes(128, d) for d in (64, 128, 512)] == [4, 4, 4]
    assert [pool_lanes(w, d) for w, d in ((127, 6), (128, 6), (255, 7), (256, 7))] == [1, 8, 1, 16]
    assert [softmax_lanes(128, d) for d in (64, 65, 128)] == [16, 1, 1]


# grad_ape: the tree over rows, from the rows' dscore.


def scalar_axis_sum(rows: list[F], run: int) -> F:
    """One column of dscore, summed as the specification says, `run` rows of a leaf serially."""

    def two_sum(a: F, b: F) -> tuple[F, F]:
        s = a + b
        z = s - a
        return s, (a - (s - z)) + (b - z)

    def leaf_sum(rows: list[F]) -> F:
        apart = len(rows) // run
        return tree([functools.reduce(operator.add, rows[i::apart]) for i in range(apart)])

    rows = rows + [F(0)] * (-len(rows) % 32)
    lanes = [(F(0), F(0))] * 32
    for leaf in range(len(rows) // 32):
        high, low = lanes[leaf % 32]
        s, e = two_sum(high, leaf_sum(rows[32 * leaf : 32 * leaf + 32]))
        lanes[leaf % 32] = s, low + e
    while len(lanes) > 1:
        half, merged = len(lanes) // 2, []
        for (high_a, low_a), (high_b, low_b) in zip(lanes[:half], lanes[half:], strict=True):
            s, e = two_sum(high_a, high_b)
            merged.append((s, (low_a + low_b) + e))
        lanes = merged
    high, low = lanes[0]
    return high if np.isnan(high + low) else high + low


@pytest.mark.parametrize("exp", ["native", "portable"])
@pytest.mark.parametrize("distribution", ["normal", "wide"])
@pytest.mark.parametrize("rows", [(3,), (31, 1), (64,), (65, 32), (1025,), (2101, 15)], ids=str)
@pytest.mark.parametrize(("ratio", "run"), [(2, 1), (4, 1), (5, 4), (17, 4)])
def test_grad_ape_bits(ratio: int, run: int, rows: tuple[int, ...], distribution: str, exp: Exp) -> None:
    """Around a leaf, over 32 leaves, over 64; first blocks add +0 to the overlap half. Windows past 8 have runs."""
    problem = Problem(tuple(n * ratio for n in rows), ratio, 2, 1)
    inputs = make_inputs(problem, 2, distribution)
    result = ordered(inputs, exp=exp, output_dtype=FP32)
    dscore = result.grad_score.numpy()
    windows = [problem.row_window(row, 0) for row in range(problem.rows)]
    want = np.zeros((ratio, 2), F)
    for ape_row, half in itertools.product(range(ratio), range(2)):
        slots = [window[ape_row + ratio * half] for window in windows]
        terms = [F(0) if s is None else dscore[s.token, s.column] for s in slots]
        want[ape_row, half] = scalar_axis_sum(terms, run)
    assert same_bits(result.grad_ape, torch.from_numpy(want))


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("pieces", [[4096], [32] * 128, [999, 1, 30, 2066, 1000]], ids=["one", "leaves", "uneven"])
def test_axis_sum_bits_where_the_errors_decide(pieces: list[int], run: int) -> None:
    """64 leaves of many magnitudes, then their negatives in another order: only rounding errors of errors are left.

    The 4096 rows are handed over in pieces of so many.
    """
    rng = np.random.default_rng(1)
    half = (rng.standard_normal((64, 32, 24)) * 2.0 ** rng.integers(-20, 20, (64, 1, 24))).astype(F)
    rows = np.concatenate([half, -rng.permutation(half)]).reshape(-1, 24)
    axis_sum = _AxisSum((24,), run, torch.device("cpu"))
    for end, n in zip(itertools.accumulate(pieces), pieces, strict=True):
        axis_sum.add(torch.from_numpy(rows[end - n : end]))
    assert (axis_sum.total() != 0).any()
    assert same_bits(axis_sum.total(), torch.from_numpy(np.array([scalar_axis_sum(list(c), run) for c in rows.T])))


@pytest.mark.parametrize("exp", ["native", "portable"])
@pytest.mark.parametrize(("last", "want"), [(1.0, np.inf), (-1.0, -np.inf), (np.nan, np.nan)])
def test_grad_ape_that_overflows_is_infinite(last: float, want: float, exp: Exp) -> None:
    """dscore is +-2^126 in each of 64 rows, finite, and their sum is not; a NaN row makes the sum NaN."""
    rows = 64
    inputs = make_inputs(Problem((2 * rows,), 2, 1, 1))
    inputs.score.zero_()
    inputs.ape.zero_()
    inputs.kv.copy_(torch.tensor([1.0, -1.0]).repeat(rows)[:, None])
    inputs.grad_out.fill_(2.0**127)
    inputs.grad_out[-1] *= last
    if last == -1.0:
        inputs.grad_out.mul_(-1)
        inputs.grad_out[-1] *= -1
    result = ordered(inputs, exp=exp)
    assert same_bits(result.grad_ape, torch.tensor([[want], [-want]], dtype=FP32))
