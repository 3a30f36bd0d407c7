"""GPU kernels whose block shares a row's window: a thread has every `threads_y`-th entry of one column group.

What a sum needs in order, powers or gradient terms, passes through one plane of shared memory, (window * threads_x,
vec) fp32; the serial sums are read from there by one thread a column and lane. Windows of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .arith import FAR, NEG_INF, Group, add, apply, maximum, mul, storage
from .block import clear_rowless, known_groups, locate_rows
from .config import LEAF_ROWS, WARP, Config
from .gaps import zero_after_last
from .window import (
    Place,
    add_bias,
    ape_entry,
    combine_accumulators,
    divide,
    dkv_of,
    dscore_of,
    entry,
    fragments,
    halving_tree,
    highest,
    near_divide,
    near_powers,
    place_of,
    row_entry,
    same,
    store_rounded,
    term_of,
    to_powers,
)

BATCH = 2  # terms of a serial sum
MOST_SUMS = 64  # lanes and accumulators that one thread combines in registers


class Block(NamedTuple):
    """A thread's place in its block, and the memory that the block shares: slots for `threads_x` column groups."""

    tx: Int32
    ty: Int32
    plane: cute.Tensor
    tops: cute.Tensor  # one slot a warp
    sums: cute.Tensor  # one slot a lane of the softmax sums
    accumulators: cute.Tensor  # one slot an accumulator of the pooling sum


def enter_block(config: Config) -> Block:
    """Where the thread is; allocates what is shared."""
    tx, ty, _ = cute.arch.thread_idx()
    smem, width = SmemAllocator(), config.schedule.threads_x

    def slots(count: int) -> cute.Tensor:
        layout = cute.make_layout((count * width, config.vec), stride=(config.vec, 1))
        return smem.allocate_tensor(Float32, layout, 16)

    return Block(
        tx,
        ty,
        plane=slots(config.window),
        tops=slots(_warps(config)),
        sums=slots(config.softmax_lanes),
        accumulators=slots(4 * config.pool_lanes),
    )


def own_entries(config: Config) -> int:
    """Window entries of one thread, at most."""
    return -(-config.window // config.schedule.threads_y)


def _warps(config: Config) -> int:
    return -(-config.schedule.threads_x * config.schedule.threads_y // WARP)


def _entry_of(config: Config, i: int, ty: Int32) -> tuple[int | Int32, int | Int32]:
    """Half and place in it of a thread's i-th entry, the half at compile time where a stride never straddles two."""
    shares = config.schedule.threads_y
    w = i * shares
    if config.ratio % shares == 0:
        return w // config.ratio, w % config.ratio + ty
    return (w + ty) // config.ratio, (w + ty) % config.ratio


def runs(config: Config) -> list[range]:
    """A thread's entries in runs that exist together: a half's, or each alone where a stride straddles halves."""
    shares, count = config.schedule.threads_y, own_entries(config)
    length = config.ratio // shares if config.ratio % shares == 0 else 1
    return [range(start, start + length) for start in range(0, count, length)]


def always_exists(config: Config, i: int) -> bool:
    """Whether every thread has an i-th entry, valid in every row."""
    shares = config.schedule.threads_y
    if config.window % shares:
        return False
    return config.coff == 1 or (config.ratio % shares == 0 and i * shares >= config.ratio)


def _exists(config: Config, place: Place, i: int, ty: Int32) -> Boolean:
    """Whether a thread has an i-th entry, and it is valid."""
    exists = Boolean(True)
    if config.window % config.schedule.threads_y:
        exists = i * config.schedule.threads_y + ty < config.window
    if config.coff == 2:
        half, _ = _entry_of(config, i, ty)
        exists = exists & ((half == 1) | (place.first == Boolean(False)))
    return exists


@cute.jit
def load_own(
    config: Constexpr, memory: cute.Tensor, place: Place, ty: Int32, index: Constexpr, kind: Constexpr
) -> cute.Tensor:
    """The thread's entries of a window, (own, vec) of `kind`, found by `entry` or `bias_entry`; else 0."""
    own = fragments(own_entries(config), config, kind)
    for run in cutlass.const_expr(runs(config)):
        if cutlass.const_expr(always_exists(config, run[0])):
            _load_run(config, memory, place, ty, index, run, own)
        elif _exists(config, place, run[0], ty):
            _load_run(config, memory, place, ty, index, run, own)
        else:
            for i in cutlass.const_expr(run):
                own[i, None].fill(0)
    return own


def _load_run(
    config: Config,
    memory: cute.Tensor,
    place: Place,
    ty: Int32,
    index: Callable[..., Int32],
    run: range,
    own: cute.Tensor,
) -> None:
    for i in run:
        half, k = _entry_of(config, i, ty)
        cute.autovec_copy(memory[index(config, place, half, k), None], own[i, None])


def bias_entry(config: Config, place: Place, half: int | Int32, k: Int32) -> Int32:
    """As `entry`, of the position bias."""
    return ape_entry(config, place.group, place.groups, half, k)


def any_row(group: Int32, groups: Int32) -> Place:
    """The place of a row that is no first block, so that all entries count."""
    return Place(Int32(0), Int32(0), Boolean(False), group, groups)


def load_own_bias(config: Config, ape: cute.Tensor, group: Int32, groups: Int32, ty: Int32) -> cute.Tensor:
    """ape for the thread's entries, (own, vec) fp32; 0 where there is none."""
    return load_own(config, ape, any_row(group, groups), ty, bias_entry, Float32)


@cute.jit
def own_logits(config: Constexpr, scores: cute.Tensor, bias: cute.Tensor, place: Place, ty: Int32) -> cute.Tensor:
    """Logits of the thread's entries, (own, vec) fp32; −inf where there is none."""
    x = add_bias(config, 0, own_entries(config), scores, bias)
    for run in cutlass.const_expr(runs(config)):
        if cutlass.const_expr(not always_exists(config, run[0])):
            if _exists(config, place, run[0], ty) == Boolean(False):
                for i in cutlass.const_expr(run):
                    x[i, None].fill(NEG_INF)
    return x


@cute.jit
def block_highest(config: Constexpr, x: cute.Tensor, block: Block) -> cute.Tensor:
    """The maximum over a window for each of its threads, (1, vec)."""
    top = highest(config, 0, own_entries(config), x)
    width = config.schedule.threads_x
    threads = cutlass.const_expr(width * config.schedule.threads_y)
    other = fragments(1, config)
    for step in cutlass.range_constexpr((min(WARP, threads) // width).bit_length() - 1):
        for c in cutlass.range_constexpr(config.vec):
            other[0, c] = cute.arch.shuffle_sync_bfly(top[0, c], width << step)
        apply(maximum, config, (top, 0), (top, 0), (other, 0))
    thread = block.ty * width + block.tx
    if thread % WARP < width:
        cute.autovec_copy(top[0, None], block.tops[thread // WARP * width + block.tx, None])
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(_warps(config)):
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
        if cutlass.const_expr(stride % WARP == 0 and count % (2 * BATCH) == 0 and config.window % lanes == 0):
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
    threads = cutlass.const_expr(config.schedule.threads_x * config.schedule.threads_y)
    cute.arch.sync_threads()
    serial_sums(config, block, lanes, sums, block.ty * config.schedule.threads_x + block.tx, threads)
    cute.arch.sync_threads()


def _load_batch(config: Config, plane: cute.Tensor, at: Int32, stride: int, term: cute.Tensor, first: int) -> None:
    """The barriers keep the loads together: a warp can wait for few things apart."""
    cute.arch.sync_warp()
    for i in range(BATCH):
        cute.autovec_copy(plane[at + i * stride, None], term[first + i, None])
    cute.arch.sync_warp()


def _add_batch(config: Config, total: cute.Tensor, term: cute.Tensor, first: int) -> None:
    for i in range(BATCH):
        apply(add, config, (total, 0), (total, 0), (term, first + i))


def _flat(shared: cute.Tensor, size: int) -> cute.Tensor:
    """Shared slots column by column, (size, 1)."""
    return cute.make_tensor(shared.iterator, cute.make_layout((size, 1), stride=(1, 1)))


@cute.jit
def combine(config: Constexpr, block: Block, sums: cute.Tensor, count: Constexpr, operation: Constexpr) -> cute.Tensor:
    """The `count` slots of the thread's column group, combined by `operation` into the first."""
    width = config.schedule.threads_x
    layout = cute.make_layout((count, config.vec), stride=(width * config.vec, 1))
    own = cute.make_tensor(sums[block.tx, None].iterator, layout)
    if cutlass.const_expr(count <= MOST_SUMS):
        shared = own
        own = fragments(count, config)
        for x in cutlass.range_constexpr(count):
            cute.autovec_copy(shared[x, None], own[x, None])
    operation(config, own)
    return own


def _halve(config: Config, sums: cute.Tensor) -> None:
    halving_tree(config, sums, config.softmax_lanes, 1)


@cute.jit
def lane_sum(config: Constexpr, terms: cute.Tensor, block: Block) -> cute.Tensor:
    """The sum over a window in softmax order for each of its threads, (1, vec); `terms` as `own_logits` has them."""
    to_plane(config, terms, block)
    block_sums(config, block, config.softmax_lanes, block.sums)
    if cutlass.const_expr(config.softmax_lanes > 1):
        if block.ty == 0:
            combined = combine(config, block, block.sums, config.softmax_lanes, _halve)
            cute.autovec_copy(combined[0, None], block.sums[block.tx, None])
        cute.arch.sync_threads()
    total = fragments(1, config)
    cute.autovec_copy(block.sums[block.tx, None], total[0, None])
    return total


@cute.jit
def own_weights(
    config: Constexpr, kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, place: Place, block: Block
) -> tuple[cute.Tensor, cute.Tensor]:
    """The softmax weights of the thread's entries, (own, vec) fp32, and their values, (own, vec) in `storage`."""
    scores = load_own(config, score, place, block.ty, entry, storage(config))
    values = load_own(config, kv, place, block.ty, entry, storage(config))
    bias = load_own_bias(config, ape, place.group, place.groups, block.ty)
    x = own_logits(config, scores, bias, place, block.ty)
    top = block_highest(config, x, block)
    far = own_powers(config, x, top, score, ape, place, block.ty)
    own_divide(config, x, lane_sum(config, x, block), far)
    return x, values


@cute.jit
def own_powers(
    config: Constexpr, x: cute.Tensor, top: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, place: Place, ty: Int32
) -> Int32:
    """Turn the thread's logits into exp(x - top) in place; not 0 if `own_divide` may not be quick about them."""
    count = cutlass.const_expr(own_entries(config))
    far = Int32(0)
    if cutlass.const_expr(config.fast):
        for run in cutlass.const_expr(runs(config)):
            first, last = run[0], run[0] + len(run)
            if cutlass.const_expr(always_exists(config, first)):
                far = far | near_powers(config, first, last, x, top)
            elif _exists(config, place, first, ty):
                far = far | near_powers(config, first, last, x, top)
            else:
                for i in cutlass.const_expr(run):
                    x[i, None].fill(0.0)
        far = far & FAR
        if far != 0:
            # Loaded anew, so that registers need not keep what is hardly ever needed.
            again = load_own(config, score, place, ty, entry, storage(config))
            bias = load_own_bias(config, ape, place.group, place.groups, ty)
            exact = own_logits(config, again, bias, place, ty)
            to_powers(config, 0, count, exact, top)
            for i in cutlass.range_constexpr(count):
                apply(same, config, (x, i), (exact, i))
    else:
        to_powers(config, 0, count, x, top)
    return far


@cute.jit
def own_divide(config: Constexpr, x: cute.Tensor, total: cute.Tensor, far: Int32) -> None:
    """Divide the thread's powers by their sum, in place."""
    count = cutlass.const_expr(own_entries(config))
    if cutlass.const_expr(config.fast):
        if far == 0:
            near_divide(config, 0, count, x, total)
        else:
            divide(config, 0, count, x, total)
    else:
        divide(config, 0, count, x, total)


def add_product(config: Config, sums: cute.Tensor, i: int, weight: Group, value: Group) -> None:
    """Add the product of the thread's i-th entry, where its accumulators of the pooling sum are its own."""
    at = i % (4 * config.pool_lanes // config.schedule.threads_y)  # entry k goes to accumulator k % (4 * pool_lanes)
    apply(lambda s, p, v: add(s, mul(v, p)), config, (sums, at), (sums, at), weight, value)


def store_accumulators(config: Config, sums: cute.Tensor, accumulators: cute.Tensor, tx: Int32, ty: Int32) -> None:
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
            add_product(config, sums, i, (weights, i), (values, i))
        store_accumulators(config, sums, block.accumulators, block.tx, block.ty)
        cute.arch.sync_threads()
    else:
        for i in cutlass.range_constexpr(own_entries(config)):
            apply(mul, config, (weights, i), (values, i), (weights, i))
        to_plane(config, weights, block)
        block_sums(config, block, accumulators, block.accumulators)
    pooled = fragments(1, config)
    if block.ty == 0:
        combined = combine(config, block, block.accumulators, accumulators, combine_accumulators)
        cute.autovec_copy(combined[0, None], pooled[0, None])
    return pooled


@cute.kernel
def forward_kernel(
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor,
    segments: Int32,
    total_comp: Int32,
    groups: Int32,
    column_blocks: Int32,
    config: Constexpr,
) -> None:
    """A block pools `rows_each` rows, one after the other."""
    shape = config.schedule
    groups = known_groups(config, groups)
    number, _, _ = cute.arch.block_idx()
    start = number // column_blocks * shape.rows
    codes, _ = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, 1)
    block = enter_block(config)
    group = number % column_blocks * shape.threads_x + block.tx
    cute.arch.sync_threads()
    for local in cutlass.range(shape.rows):
        row = start + local
        if row < total_comp:
            # Threads past the last column work on the last one's, and keep it to themselves.
            place = place_of(row, codes[local], cutlass.min(group, groups - 1), groups)
            weights, values = own_weights(config, kv, score, ape, place, block)
            pooled = pool_sum(config, weights, values, block)
            if block.ty == 0 and group < groups:
                store_rounded(config, out, row_entry(place), same, (pooled, 0))


@cute.kernel
def backward_kernel(
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    grad_out: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    leaves: cute.Tensor,
    segments: Int32,
    total_tokens: Int32,
    total_comp: Int32,
    rowless_blocks: Int32,
    groups: Int32,
    column_blocks: Int32,
    config: Constexpr,
) -> None:
    """A block takes one part of a leaf: rows `LEAF_ROWS / rows_each` apart, the first steps of the halving tree."""
    shape = config.schedule
    groups = known_groups(config, groups)
    number, _, _ = cute.arch.block_idx()
    parts = cutlass.const_expr(shape.leaf_parts)
    if number >= rowless_blocks:
        number -= rowless_blocks
        part = number // column_blocks
        start = part // parts * LEAF_ROWS + part % parts
        codes, ends = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, parts)
        block = enter_block(config)
        group = number % column_blocks * shape.threads_x + block.tx
        inside = group < groups
        rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
        total = fragments(own_entries(config), config)
        total.fill(0.0)
        cute.arch.sync_threads()
        leaf = columns_of_part(config, leaves, part, groups)
        for turn in cutlass.range(shape.rows_each):
            local = turn if cutlass.const_expr(shape.rows_each < 4) else (turn & 1) * 2 + turn // 2
            row = start + local * parts
            dscore = fragments(own_entries(config), config)
            if row < rows:
                place = place_of(row, codes[local], cutlass.min(group, groups - 1), groups)
                weights, values = own_weights(config, kv, score, ape, place, block)
                store_gradients(config, weights, values, grad_out, grad_kv, grad_score, dscore, place, inside, block)
                if inside:
                    lanes = Int32(shape.threads_y)
                    zero_after_last(config, grad_kv, grad_score, place, ends[local], block.ty, lanes)
            else:
                dscore.fill(0.0)
            if inside:
                add_to_part(config, dscore, turn, total, leaf, any_row(group, groups), block.ty)
    else:
        clear_rowless(config, cu_seqlens, grad_kv, grad_score, segments, total_tokens, groups, number, rowless_blocks)


@cute.jit
def store_gradients(
    config: Constexpr,
    weights: cute.Tensor,
    values: cute.Tensor,
    grad_out: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    dscore: cute.Tensor,
    place: Place,
    inside: Boolean,
    block: Block,
) -> None:
    """Write the gradients of the thread's entries of one row, and give dscore, (own, vec) fp32; 0 where invalid."""
    go = fragments(1, config, storage(config))
    cute.autovec_copy(grad_out[row_entry(place), None], go[0, None])
    for i in cutlass.range_constexpr(own_entries(config)):
        apply(term_of, config, (dscore, i), (go, 0), (values, i), (weights, i))
    sum_of_terms = lane_sum(config, dscore, block)
    for run in cutlass.const_expr(runs(config)):
        exists = inside
        if cutlass.const_expr(not always_exists(config, run[0])):
            exists = exists & _exists(config, place, run[0], block.ty)
        if exists:
            for i in cutlass.const_expr(run):
                half, k = _entry_of(config, i, block.ty)
                at = entry(config, place, half, k)
                apply(dscore_of, config, (dscore, i), (weights, i), (sum_of_terms, 0), (dscore, i))
                store_rounded(config, grad_score, at, same, (dscore, i))
                store_rounded(config, grad_kv, at, dkv_of, (go, 0), (weights, i))
        else:
            for i in cutlass.const_expr(run):
                dscore[i, None].fill(0.0)


def columns_of_part(config: Config, leaves: cute.Tensor, part: Int32, groups: Int32) -> cute.Tensor:
    """One part of a leaf, laid out as ape."""
    size = config.window * groups
    layout = cute.make_layout((size, config.vec), stride=(config.vec, 1))
    return cute.make_tensor(leaves[part * size, None].iterator, layout)


@cute.jit
def add_to_part(
    config: Constexpr,
    dscore: cute.Tensor,
    turn: Int32,
    total: cute.Tensor,
    leaf: cute.Tensor,
    place: Place,
    ty: Int32,
) -> None:
    """Take in the dscore of a block's turn-th row, and write the part with the last: of four rows, (0 + 1) + (2 + 3).

    A tree over four rows needs two sums; the second waits where the part goes at last.
    """
    each = config.schedule.rows_each
    if cutlass.const_expr(each == 4):
        if turn == 2:
            _with_leaf(config, dscore, leaf, place, ty, _store_leaf)
        else:
            if turn == 3:
                _with_leaf(config, dscore, leaf, place, ty, _add_leaf)
            _add_own(config, total, dscore)
    else:
        _add_own(config, total, dscore)
    if turn == each - 1:
        _with_leaf(config, total, leaf, place, ty, _store_leaf)


@cute.jit
def _add_own(config: Constexpr, total: cute.Tensor, dscore: cute.Tensor) -> None:
    for i in cutlass.range_constexpr(own_entries(config)):
        apply(add, config, (total, i), (total, i), (dscore, i))


@cute.jit
def _with_leaf(
    config: Constexpr, own: cute.Tensor, leaf: cute.Tensor, place: Place, ty: Int32, operation: Constexpr
) -> None:
    """Do `operation` for each of the thread's entries and its place in a part of a leaf."""
    for i in cutlass.range_constexpr(own_entries(config)):
        if i * config.schedule.threads_y + ty < config.window:
            half, k = _entry_of(config, i, ty)
            operation(config, own, i, leaf[bias_entry(config, place, half, k), None])


def _store_leaf(config: Config, own: cute.Tensor, i: int, here: cute.Tensor) -> None:
    cute.autovec_copy(own[i, None], here)


def _add_leaf(config: Config, own: cute.Tensor, i: int, here: cute.Tensor) -> None:
    stored = fragments(1, config)
    cute.autovec_copy(here, stored[0, None])
    apply(add, config, (own, i), (stored, 0), (own, i))
