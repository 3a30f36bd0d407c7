"""The GPU caller: kernels that map threads to rows and column groups, for compute capability 8.0 and newer."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .ape import accumulate, sum_leaves, total_of
from .arith import add, apply, storage
from .config import LEAF_LANES, LEAF_ROWS
from .gaps import zero_after_last, zero_rowless
from .window import (
    ape_entry,
    backward_row,
    columns,
    forward_row,
    fragments,
    halving_tree,
    load_bias,
    locate,
    place_of,
)

ROWLESS_BLOCKS = 512  # at most: four a multiprocessor on the largest devices
ROWLESS_SEGMENTS = 64  # segments, or rows' worth of tokens, that one of these blocks is worth starting for
LEAF_COLUMNS = 32  # columns of grad_ape that one block sums over the leaves
SHARED_PERCENT = 30  # of a multiprocessor's memory that its blocks' shared memory may take, the rest caches
STAGED_ENTRIES = 8  # window entries of a leaf that pass through shared memory at a time


@cute.jit
def _locate_rows(
    config: Constexpr, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor, segments: Int32, start: Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """`locate` for all rows of the block, one thread a row, in shared memory; the block must synchronise."""
    tx, ty, _ = cute.arch.thread_idx()
    thread = ty * config.schedule.threads_x + tx
    smem = SmemAllocator()
    layout = cute.make_layout(config.schedule.rows)
    codes, ends = smem.allocate_tensor(Int32, layout, 16), smem.allocate_tensor(Int32, layout, 16)
    if thread < config.schedule.rows:
        code, end = locate(config, cu_seqlens, cu_seqlens_comp, segments, start + thread)
        codes[thread] = code
        ends[thread] = end
    return codes, ends


@cute.kernel
def _forward_kernel(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor, segments: Int32, total_comp: Int32, groups: Int32, column_blocks: Int32, config: Constexpr,
) -> None:
    shape = config.schedule
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    start = block // column_blocks * shape.rows
    group = block % column_blocks * shape.threads_x + tx
    codes, _ = _locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start)
    # A thread past the last column computes the last one's bias, which it does not use.
    bias = load_bias(config, ape, cutlass.min(group, groups - 1), groups)
    cute.arch.sync_threads()
    for i in cutlass.range(shape.rows_each):
        local = i * shape.threads_y + ty
        row = start + local
        if row < total_comp and group < groups:
            forward_row(config, kv, score, bias, out, place_of(row, codes[local], group, groups))


@cute.jit
def forward(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor, segments: Int32, total_tokens: Int32, total_comp: Int32, head_dim: Int32, stream, config: Constexpr,
) -> None:
    shape = config.schedule
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    column_blocks = (groups + shape.threads_x - 1) // shape.threads_x
    row_blocks = (total_comp + shape.rows - 1) // shape.rows
    _forward_kernel(
        columns(kv, size, config, kind), columns(score, size, config, kind), columns(ape, config.window * groups, config),
        cu_seqlens, cu_seqlens_comp, columns(out, total_comp * groups, config, kind),
        segments, total_comp, groups, column_blocks, config,
    ).launch(
        grid=(row_blocks * column_blocks, 1, 1), block=(shape.threads_x, shape.threads_y, 1), stream=stream,
        min_blocks_per_mp=shape.min_blocks, preferred_smem_carveout=SHARED_PERCENT,
    )


@cute.jit
def _block_sum(
    config: Constexpr, total: cute.Tensor, leaves: cute.Tensor, leaf: Int32, group: Int32, groups: Int32
) -> None:
    """Halving tree over the block's row lanes, a few window entries at a time; writes the leaf's sums."""
    shape = config.schedule
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
                at = leaf * config.window * groups + ape_entry(
                    config, group, groups, w // config.ratio, w % config.ratio
                )
                cute.autovec_copy(sums[0, None], leaves[at, None])
        cute.arch.sync_threads()


@cute.kernel
def _backward_kernel(
    kv: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor,
    grad_out: cute.Tensor, grad_kv: cute.Tensor, grad_score: cute.Tensor, leaves: cute.Tensor,
    segments: Int32, total_tokens: Int32, total_comp: Int32, leaf_blocks: Int32, rowless_blocks: Int32,
    groups: Int32, column_blocks: Int32, config: Constexpr,
) -> None:
    shape = config.schedule
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if block < leaf_blocks:
        leaf = block // column_blocks
        group = block % column_blocks * shape.threads_x + tx
        codes, ends = _locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, leaf * LEAF_ROWS)
        bias = load_bias(config, ape, cutlass.min(group, groups - 1), groups)
        rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
        cute.arch.sync_threads()
        total, dscore = fragments(config.window, config), fragments(config.window, config)
        total.fill(0.0)
        # A thread's rows are half a leaf apart: the first step of the halving tree.
        for i in cutlass.range(shape.rows_each):
            local = i * shape.threads_y + ty
            row = leaf * LEAF_ROWS + local
            if row < rows and group < groups:
                place = place_of(row, codes[local], group, groups)
                backward_row(config, kv, score, bias, grad_out, grad_kv, grad_score, dscore, place)
                zero_after_last(config, grad_kv, grad_score, place, ends[local])
                for k in cutlass.range(config.window, unroll_full=True):
                    apply(add, config, (total, k), (total, k), (dscore, k))
        _block_sum(config, total, leaves, leaf, group, groups)
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
    shape = config.schedule
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
        columns(leaves, count * ape_size, config), segments, total_tokens, total_comp, count * column_blocks,
        rowless_blocks, groups, column_blocks, config,
    ).launch(
        grid=(count * column_blocks + rowless_blocks, 1, 1), block=(shape.threads_x, shape.threads_y, 1), stream=stream,
        min_blocks_per_mp=shape.min_blocks, preferred_smem_carveout=SHARED_PERCENT,
    )
    single = cutlass.const_expr(replace(config, vec=1))
    ape_columns = config.window * head_dim
    _grad_ape_kernel(
        cu_seqlens_comp, columns(leaves, count * ape_columns, single), columns(grad_ape, ape_columns, single),
        segments, ape_columns, single,
    ).launch(
        grid=((ape_columns + LEAF_COLUMNS - 1) // LEAF_COLUMNS, 1, 1), block=(LEAF_COLUMNS, LEAF_LANES, 1), stream=stream
    )
