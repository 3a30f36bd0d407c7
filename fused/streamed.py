"""GPU kernels whose block shares a row's window: a thread has every `threads_y`-th entry of one column group.

What a sum needs in order, powers, products or gradient terms, passes through one plane of shared memory, (window *
threads_x, vec) fp32; the serial sums are read from there by one thread a column group and lane. Windows of any length.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .arith import NEG_INF, add, apply, maximum, minimum, mul, storage
from .block import clear_rowless, known_groups, locate_rows
from .config import LEAF_ROWS, Config
from .gaps import zero_after_last
from .window import (
    Place,
    add_bias,
    ape_entry,
    dkv_of,
    dscore_of,
    entry,
    extreme,
    fragments,
    normalise,
    place_of,
    row_entry,
    same,
    store_rounded,
    term_of,
    to_powers,
)

SUM_UNROLL = 4  # shared-memory loads of a serial sum in flight


def own_entries(config: Config) -> int:
    """Window entries of one thread, at most."""
    return -(-config.window // config.schedule.threads_y)


def shared_memory(config: Config) -> tuple[cute.Tensor, cute.Tensor]:
    """The plane, and one slot a column group for each thread and each lane of a sum."""
    smem, shape = SmemAllocator(), config.schedule
    lanes = max(shape.threads_y, config.softmax_lanes, 4 * config.pool_lanes)
    return tuple(
        smem.allocate_tensor(Float32, cute.make_layout((n * shape.threads_x, config.vec), stride=(config.vec, 1)), 16)
        for n in (config.window, lanes)
    )


def _entry_of(config: Config, i: int, ty: Int32) -> tuple[int | Int32, int | Int32]:
    """Half and place in it of a thread's i-th entry, the half at compile time where a stride never straddles two."""
    w = i * config.schedule.threads_y
    if config.ratio % config.schedule.threads_y == 0:
        return w // config.ratio, w % config.ratio + ty
    return (w + ty) // config.ratio, (w + ty) % config.ratio


def _run_length(config: Config) -> int:
    """Consecutive entries of a thread that exist together: a half's, or each alone where a stride straddles halves."""
    shares = config.schedule.threads_y
    return config.ratio // shares if config.ratio % shares == 0 else 1


def _exists(config: Config, place: Place, i: int, ty: Int32) -> Boolean:
    """Whether a thread has an i-th entry, in these columns, and it is valid."""
    exists = place.group < place.groups
    if config.window % config.schedule.threads_y != 0:
        exists = exists & (i * config.schedule.threads_y + ty < config.window)
    half, _ = _entry_of(config, i, ty)
    if config.coff == 1 or (isinstance(half, int) and half == 1):
        return exists
    if isinstance(half, int):
        return exists & (place.first == Boolean(False))
    return exists & ((half == 1) | (place.first == Boolean(False)))


@cute.jit
def load_own(
    config: Constexpr, memory: cute.Tensor, place: Place, ty: Int32, index: Constexpr, kind: Constexpr
) -> cute.Tensor:
    """The thread's entries of a window, (own, vec) of `kind`, found by `entry` or `bias_entry`; else 0."""
    own = fragments(own_entries(config), config, kind)
    run = cutlass.const_expr(_run_length(config))
    for start in cutlass.range_constexpr(0, own_entries(config), run):
        if _exists(config, place, start, ty):
            for i in cutlass.range_constexpr(start, start + run):
                half, k = _entry_of(config, i, ty)
                cute.autovec_copy(memory[index(config, place, half, k), None], own[i, None])
        else:
            for i in cutlass.range_constexpr(start, start + run):
                own[i, None].fill(0)
    return own


def bias_entry(config: Config, place: Place, half: int | Int32, k: Int32) -> Int32:
    """As `entry`, of the position bias."""
    return ape_entry(config, place.group, place.groups, half, k)


def any_row(group: Int32, groups: Int32) -> Place:
    """The place of a row that is no first block, so that all entries count."""
    return Place(Int32(0), Int32(0), Boolean(False), group, groups)


def load_own_bias(config: Config, ape: cute.Tensor, group: Int32, groups: Int32, ty: Int32) -> cute.Tensor:
    """ape for the thread's entries, (own, vec) fp32; 0 where there is none."""
    return load_own(config, ape, any_row(group, groups), ty, bias_entry, Float32)


def load_rows(config: Config, score: cute.Tensor, kv: cute.Tensor, place: Place, ty: Int32) -> list[cute.Tensor]:
    """The thread's entries of score and of kv, (own, vec) in `storage`."""
    return [load_own(config, memory, place, ty, entry, storage(config)) for memory in (score, kv)]


@cute.jit
def to_plane(config: Constexpr, own: cute.Tensor, plane: cute.Tensor, tx: Int32, ty: Int32) -> None:
    """Put the thread's entries where the serial sums read them, and synchronise."""
    for i in cutlass.range(own_entries(config), unroll_full=True):
        w = i * config.schedule.threads_y + ty
        if w < config.window:
            cute.autovec_copy(own[i, None], plane[w * config.schedule.threads_x + tx, None])
    cute.arch.sync_threads()


@cute.jit
def plane_sum(
    config: Constexpr, plane: cute.Tensor, sums: cute.Tensor, lanes: Constexpr, pooling: Constexpr, tx: Int32, ty: Int32
) -> cute.Tensor:
    """The sum over the plane in softmax order of `lanes` lanes, or in reduction order of lanes / 4, for all threads."""
    width = config.schedule.threads_x
    total = fragments(1, config)
    term = fragments(1, config)
    for lane in cutlass.range(ty, lanes, config.schedule.threads_y):
        total.fill(0.0)
        for w in cutlass.range(lane, config.window, lanes, unroll=SUM_UNROLL):
            cute.autovec_copy(plane[w * width + tx, None], term[0, None])
            apply(add, config, (total, 0), (total, 0), (term, 0))
        cute.autovec_copy(total[0, None], sums[lane * width + tx, None])
    cute.arch.sync_threads()
    rest = cutlass.const_expr(lanes)
    if cutlass.const_expr(pooling):
        rest = cutlass.const_expr(lanes // 4)
        for a in cutlass.range_constexpr(1, 4):
            _fold(config, sums, rest, a, tx, ty)
    for step in cutlass.range_constexpr(1, rest.bit_length()):
        _fold(config, sums, rest >> step, 1, tx, ty)
    cute.autovec_copy(sums[tx, None], total[0, None])
    cute.arch.sync_threads()
    return total


@cute.jit
def _fold(config: Constexpr, sums: cute.Tensor, count: Constexpr, by: Constexpr, tx: Int32, ty: Int32) -> None:
    """Add sum x + by * count to sum x, for the first `count`, and synchronise."""
    width = config.schedule.threads_x
    for x in cutlass.range(ty, count, config.schedule.threads_y):
        apply(add, config, (sums, x * width + tx), (sums, x * width + tx), (sums, (x + by * count) * width + tx))
    cute.arch.sync_threads()


@cute.jit
def own_weights(
    config: Constexpr,
    scores: cute.Tensor,
    bias: cute.Tensor,
    plane: cute.Tensor,
    sums: cute.Tensor,
    place: Place,
    tx: Int32,
    ty: Int32,
) -> cute.Tensor:
    """The softmax weights of the thread's entries, (own, vec) fp32."""
    count = cutlass.const_expr(own_entries(config))
    width = config.schedule.threads_x
    x = add_bias(config, count, scores, bias)
    low = extreme(config, count, x, minimum)
    run = cutlass.const_expr(_run_length(config))
    for start in cutlass.range_constexpr(0, count, run):
        if _exists(config, place, start, ty) == Boolean(False):
            for i in cutlass.range_constexpr(start, start + run):
                x[i, None].fill(NEG_INF)
    top = extreme(config, count, x, maximum)
    other = fragments(1, config)
    cute.autovec_copy(top[0, None], sums[ty * width + tx, None])
    cute.arch.sync_threads()
    for y in cutlass.range(config.schedule.threads_y, unroll_full=True):
        cute.autovec_copy(sums[y * width + tx, None], other[0, None])
        apply(maximum, config, (top, 0), (top, 0), (other, 0))
    to_powers(config, count, x, top)
    to_plane(config, x, plane, tx, ty)
    normalise(config, count, x, plane_sum(config, plane, sums, config.softmax_lanes, False, tx, ty), low, top)
    return x


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
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    start = block // column_blocks * shape.rows
    group = block % column_blocks * shape.threads_x + tx
    codes, _ = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, 1)
    plane, sums = shared_memory(config)
    bias = load_own_bias(config, ape, group, groups, ty)
    cute.arch.sync_threads()
    for local in cutlass.range(shape.rows):
        row = start + local
        if row < total_comp:
            place = place_of(row, codes[local], group, groups)
            scores, values = load_rows(config, score, kv, place, ty)
            terms = own_weights(config, scores, bias, plane, sums, place, tx, ty)
            for i in cutlass.range(own_entries(config), unroll_full=True):
                apply(mul, config, (terms, i), (values, i), (terms, i))
            to_plane(config, terms, plane, tx, ty)
            pooled = plane_sum(config, plane, sums, 4 * config.pool_lanes, True, tx, ty)
            if ty == 0 and group < groups:
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
    leaf_blocks: Int32,
    rowless_blocks: Int32,
    groups: Int32,
    column_blocks: Int32,
    config: Constexpr,
) -> None:
    """A block takes one part of a leaf: rows `LEAF_ROWS / rows_each` apart, the first steps of the halving tree."""
    shape = config.schedule
    groups = known_groups(config, groups)
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    parts = cutlass.const_expr(shape.leaf_parts)
    if block < leaf_blocks:
        part = block // column_blocks
        group = block % column_blocks * shape.threads_x + tx
        start = part // parts * LEAF_ROWS + part % parts
        codes, ends = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, parts)
        plane, sums = shared_memory(config)
        rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
        total = fragments(own_entries(config), config)
        total.fill(0.0)
        cute.arch.sync_threads()
        for local in cutlass.range(shape.rows_each):
            row = start + local * parts
            if row < rows:
                place = place_of(row, codes[local], group, groups)
                _backward_row(config, kv, score, ape, grad_out, grad_kv, grad_score, plane, sums, total, place, tx, ty)
                if group < groups:
                    lanes = Int32(shape.threads_y)
                    zero_after_last(config, grad_kv, grad_score, place, ends[local], ty, lanes)
        place = any_row(group, groups)
        run = cutlass.const_expr(_run_length(config))
        for first in cutlass.range_constexpr(0, own_entries(config), run):
            if _exists(config, place, first, ty):
                for i in cutlass.range_constexpr(first, first + run):
                    half, k = _entry_of(config, i, ty)
                    at = part * config.window * groups + bias_entry(config, place, half, k)
                    cute.autovec_copy(total[i, None], leaves[at, None])
    else:
        number = block - leaf_blocks
        clear_rowless(config, cu_seqlens, grad_kv, grad_score, segments, total_tokens, groups, number, rowless_blocks)


@cute.jit
def _backward_row(
    config: Constexpr,
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    grad_out: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    plane: cute.Tensor,
    sums: cute.Tensor,
    total: cute.Tensor,
    place: Place,
    tx: Int32,
    ty: Int32,
) -> None:
    """Write the gradients of the thread's entries of one row, and add their dscore to `total`."""
    count = cutlass.const_expr(own_entries(config))
    scores, values = load_rows(config, score, kv, place, ty)
    go = fragments(1, config, storage(config))
    go.fill(0)
    if place.group < place.groups:
        cute.autovec_copy(grad_out[row_entry(place), None], go[0, None])
    # Loaded for every row anew: held over the rows, it would cost a block.
    bias = load_own_bias(config, ape, place.group, place.groups, ty)
    weights = own_weights(config, scores, bias, plane, sums, place, tx, ty)
    terms = fragments(count, config)
    for i in cutlass.range(count, unroll_full=True):
        apply(term_of, config, (terms, i), (go, 0), (values, i), (weights, i))
    to_plane(config, terms, plane, tx, ty)
    sum_of_terms = plane_sum(config, plane, sums, config.softmax_lanes, False, tx, ty)
    run = cutlass.const_expr(_run_length(config))
    for start in cutlass.range_constexpr(0, count, run):
        if _exists(config, place, start, ty):
            for i in cutlass.range_constexpr(start, start + run):
                half, k = _entry_of(config, i, ty)
                at = entry(config, place, half, k)
                apply(dscore_of, config, (terms, i), (weights, i), (sum_of_terms, 0), (terms, i))
                store_rounded(config, grad_score, at, same, (terms, i))
                store_rounded(config, grad_kv, at, dkv_of, (go, 0), (weights, i))
                apply(add, config, (total, i), (total, i), (terms, i))
