"""Maxima and sums over a window that a block's threads share.

What a softmax sum needs in order passes through one plane of shared memory, (window * threads_x, vec) fp32; one thread
a column and lane adds it serially from there. A thread's entries are those of one accumulator of the pooling sum, or of
a few, wherever their number is a multiple of `threads_y`; else the products take the same way.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .arith import Group, add, apply, maximum, mul
from .config import WARP, Config
from .row import combine_accumulators, highest
from .shares import Block, own_entries, warps
from .window import fragments

BATCH = 8  # terms of a serial sum
MOST_SUMS = 16  # accumulators that one thread combines in registers


@cute.jit
def block_highest(config: Constexpr, x: cute.Tensor, block: Block) -> cute.Tensor:
    """The maximum over a window for each of its threads, (1, vec)."""
    top = highest(config, 0, own_entries(config), x)
    width = config.schedule.threads_x
    threads = cutlass.const_expr(config.schedule.threads)
    other = fragments(1, config)
    for step in cutlass.range_constexpr((min(WARP, threads) // width).bit_length() - 1):
        for c in cutlass.range_constexpr(config.vec):
            other[0, c] = cute.arch.shuffle_sync_bfly(top[0, c], width << step)
        apply(maximum, config, (top, 0), (top, 0), (other, 0))
    thread = block.ty * width + block.tx
    if thread % WARP < width:
        cute.autovec_copy(top[0, None], block.tops[thread // WARP * width + block.tx, None])
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(warps(config)):
        cute.autovec_copy(block.tops[warp * width + block.tx, None], other[0, None])
        apply(maximum, config, (top, 0), (top, 0), (other, 0))
    return top


@cute.jit
def to_plane(config: Constexpr, own: cute.Tensor, block: Block) -> None:
    """Put the thread's entries where the serial sums read them."""
    width, shares = config.schedule.threads_x, config.schedule.threads_y
    for i in cutlass.range_constexpr(own_entries(config)):
        w = i * shares + block.ty
        if cutlass.const_expr((i + 1) * shares <= config.window):
            cute.autovec_copy(own[i, None], block.plane[w * width + block.tx, None])
        elif w < config.window:
            cute.autovec_copy(own[i, None], block.plane[w * width + block.tx, None])


@cute.jit
def serial_sums(
    config: Constexpr, block: Block, lanes: Constexpr, sums: cute.Tensor, thread: Int32, threads: Constexpr
) -> None:
    """Lane x adds the plane's entries x, x + lanes, ... serially from +0 into slot x of `sums`.

    The work of `threads` threads, of which this is `thread`.
    """
    single = cutlass.const_expr(replace(config, vec=1))
    columns = cutlass.const_expr(config.schedule.threads_x * config.vec)
    stride, count = cutlass.const_expr(lanes * columns), cutlass.const_expr(config.window // lanes)
    plane, to = _flat(block.plane, config.window * columns), _flat(sums, stride)
    total = fragments(1, single)
    for at in cutlass.range(thread, stride, threads):
        total.fill(0.0)
        if cutlass.const_expr(count % (2 * BATCH) == 0 and config.window % lanes == 0):
            # One batch of terms is loaded while the other is added.
            term = fragments(2 * BATCH, single)
            _load_batch(single, plane, at, stride, term, 0)
            for start in cutlass.range(0, count, 2 * BATCH):
                _load_batch(single, plane, at + (start + BATCH) * stride, stride, term, BATCH)
                _add_batch(single, total, term, 0)
                after = cutlass.min(start + 2 * BATCH, count - BATCH)
                _load_batch(single, plane, at + after * stride, stride, term, 0)
                _add_batch(single, total, term, BATCH)
        else:
            for w in cutlass.range(at, config.window * columns, stride, unroll=4):
                apply(add, single, (total, 0), (total, 0), (plane, w))
        cute.autovec_copy(total[0, None], to[at, None])


@cute.jit
def block_sums(config: Constexpr, block: Block, lanes: Constexpr, sums: cute.Tensor) -> None:
    """`serial_sums` by the whole block, synchronised before and after."""
    threads = cutlass.const_expr(config.schedule.threads)
    cute.arch.sync_threads()
    serial_sums(config, block, lanes, sums, block.ty * config.schedule.threads_x + block.tx, threads)
    cute.arch.sync_threads()


def _load_batch(config: Config, plane: cute.Tensor, at: Int32, stride: int, term: cute.Tensor, first: int) -> None:
    for i in range(BATCH):
        cute.autovec_copy(plane[at + i * stride, None], term[first + i, None])


def _add_batch(config: Config, total: cute.Tensor, term: cute.Tensor, first: int) -> None:
    for i in range(BATCH):
        apply(add, config, (total, 0), (total, 0), (term, first + i))


def _flat(shared: cute.Tensor, size: int) -> cute.Tensor:
    """Shared slots column by column, (size, 1)."""
    return cute.make_tensor(shared.iterator, cute.make_layout((size, 1), stride=(1, 1)))


@cute.jit
def combine(config: Constexpr, block: Block, sums: cute.Tensor, lanes: Constexpr, each: Constexpr) -> None:
    """Combine the thread's slots of `sums` into the first: `each` in a lane serially, the lanes by a halving tree."""
    own = _own_slots(config, block, sums, lanes * each)
    for a in cutlass.range_constexpr(1, each):
        for y in cutlass.range(lanes, unroll=2):
            apply(add, config, (own, y), (own, y), (own, a * lanes + y))
    for step in cutlass.range_constexpr(1, lanes.bit_length()):
        for x in cutlass.range(lanes >> step, unroll=2):
            apply(add, config, (own, x), (own, x), (own, (lanes >> step) + x))


def _own_slots(config: Config, block: Block, sums: cute.Tensor, count: int) -> cute.Tensor:
    """The slots of the thread's column group, (count, vec)."""
    layout = cute.make_layout((count, config.vec), stride=(config.schedule.threads_x * config.vec, 1))
    return cute.make_tensor(sums[block.tx, None].iterator, layout)


@cute.jit
def lane_sum(config: Constexpr, terms: cute.Tensor, block: Block) -> cute.Tensor:
    """The sum over a window in softmax order for each of its threads, (1, vec); `terms` as `own_logits` has them."""
    to_plane(config, terms, block)
    block_sums(config, block, config.softmax_lanes, block.sums)
    if cutlass.const_expr(config.softmax_lanes > 1):
        if block.ty == 0:
            combine(config, block, block.sums, config.softmax_lanes, 1)
        cute.arch.sync_threads()
    total = fragments(1, config)
    cute.autovec_copy(block.sums[block.tx, None], total[0, None])
    return total


def _add_product(config: Config, sums: cute.Tensor, i: int, weight: Group, value: Group) -> None:
    """Add the product of the thread's i-th entry, where its accumulators of the pooling sum are its own."""
    at = i % (4 * config.pool_lanes // config.schedule.threads_y)  # entry k goes to accumulator k % (4 * pool_lanes)
    apply(lambda s, p, v: add(s, mul(v, p)), config, (sums, at), (sums, at), weight, value)


def _store_accumulators(config: Config, sums: cute.Tensor, accumulators: cute.Tensor, tx: Int32, ty: Int32) -> None:
    """Share the thread's accumulators."""
    shares, width = config.schedule.threads_y, config.schedule.threads_x
    for a in range(4 * config.pool_lanes // shares):
        cute.autovec_copy(sums[a, None], accumulators[(a * shares + ty) * width + tx, None])


@cute.jit
def pool_sum(config: Constexpr, weights: cute.Tensor, values: cute.Tensor, block: Block) -> cute.Tensor:
    """sum_k p_k * kv_k in reduction order, (1, vec), for the threads of ty = 0."""
    accumulators = cutlass.const_expr(4 * config.pool_lanes)
    if cutlass.const_expr(accumulators % config.schedule.threads_y == 0):
        sums = fragments(accumulators // config.schedule.threads_y, config)
        sums.fill(0.0)
        for i in cutlass.range_constexpr(own_entries(config)):
            _add_product(config, sums, i, (weights, i), (values, i))
        _store_accumulators(config, sums, block.accumulators, block.tx, block.ty)
        cute.arch.sync_threads()
    else:
        for i in cutlass.range_constexpr(own_entries(config)):
            apply(mul, config, (weights, i), (values, i), (weights, i))
        to_plane(config, weights, block)
        block_sums(config, block, accumulators, block.accumulators)
    pooled = fragments(1, config)
    if block.ty == 0:
        if cutlass.const_expr(accumulators <= MOST_SUMS):
            shared, own = _own_slots(config, block, block.accumulators, accumulators), fragments(accumulators, config)
            for x in cutlass.range(accumulators, unroll_full=True):
                cute.autovec_copy(shared[x, None], own[x, None])
            combine_accumulators(config, own)
            cute.autovec_copy(own[0, None], pooled[0, None])
        else:
            combine(config, block, block.accumulators, config.pool_lanes, 4)
            cute.autovec_copy(block.accumulators[block.tx, None], pooled[0, None])
    return pooled
