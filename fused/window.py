"""One row of the compressor for one group of columns: which entries it pools, and the arithmetic of both directions.

Every function here runs unchanged as part of a GPU thread and of the CPU loop. Tensors in memory come as `columns`
views, registers as (count, vec) fragments. Overlap has two halves: half 0 is the previous block in the first-half
columns, the last half always the row's own block; without overlap there is only the own block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32

from .arith import (
    NEG_INF,
    Group,
    Lane,
    add,
    apply,
    div,
    div_by,
    exp,
    fma,
    maximum,
    minimum,
    mul,
    not_negative_zero,
    reciprocal,
    storage,
    sub,
)
from .config import Config

# Logits further below the top than this take the slow division: their powers, from 2^-96 down, or the remainders of
# their quotients, could leave the normal range.
FAST_DIVISION = -66.0


class Place(NamedTuple):
    """One row's column group: `groups` column groups make a row of out, `coff * groups` a token."""

    row: Int32
    token: Int32  # the first own token
    first: Boolean  # of its segment: the overlap half is invalid
    group: Int32
    groups: Int32


def columns(tensor: cute.Tensor, count: Int32, config: Config, dtype: type | None = None) -> cute.Tensor:
    """A contiguous tensor as (count, vec): column groups that one step loads and stores whole."""
    pointer = tensor.iterator if dtype is None else cute.recast_ptr(tensor.iterator, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout((count, config.vec), stride=(config.vec, 1)))


def fragments(count: int, config: Config, dtype: type = Float32) -> cute.Tensor:
    """Registers for `count` column groups, (count, vec)."""
    return cute.make_rmem_tensor(cute.make_layout((count, config.vec), stride=(config.vec, 1)), dtype)


def entry(config: Config, place: Place, half: int | Int32, k: Int32) -> Int32:
    """Index in kv of entry `k` of one half of a row's window."""
    back = (config.coff - 1 - half) * config.ratio
    return ((place.token - back + k) * config.coff + half) * place.groups + place.group


def ape_entry(config: Config, group: Int32, groups: Int32, half: int | Int32, k: Int32) -> Int32:
    """Index in ape of the position bias of the same entry."""
    return (k * config.coff + half) * groups + group


def row_entry(place: Place) -> Int32:
    """Index in out and grad_out."""
    return place.row * place.groups + place.group


@cute.jit
def find_segment(cu_seqlens_comp: cute.Tensor, segments: Int32, row: Int32) -> Int32:
    """The segment that holds `row`: the last one that starts at or before it, so empty ones are stepped over."""
    low = Int32(0)
    high = segments
    while high - low > 1:
        middle = (low + high) // 2
        if cu_seqlens_comp[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@cute.jit
def locate(
    config: Constexpr, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor, segments: Int32, row: Int32
) -> tuple[Int32, Int32]:
    """Where a row lies, as two numbers.

    The first is its first own token, or −1 − token if the row is its segment's first block, which padding rows are
    too: −1. The second is the end of the segment if the row is its last one, else −1.
    """
    code = Int32(-1)
    end = Int32(-1)
    if row < cu_seqlens_comp[segments]:
        segment = find_segment(cu_seqlens_comp, segments, row)
        block = row - cu_seqlens_comp[segment]
        code = cu_seqlens[segment] + block * config.ratio
        if block == 0:
            code = -1 - code
        if row + 1 == cu_seqlens_comp[segment + 1]:
            end = cu_seqlens[segment + 1]
    return code, end


def place_of(row: Int32, code: Int32, group: Int32, groups: Int32) -> Place:
    """One column group of the row that `locate` gave `code` for."""
    return Place(row, code ^ (code >> 31), code < 0, group, groups)


def _is_invalid(config: Config, place: Place, half: int) -> Boolean:
    return place.first & (half < config.coff - 1)


@cute.jit
def load_bias(config: Constexpr, ape: cute.Tensor, group: Int32, groups: Int32) -> cute.Tensor:
    """ape for every entry of a window, (window, vec) fp32: the same in every row."""
    bias = fragments(config.window, config)
    for half in cutlass.range_constexpr(config.coff):
        for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
            at = ape_entry(config, group, groups, half, k)
            cute.autovec_copy(ape[at, None], bias[half * config.ratio + k, None])
    return bias


@cute.jit
def load_window(config: Constexpr, memory: cute.Tensor, place: Place) -> cute.Tensor:
    """A row's window of kv or score, (window, vec) in `storage`; 0 where it is invalid."""
    window = fragments(config.window, config, storage(config))
    for half in cutlass.range_constexpr(config.coff):
        if _is_invalid(config, place, half):
            for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
                window[half * config.ratio + k, None].fill(0)
        else:
            for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
                cute.autovec_copy(memory[entry(config, place, half, k), None], window[half * config.ratio + k, None])
    return window


@cute.jit
def add_bias(config: Constexpr, count: Constexpr, scores: cute.Tensor, bias: cute.Tensor) -> cute.Tensor:
    """scores + bias of `count` entries, (count, vec) fp32."""
    x = fragments(count, config)
    for k in cutlass.range(count, unroll_full=config.on_gpu):
        apply(add, config, (x, k), (scores, k), (bias, k))
    return x


@cute.jit
def extreme(config: Constexpr, count: Constexpr, x: cute.Tensor, operation: Constexpr) -> cute.Tensor:
    """`maximum` or `minimum` over `count` entries, (1, vec)."""
    found = fragments(1, config)
    cute.autovec_copy(x[0, None], found[0, None])
    for k in cutlass.range(1, count, unroll_full=config.on_gpu):
        apply(operation, config, (found, 0), (found, 0), (x, k))
    return found


@cute.jit
def to_powers(config: Constexpr, count: Constexpr, x: cute.Tensor, top: cute.Tensor) -> None:
    """Turn `count` logits into exp(x - top) in place."""
    for k in cutlass.range(count, unroll_full=config.on_gpu):
        apply(lambda a, b: exp(sub(a, b), config), config, (x, k), (x, k), (top, 0))


@cute.jit
def softmax(config: Constexpr, scores: cute.Tensor, bias: cute.Tensor, place: Place) -> cute.Tensor:
    """Weights of a row's window, (window, vec) fp32, summed in softmax order; the logit of an invalid entry is −inf."""
    x = add_bias(config, config.window, scores, bias)
    # Before −inf comes in: a weight of 0 is no hindrance to the fast division.
    low = extreme(config, config.window, x, minimum)
    for half in cutlass.range_constexpr(config.coff):
        if _is_invalid(config, place, half):
            for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
                x[half * config.ratio + k, None].fill(NEG_INF)
    top = extreme(config, config.window, x, maximum)
    to_powers(config, config.window, x, top)
    normalise(config, config.window, x, lane_sum(config, x), low, top)
    return x


@cute.jit
def normalise(
    config: Constexpr, count: Constexpr, x: cute.Tensor, total: cute.Tensor, low: cute.Tensor, top: cute.Tensor
) -> None:
    """x /= total for `count` entries, by IEEE division; in three instructions on the GPU where no power is tiny.

    low and top are of the logits whose powers x holds, entries with a power of 0 aside.
    """
    if cutlass.const_expr(config.on_gpu):
        fast = Boolean(True)
        for c in config.columns:
            fast = fast & (sub(low[0, c], top[0, c]) > FAST_DIVISION)
        if fast:
            r = fragments(1, config)
            apply(reciprocal, config, (r, 0), (total, 0))
            for k in cutlass.range(count, unroll_full=True):
                apply(div_by, config, (x, k), (x, k), (total, 0), (r, 0))
        else:
            for k in cutlass.range(count, unroll_full=True):
                apply(div, config, (x, k), (x, k), (total, 0))
    else:
        for k in cutlass.range(count):
            apply(div, config, (x, k), (x, k), (total, 0))


@cute.jit
def lane_sum(config: Constexpr, terms: cute.Tensor) -> cute.Tensor:
    """Softmax order: lane x adds entries x, x + lanes, ... serially from +0; the lanes combine by a halving tree."""
    sums = fragments(config.softmax_lanes, config)
    sums.fill(0.0)
    for k in cutlass.range(config.window, unroll_full=config.on_gpu):
        apply(add, config, (sums, k % config.softmax_lanes), (sums, k % config.softmax_lanes), (terms, k))
    halving_tree(config, sums, config.softmax_lanes, 1)
    return sums


@cute.jit
def pool_sum(config: Constexpr, weights: cute.Tensor, values: cute.Tensor) -> cute.Tensor:
    """sum_k p_k * kv_k in reduction order: lane y deals entries y, y + lanes, ... round-robin to four accumulators."""
    lanes = config.pool_lanes
    sums = fragments(4 * lanes, config)
    sums.fill(0.0)
    for k in cutlass.range(config.window, unroll_full=config.on_gpu):
        # The k-th entry is the (k // lanes)-th of lane k % lanes, so its accumulator is k // lanes % 4.
        at = k % (4 * lanes)
        apply(lambda s, p, v: add(s, mul(v, p)), config, (sums, at), (sums, at), (weights, k), (values, k))
    for a in cutlass.range_constexpr(1, 4):
        for y in cutlass.range(lanes, unroll_full=config.on_gpu):
            apply(add, config, (sums, y), (sums, y), (sums, a * lanes + y))
    halving_tree(config, sums, lanes, 1)
    return sums


@cute.jit
def halving_tree(config: Constexpr, values: cute.Tensor, count: Constexpr, each: Constexpr) -> None:
    """Add run x + count/2 of `each` column groups to run x, halve `count`, repeat; the sums end in run 0."""
    for step in cutlass.range_constexpr(1, count.bit_length()):
        half = (count >> step) * each
        for x in cutlass.range(half, unroll_full=config.on_gpu):
            apply(add, config, (values, x), (values, x), (values, half + x))


@cute.jit
def forward_row(
    config: Constexpr, kv: cute.Tensor, score: cute.Tensor, bias: cute.Tensor, out: cute.Tensor, place: Place
) -> None:
    """Write one row's column group of out; `bias` as `load_bias` gives it."""
    scores, values = load_window(config, score, place), load_window(config, kv, place)
    pooled = fragments(1, config)
    for one in config.each_column():
        apply(same, one, (pooled, 0), (pool_sum(one, softmax(one, scores, bias, place), values), 0))
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
    scores, values = load_window(config, score, place), load_window(config, kv, place)
    go = fragments(1, config, storage(config))
    cute.autovec_copy(grad_out[row_entry(place), None], go[0, None])
    dkv = fragments(config.window, config, storage(config))
    for one in config.each_column():
        column_gradients(one, scores, values, bias, go, dkv, dscore, place)
    for half in cutlass.range_constexpr(config.coff):
        if _is_invalid(config, place, half):
            for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
                dscore[half * config.ratio + k, None].fill(0.0)
        else:
            for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
                w = half * config.ratio + k
                at = entry(config, place, half, k)
                store_rounded(config, grad_score, at, same, (dscore, w))
                cute.autovec_copy(dkv[w, None], grad_kv[at, None])


@cute.jit
def column_gradients(
    config: Constexpr,
    scores: cute.Tensor,
    values: cute.Tensor,
    bias: cute.Tensor,
    go: cute.Tensor,
    dkv: cute.Tensor,
    dscore: cute.Tensor,
    place: Place,
) -> None:
    """dkv in `storage` and dscore in fp32 of a row's window, (window, vec), for the columns of `config`."""
    weights = softmax(config, scores, bias, place)
    for k in cutlass.range(config.window, unroll_full=config.on_gpu):
        apply(term_of, config, (dscore, k), (go, 0), (values, k), (weights, k))
    total = lane_sum(config, dscore)
    for k in cutlass.range(config.window, unroll_full=config.on_gpu):
        apply(dscore_of, config, (dscore, k), (weights, k), (total, 0), (dscore, k))
        apply(dkv_of, config, (dkv, k), (go, 0), (weights, k))


def term_of(go: Lane, v: Lane, p: Lane) -> Lane:
    return mul(mul(go, v), p)


def dscore_of(p: Lane, total: Lane, t: Lane) -> Lane:
    return not_negative_zero(fma(-p, total, t))


def dkv_of(go: Lane, p: Lane) -> Lane:
    return not_negative_zero(mul(go, p))


def store_rounded(
    config: Config, memory: cute.Tensor, at: Int32, operation: Callable[..., Lane], *operands: Group
) -> None:
    rounded = fragments(1, config, storage(config))
    apply(operation, config, (rounded, 0), *operands)
    cute.autovec_copy(rounded[0, None], memory[at, None])


def same(a: Lane) -> Lane:
    return a
