"""The GPU caller: kernels that map threads to rows and column groups, for compute capability 8.0 and newer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .ape import accumulate, sum_leaves, total_of
from .arith import add, apply, storage
from .config import LEAF_LANES, LEAF_ROWS, Config
from .gaps import zero_after_last, zero_rowless
from .window import Place, ape_entry, backward_row, columns, find_segment, forward_row, fragments, halving_tree

ROWLESS_BLOCKS = 512  # at most: four a multiprocessor on the largest devices
ROWLESS_SEGMENTS = 64  # segments, or padding tokens, that one of these blocks is worth starting for
LEAF_COLUMNS = 32  # columns of grad_ape that one block sums over the leaves
STAGED_ENTRIES = 8  # window entries of a leaf that pass through shared memory at a time


@dataclass(frozen=True)
class Schedule:
    """How a block is cut: `threads_x` column groups by `threads_y` rows. It changes no bit."""

    threads_x: int
    threads_y: int


def schedule(config: Config) -> Schedule:
    """Short windows take four rows of a leaf a thread; long ones one, for their registers."""
    return Schedule(32, 8) if config.window <= 8 else Schedule(8, 32)


@cute.kernel
def _forward_kernel(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor, segments: Int32, total_comp: Int32, groups: Int32, column_blocks: Int32,
    config: Constexpr, shape: Constexpr,
) -> None:
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block // column_blocks * shape.threads_y + ty
    group = block % column_blocks * shape.threads_x + tx
    if row < total_comp and group < groups:
        token = Int32(0)
        first = Boolean(True)
        if row < cu_seqlens_comp[segments]:
            segment = find_segment(cu_seqlens_comp, segments, row)
            number = row - cu_seqlens_comp[segment]
            token = cu_seqlens[segment] + number * config.ratio
            first = number == 0
        forward_row(config, kv, score, ape, out, Place(row, token, first, group, groups))


@cute.jit
def forward(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor, segments: Int32, total_tokens: Int32, total_comp: Int32, head_dim: Int32, stream, config: Constexpr,
) -> None:
    shape = schedule(config)
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    column_blocks = (groups + shape.threads_x - 1) // shape.threads_x
    row_blocks = (total_comp + shape.threads_y - 1) // shape.threads_y
    _forward_kernel(
        columns(kv, size, config, kind), columns(score, size, config, kind), columns(ape, config.window * groups, config),
        cu_seqlens, cu_seqlens_comp, columns(out, total_comp * groups, config, kind),
        segments, total_comp, groups, column_blocks, config, shape,
    ).launch(grid=(row_blocks * column_blocks, 1, 1), block=(shape.threads_x, shape.threads_y, 1), stream=stream)


@cute.jit
def _leaf_row(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    grad_out: cute.Tensor, grad_kv: cute.Tensor, grad_score: cute.Tensor,
    segments: Int32, row: Int32, group: Int32, groups: Int32, config: Constexpr,
) -> cute.Tensor:
    """One row's gradients; its fp32 dscore comes back in registers, zeros where there is no such row."""
    dscore = fragments(config.window, config)
    dscore.fill(0.0)
    if row < cu_seqlens_comp[segments] and group < groups:
        segment = find_segment(cu_seqlens_comp, segments, row)
        number = row - cu_seqlens_comp[segment]
        place = Place(row, cu_seqlens[segment] + number * config.ratio, number == 0, group, groups)
        backward_row(config, kv, score, ape, grad_out, grad_kv, grad_score, dscore, place)
        if row + 1 == cu_seqlens_comp[segment + 1]:
            zero_after_last(config, grad_kv, grad_score, place, cu_seqlens[segment + 1])
    return dscore


def _thread_sum(config: Config, row_of, positions: list[int]) -> cute.Tensor:
    """Halving tree over the rows that one thread takes of a leaf."""
    if len(positions) == 1:
        return row_of(positions[0])
    total = _thread_sum(config, row_of, positions[0::2])
    other = _thread_sum(config, row_of, positions[1::2])
    for k in range(config.window):
        apply(add, config, (total, k), (total, k), (other, k))
    return total


@cute.jit
def _block_sum(
    config: Constexpr, shape: Constexpr, total: cute.Tensor, leaves: cute.Tensor, leaf: Int32, group: Int32, groups: Int32
) -> None:
    """Halving tree over the block's row lanes, a few window entries at a time; writes the leaf's sums."""
    tx, ty, _ = cute.arch.thread_idx()
    staged = cutlass.const_expr(min(config.window, STAGED_ENTRIES))
    slots = staged * shape.threads_x
    layout = cute.make_layout((shape.threads_y * slots, config.vec), stride=(config.vec, 1))
    shared = SmemAllocator().allocate_tensor(Float32, layout, 16)
    sums = fragments(shape.threads_y, config)
    for start in cutlass.range_constexpr(0, config.window, staged):
        for e in cutlass.range_constexpr(staged):
            if cutlass.const_expr(start + e < config.window):
                cute.autovec_copy(total[start + e, None], shared[ty * slots + e * shape.threads_x + tx, None])
        cute.arch.sync_threads()
        for e in cutlass.range(ty, staged, shape.threads_y):
            w = start + e
            if w < config.window and group < groups:
                for y in cutlass.range(shape.threads_y, unroll_full=True):
                    cute.autovec_copy(shared[y * slots + e * shape.threads_x + tx, None], sums[y, None])
                halving_tree(config, sums, shape.threads_y, 1)
                place = Place(Int32(0), Int32(0), Boolean(True), group, groups)
                at = leaf * config.window * groups + ape_entry(config, place, w // config.ratio, w % config.ratio)
                cute.autovec_copy(sums[0, None], leaves[at, None])
        cute.arch.sync_threads()


@cute.kernel
def _backward_kernel(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    grad_out: cute.Tensor, grad_kv: cute.Tensor, grad_score: cute.Tensor, leaves: cute.Tensor,
    segments: Int32, total_tokens: Int32, leaf_blocks: Int32, rowless_blocks: Int32, groups: Int32, column_blocks: Int32,
    config: Constexpr, shape: Constexpr,
) -> None:
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if block < leaf_blocks:
        leaf = block // column_blocks
        group = block % column_blocks * shape.threads_x + tx
        total = _thread_sum(
            config,
            lambda position: _leaf_row(
                kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score,
                segments, leaf * LEAF_ROWS + position + ty, group, groups, config,
            ),
            list(range(0, LEAF_ROWS, shape.threads_y)),
        )
        _block_sum(config, shape, total, leaves, leaf, group, groups)
    else:
        zero_rowless(
            config, cu_seqlens, grad_kv, grad_score, segments, total_tokens, groups,
            (block - leaf_blocks) * shape.threads_y + ty, rowless_blocks * shape.threads_y, tx, Int32(shape.threads_x),
        )


@cute.kernel
def _grad_ape_kernel(
    cu_seqlens_comp: cute.Tensor, leaves: cute.Tensor, grad_ape: cute.Tensor, segments: Int32, size: Int32, config: Constexpr
) -> None:
    tx, lane, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * LEAF_COLUMNS + tx
    slots = cutlass.const_expr(LEAF_LANES * LEAF_COLUMNS)
    layout = cute.make_layout((slots, 1), stride=(1, 1))
    smem = SmemAllocator()
    high, low = smem.allocate_tensor(Float32, layout, 16), smem.allocate_tensor(Float32, layout, 16)
    own_high, own_low = fragments(1, config), fragments(1, config)
    own_high.fill(0.0)
    own_low.fill(0.0)
    if at < size:
        count = (cu_seqlens_comp[segments] + LEAF_ROWS - 1) // LEAF_ROWS
        sum_leaves(config, leaves, count, size, at, lane, own_high, own_low, Int32(0))
    slot = lane * LEAF_COLUMNS + tx
    cute.autovec_copy(own_high[0, None], high[slot, None])
    cute.autovec_copy(own_low[0, None], low[slot, None])
    for step in cutlass.range_constexpr(1, LEAF_LANES.bit_length()):
        cute.arch.sync_threads()
        if lane < LEAF_LANES >> step:
            other = slot + (LEAF_LANES >> step) * LEAF_COLUMNS
            accumulate(config, high, low, slot, (high, other), (low, other))
    if lane == 0 and at < size:
        apply(total_of, config, (grad_ape, at), (high, slot), (low, slot))


@cute.jit
def backward(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    grad_out: cute.Tensor, grad_kv: cute.Tensor, grad_score: cute.Tensor, grad_ape: cute.Tensor, leaves: cute.Tensor,
    segments: Int32, total_tokens: Int32, total_comp: Int32, head_dim: Int32, stream, config: Constexpr,
) -> None:
    """`leaves` holds ceil(total_comp / LEAF_ROWS) * ratio * width fp32."""
    shape = schedule(config)
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    ape_size = config.window * groups
    count = (total_comp + LEAF_ROWS - 1) // LEAF_ROWS
    column_blocks = (groups + shape.threads_x - 1) // shape.threads_x
    rowless = (cutlass.max(segments, total_tokens // config.ratio) + ROWLESS_SEGMENTS - 1) // ROWLESS_SEGMENTS
    rowless_blocks = cutlass.min(cutlass.max(rowless, 1), ROWLESS_BLOCKS)
    _backward_kernel(
        columns(kv, size, config, kind), columns(score, size, config, kind), columns(ape, ape_size, config),
        cu_seqlens, cu_seqlens_comp, columns(grad_out, total_comp * groups, config, kind),
        columns(grad_kv, size, config, kind), columns(grad_score, size, config, kind),
        columns(leaves, count * ape_size, config), segments, total_tokens, count * column_blocks, rowless_blocks,
        groups, column_blocks, config, shape,
    ).launch(
        grid=(count * column_blocks + rowless_blocks, 1, 1), block=(shape.threads_x, shape.threads_y, 1), stream=stream
    )
    single = cutlass.const_expr(replace(config, vec=1))
    ape_columns = config.window * head_dim
    _grad_ape_kernel(
        cu_seqlens_comp, columns(leaves, count * ape_columns, single), columns(grad_ape, ape_columns, single),
        segments, ape_columns, single,
    ).launch(
        grid=((ape_columns + LEAF_COLUMNS - 1) // LEAF_COLUMNS, 1, 1), block=(LEAF_COLUMNS, LEAF_LANES, 1), stream=stream
    )
