"""The arithmetic of one row for one group of columns, in both directions.

Fragments are (count, vec), as in `window`; entries [start, stop) of a window are meant where both are given.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .arith import (
    FAR,
    Lane,
    add,
    apply,
    div,
    div_by,
    exp,
    exp_near,
    fma,
    maximum,
    mul,
    not_negative_zero,
    reciprocal,
    storage,
    sub,
)
from .window import Place, entry, fragments, load_window, own_block, row_entry, same, store_rounded


@cute.jit
def add_bias(
    config: Constexpr, start: Constexpr, stop: Constexpr, scores: cute.Tensor, bias: cute.Tensor
) -> cute.Tensor:
    """scores + bias of entries [start, stop), (stop, vec) fp32."""
    x = fragments(stop, config)
    for k in cutlass.range(start, stop, unroll_full=config.on_gpu):
        apply(add, config, (x, k), (scores, k), (bias, k))
    return x


@cute.jit
def highest(config: Constexpr, start: Constexpr, stop: Constexpr, x: cute.Tensor) -> cute.Tensor:
    """The maximum over entries [start, stop), (1, vec)."""
    found = fragments(1, config)
    cute.autovec_copy(x[start, None], found[0, None])
    for k in cutlass.range(start + 1, stop, unroll_full=config.on_gpu):
        apply(maximum, config, (found, 0), (found, 0), (x, k))
    return found


@cute.jit
def to_powers(config: Constexpr, start: Constexpr, stop: Constexpr, x: cute.Tensor, top: cute.Tensor) -> None:
    """Turn logits [start, stop) into exp(x - top) in place."""
    for k in cutlass.range(start, stop, unroll_full=config.on_gpu):
        apply(lambda a, b: exp(sub(a, b), config), config, (x, k), (x, k), (top, 0))


@cute.jit
def near_powers(config: Constexpr, start: Constexpr, stop: Constexpr, x: cute.Tensor, top: cute.Tensor) -> Int32:
    """The same in fewer instructions, right unless the number that it returns has the bit `FAR`."""
    far = Int32(0)
    for k in cutlass.range_constexpr(start, stop):
        for c in config.columns:
            x[k, c], bits = exp_near(sub(x[k, c], top[0, c]))
            far = far | bits
    return far


@cute.jit
def divide(config: Constexpr, start: Constexpr, stop: Constexpr, x: cute.Tensor, total: cute.Tensor) -> None:
    """x /= total for entries [start, stop), by IEEE division."""
    for k in cutlass.range(start, stop, unroll_full=config.on_gpu):
        apply(div, config, (x, k), (x, k), (total, 0))


@cute.jit
def near_divide(config: Constexpr, start: Constexpr, stop: Constexpr, x: cute.Tensor, total: cute.Tensor) -> None:
    """The same in three instructions an entry, for powers of which none is tiny."""
    r = fragments(1, config)
    apply(reciprocal, config, (r, 0), (total, 0))
    for k in cutlass.range(start, stop, unroll_full=True):
        apply(div_by, config, (x, k), (x, k), (total, 0), (r, 0))


@cute.jit
def softmax(
    config: Constexpr,
    scores: cute.Tensor,
    score: cute.Tensor,
    bias: cute.Tensor,
    place: Place,
    start: Constexpr,
    index: Constexpr,
) -> cute.Tensor:
    """Weights of a row's window from `start` on, (window, vec) fp32, summed in softmax order.

    scores: as `load_window` gives them; score, index: where from.
    """
    stop = cutlass.const_expr(config.window)
    x = add_bias(config, start, stop, scores, bias)
    top = highest(config, start, stop, x)
    if cutlass.const_expr(config.fast):
        far = near_powers(config, start, stop, x, top)
        if far & FAR == 0:
            near_divide(config, start, stop, x, lane_sum(config, x, start))
        else:
            # Loaded anew, so that registers need not keep what is hardly ever needed.
            exact = add_bias(config, start, stop, load_window(config, score, place, start, index), bias)
            to_powers(config, start, stop, exact, top)
            divide(config, start, stop, exact, lane_sum(config, exact, start))
            for k in cutlass.range_constexpr(start, stop):
                apply(same, config, (x, k), (exact, k))
    else:
        to_powers(config, start, stop, x, top)
        divide(config, start, stop, x, lane_sum(config, x, start))
    return x


@cute.jit
def zeros(config: Constexpr, count: Constexpr) -> cute.Tensor:
    """(count, vec) fp32 of +0."""
    fragment = fragments(count, config)
    if cutlass.const_expr(config.on_gpu):
        fragment.fill(0.0)
    else:
        # As one vector they would take the host's compiler seconds.
        for x in cutlass.range(count):
            fragment[x, None].fill(0.0)
    return fragment


@cute.jit
def lane_sum(config: Constexpr, terms: cute.Tensor, start: Constexpr) -> cute.Tensor:
    """Softmax order: lane x adds entries x, x + lanes, ... serially from +0; the lanes combine by a halving tree."""
    sums = zeros(config, config.softmax_lanes)
    for k in cutlass.range(start, config.window, unroll_full=config.on_gpu):
        apply(add, config, (sums, k % config.softmax_lanes), (sums, k % config.softmax_lanes), (terms, k))
    halving_tree(config, sums, config.softmax_lanes, 1)
    return sums


@cute.jit
def pool_sum(config: Constexpr, weights: cute.Tensor, values: cute.Tensor, start: Constexpr) -> cute.Tensor:
    """sum_k p_k * kv_k in reduction order: lane y deals entries y, y + lanes, ... round-robin to four accumulators."""
    lanes = config.pool_lanes
    sums = zeros(config, 4 * lanes)
    for k in cutlass.range(start, config.window, unroll_full=config.on_gpu):
        # The k-th entry is the (k // lanes)-th of lane k % lanes, so its accumulator is k // lanes % 4.
        at = k % (4 * lanes)
        apply(lambda s, p, v: add(s, mul(v, p)), config, (sums, at), (sums, at), (weights, k), (values, k))
    combine_accumulators(config, sums)
    return sums


@cute.jit
def combine_accumulators(config: Constexpr, sums: cute.Tensor) -> None:
    """The end of the reduction order: a lane's four accumulators serially, the lanes by a halving tree, into run 0."""
    lanes = config.pool_lanes
    for a in cutlass.range_constexpr(1, 4):
        for y in cutlass.range(lanes, unroll_full=config.on_gpu):
            apply(add, config, (sums, y), (sums, y), (sums, a * lanes + y))
    halving_tree(config, sums, lanes, 1)


@cute.jit
def halving_tree(config: Constexpr, values: cute.Tensor, count: Constexpr, each: Constexpr) -> None:
    """Add run x + count/2 of `each` column groups to run x, halve `count`, repeat; the sums end in run 0."""
    for step in cutlass.range_constexpr(1, count.bit_length()):
        half = (count >> step) * each
        for x in cutlass.range(half, unroll_full=config.on_gpu):
            apply(add, config, (values, x), (values, x), (values, half + x))


@cute.jit
def forward_row(
    config: Constexpr,
    kv: cute.Tensor,
    score: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    place: Place,
    index: Constexpr = entry,
) -> None:
    """Write one row's column group of out; `bias` as `load_bias` gives it, `index` where kv and score have an entry."""
    if cutlass.const_expr(config.coff == 1):
        _forward_row(config, kv, score, bias, out, place, 0, index)
    elif place.first:
        _forward_row(config, kv, score, bias, out, place, own_block(config), index)
    else:
        _forward_row(config, kv, score, bias, out, place, 0, index)


@cute.jit
def _forward_row(
    config: Constexpr,
    kv: cute.Tensor,
    score: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    place: Place,
    start: Constexpr,
    index: Constexpr,
) -> None:
    scores, values = load_window(config, score, place, start, index), load_window(config, kv, place, start, index)
    pooled = fragments(1, config)
    for one in config.each_column():
        weights = softmax(one, scores, score, bias, place, start, index)
        apply(same, one, (pooled, 0), (pool_sum(one, weights, values, start), 0))
    store_rounded(config, out, row_entry(place), same, (pooled, 0))


@cute.jit
def backward_row(
    config: Constexpr,
    kv: cute.Tensor,
    score: cute.Tensor,
    bias: cute.Tensor,
    grad_out: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    dscore: cute.Tensor,
    place: Place,
) -> None:
    """Write one row's column group of grad_kv and grad_score, and its fp32 dscore to `dscore`, (window, vec)."""
    tensors = kv, score, bias, grad_out, grad_kv, grad_score, dscore
    if cutlass.const_expr(config.coff == 1):
        _backward_row(config, *tensors, place, 0)
    elif place.first:
        for k in cutlass.range(own_block(config), unroll_full=config.on_gpu):
            dscore[k, None].fill(0.0)
        _backward_row(config, *tensors, place, own_block(config))
    else:
        _backward_row(config, *tensors, place, 0)


@cute.jit
def _backward_row(
    config: Constexpr,
    kv: cute.Tensor,
    score: cute.Tensor,
    bias: cute.Tensor,
    grad_out: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    dscore: cute.Tensor,
    place: Place,
    start: Constexpr,
) -> None:
    scores, values = load_window(config, score, place, start), load_window(config, kv, place, start)
    go = fragments(1, config, storage(config))
    cute.autovec_copy(grad_out[row_entry(place), None], go[0, None])
    dkv = fragments(config.window, config, storage(config))
    for one in config.each_column():
        weights = softmax(one, scores, score, bias, place, start, entry)
        for k in cutlass.range(start, config.window, unroll_full=config.on_gpu):
            apply(term_of, one, (dscore, k), (go, 0), (values, k), (weights, k))
        total = lane_sum(one, dscore, start)
        for k in cutlass.range(start, config.window, unroll_full=config.on_gpu):
            apply(dscore_of, one, (dscore, k), (weights, k), (total, 0), (dscore, k))
            apply(dkv_of, one, (dkv, k), (go, 0), (weights, k))
    for half in cutlass.range_constexpr(start // config.ratio, config.coff):
        for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
            w = half * config.ratio + k
            at = entry(config, place, half, k)
            store_rounded(config, grad_score, at, same, (dscore, w))
            cute.autovec_copy(dkv[w, None], grad_kv[at, None])


def term_of(go: Lane, v: Lane, p: Lane) -> Lane:
    return mul(mul(go, v), p)


def dscore_of(p: Lane, total: Lane, t: Lane) -> Lane:
    return not_negative_zero(fma(-p, total, t))


def dkv_of(go: Lane, p: Lane) -> Lane:
    return not_negative_zero(mul(go, p))
