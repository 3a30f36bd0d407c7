"""Maxima and sums over a window that a block's threads share.

What a softmax sum needs in order passes through one plane of shared memory, (plane_entries * threads_x, vec) fp32; one
thread a column and lane adds it serially from there. A thread's entries are those of one accumulator of the pooling
sum, or of a few, wherever their number is a multiple of `threads_y`; else the products take the same way.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .arith import Group, add, apply, div_by, maximum, mul
from .config import WARP, Config
from .row import combine_accumulators, highest
from .shares import Block, own_entries, plane_entries, warps
from .window import fragments, same

BATCH = 8  # terms of a serial sum
TOGETHER = 4  # entries that a thread reads from the plane at a time
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
    # Not unrolled: there are no registers for the maxima of eight warps at once.
    for warp in cutlass.range(warps(config), unroll=2):
        cute.autovec_copy(block.tops[warp * width + block.tx, None], other[0, None])
        apply(maximum, config, (top, 0), (top, 0), (other, 0))
    return top


def slot(config: Config, i: int | Int32, block: Block) -> Int32:
    """Where in the plane the thread's i-th entry is."""
    return (i * config.schedule.threads_y + block.ty) * config.schedule.threads_x + block.tx


def put(config: Config, i: int, block: Block, own: cute.Tensor, at: int) -> None:
    """Write entry `at` of `own` to the plane as the thread's i-th."""
    cute.autovec_copy(own[at, None], block.plane[slot(config, i, block), None])


def take(config: Config, i: int, block: Block, own: cute.Tensor, at: int) -> None:
    """Read the thread's i-th entry of the plane into entry `at` of `own`."""
    cute.autovec_copy(block.plane[slot(config, i, block), None], own[at, None])


@cute.jit
def take_in_turn(config: Constexpr, i: Constexpr, block: Block, own: cute.Tensor, at: Constexpr) -> None:
    """`take` of all entries one after the other, of a few at a time, for registers. For whole warps."""
    if cutlass.const_expr(i % TOGETHER == 0 and i > 0):
        cute.arch.sync_warp()
    take(config, i, block, own, at)


@cute.jit
def to_plane(config: Constexpr, own: cute.Tensor, block: Block) -> None:
    """Put the thread's entries where the serial sums read them."""
    for i in cutlass.range_constexpr(own_entries(config)):
        put(config, i, block, own, i)


@cute.jit
def own_weight(
    config: Constexpr,
    powers: cute.Tensor,
    i: Constexpr,
    total: cute.Tensor,
    r: cute.Tensor,
    own: cute.Tensor,
    at: Constexpr,
) -> None:
    """The softmax weight of power `i` of the thread into entry `at` of `own`, by what `divisor` has given."""
    if cutlass.const_expr(config.fast):
        apply(div_by, config, (own, at), (powers, i), (total, 0), (r, 0))
    else:
        apply(same, config, (own, at), (powers, i))


@cute.jit
def serial_sums(
    config: Constexpr, block: Block, lanes: Constexpr, sums: cute.Tensor, thread: Int32, threads: Constexpr
) -> None:
    """Lane x adds the plane's entries x, x + lanes, ... serially from +0 into slot x of `sums`.

    The work of `threads` threads, of which this is `thread`.
    """
    single = cutlass.const_expr(replace(config, vec=1))
    columns = cutlass.const_expr(config.schedule.threads_x * config.vec)
    size = cutlass.const_expr(plane_entries(config) * columns)
    stride, count = cutlass.const_expr(lanes * columns), cutlass.const_expr(plane_entries(config) // lanes)
    plane, to = _flat(block.plane, size), _flat(sums, stride)
    total = fragments(1, single)
    for at in cutlass.range(thread, stride, threads):
        total.fill(0.0)
        if cutlass.const_expr(plane_entries(config) % lanes == 0):
            term = fragments(2 * BATCH, single)
            rest = cutlass.const_expr(count % (2 * BATCH))
            if cutlass.const_expr(count > rest):
                # One batch of terms is loaded while the other is added.
                _load_terms(single, plane, at, stride, term, 0, BATCH)
                for start in cutlass.range(0, count - rest, 2 * BATCH):
                    _load_terms(single, plane, at + (start + BATCH) * stride, stride, term, BATCH, BATCH)
                    _add_terms(single, total, term, 0, BATCH)
                    after = cutlass.min(start + 2 * BATCH, count - BATCH)
                    _load_terms(single, plane, at + after * stride, stride, term, 0, BATCH)
                    _add_terms(single, total, term, BATCH, BATCH)
            _load_terms(single, plane, at + (count - rest) * stride, stride, term, 0, rest)
            _add_terms(single, total, term, 0, rest)
        else:
            for w in cutlass.range(at, size, stride, unroll=4):
                apply(add, single, (total, 0), (total, 0), (plane, w))
        cute.autovec_copy(total[0, None], to[at, None])


@cute.jit
def block_sums(config: Constexpr, block: Block, lanes: Constexpr, sums: cute.Tensor) -> None:
    """`serial_sums` by the whole block, synchronised before and after."""
    threads = cutlass.const_expr(config.schedule.threads)
    cute.arch.sync_threads()
    serial_sums(config, block, lanes, sums, block.ty * config.schedule.threads_x + block.tx, threads)
    cute.arch.sync_threads()


def _load_terms(
    config: Config, plane: cute.Tensor, at: Int32, stride: int, term: cute.Tensor, first: int, count: int
) -> None:
    for i in range(count):
        cute.autovec_copy(plane[at + i * stride, None], term[first + i, None])


def _add_terms(config: Config, total: cute.Tensor, term: cute.Tensor, first: int, count: int) -> None:
    for i in range(count):
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
def softmax_sum(config: Constexpr, block: Block) -> cute.Tensor:
    """The sum of the plane's entries in softmax order for each thread, (1, vec)."""
    block_sums(config, block, config.softmax_lanes, block.sums)
    if cutlass.const_expr(config.softmax_lanes > 1):
        if block.ty == 0:
            combine(config, block, block.sums, config.softmax_lanes, 1)
        cute.arch.sync_threads()
    total = fragments(1, config)
    cute.autovec_copy(block.sums[block.tx, None], total[0, None])
    return total


@cute.jit
def pool_sum(
    config: Constexpr, powers: cute.Tensor, values: cute.Tensor, total: cute.Tensor, r: cute.Tensor, block: Block
) -> cute.Tensor:
    """sum_k p_k * kv_k in reduction order, (1, vec), for the threads of ty = 0; p_k as `own_weight` has it."""
    shares, width = config.schedule.threads_y, config.schedule.threads_x
    accumulators = cutlass.const_expr(4 * config.pool_lanes)
    weight = fragments(1, config)
    if cutlass.const_expr(accumulators % shares == 0):
        each = cutlass.const_expr(accumulators // shares)
        sums = fragments(each, config)
        sums.fill(0.0)
        for i in cutlass.range_constexpr(own_entries(config)):
            own_weight(config, powers, i, total, r, weight, 0)
            # Entry k goes to accumulator k % accumulators, so that a thread's are its own.
            _add_product(config, sums, i % each, (weight, 0), (values, i))
        for a in cutlass.range_constexpr(each):
            cute.autovec_copy(sums[a, None], block.accumulators[(a * shares + block.ty) * width + block.tx, None])
        cute.arch.sync_threads()
    else:
        for i in cutlass.range_constexpr(own_entries(config)):
            own_weight(config, powers, i, total, r, weight, 0)
            apply(mul, config, (weight, 0), (values, i), (weight, 0))
            put(config, i, block, weight, 0)
        block_sums(config, block, accumulators, block.accumulators)
    return combined(config, block)


def _add_product(config: Config, sums: cute.Tensor, at: int, weight: Group, value: Group) -> None:
    apply(lambda s, p, v: add(s, mul(v, p)), config, (sums, at), (sums, at), weight, value)


@cute.jit
def combined(config: Constexpr, block: Block) -> cute.Tensor:
    """The accumulators combined, (1, vec), for the threads of ty = 0."""
    accumulators = cutlass.const_expr(4 * config.pool_lanes)
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
