"""GPU kernels that keep a row's window in the registers of one thread a column group: for short windows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .arith import add, apply
from .block import clear_rowless, first_row, known_column_blocks, known_groups, let_next_launch, locate_rows
from .gaps import zero_after_last
from .ring import Ring, enter_ring, fetch, ring_entry, wait
from .row import backward_row, forward_row, halving_tree
from .window import ape_entry, fragments, load_bias, place_of


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
    shape = config.schedule
    groups, column_blocks = known_groups(config, groups), known_column_blocks(config, column_blocks)
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    start = block // column_blocks * shape.rows
    group = block % column_blocks * shape.threads_x + tx
    codes, _ = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, 1)
    # A thread past the last column computes the last one's bias, which it does not use.
    bias = load_bias(config, ape, cutlass.min(group, groups - 1), groups)
    cute.arch.sync_threads()
    if cutlass.const_expr(shape.stages > 0):
        ring = enter_ring(config)
    for i in cutlass.range_constexpr(shape.stages):
        _fetch_row(config, kv, score, ring, codes, start, total_comp, group, groups, Int32(i))
    for i in cutlass.range(shape.rows_each):
        if cutlass.const_expr(shape.stages > 0):
            wait(config)
        local = i * shape.threads_y + ty
        row = start + local
        if row < total_comp and group < groups:
            place = place_of(row, codes[local], group, groups)
            if cutlass.const_expr(shape.stages > 0):
                forward_row(config, ring.kv, ring.score, bias, out, place, ring_entry(ring, i))
            else:
                forward_row(config, kv, score, bias, out, place)
        if cutlass.const_expr(shape.stages > 0):
            _fetch_row(config, kv, score, ring, codes, start, total_comp, group, groups, i + shape.stages)


@cute.jit
def _fetch_row(
    config: Constexpr,
    kv: cute.Tensor,
    score: cute.Tensor,
    ring: Ring,
    codes: cute.Tensor,
    start: Int32,
    total_comp: Int32,
    group: Int32,
    groups: Int32,
    i: Int32,
) -> None:
    """Start copying the thread's i-th row, if it has one; a group of copies ends here in any case."""
    shape = config.schedule
    _, ty, _ = cute.arch.thread_idx()
    local = i * shape.threads_y + ty
    if i < shape.rows_each and start + local < total_comp and group < groups:
        fetch(config, kv, score, ring, place_of(start + local, codes[local], group, groups), i)
    cute.arch.cp_async_commit_group()


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
    shape = config.schedule
    let_next_launch()
    groups, column_blocks = known_groups(config, groups), known_column_blocks(config, column_blocks)
    tx, ty, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    parts = cutlass.const_expr(shape.leaf_parts)
    # A block takes one part of a leaf, rows `parts` apart; the first ones clear what has no row.
    if block >= rowless_blocks:
        block -= rowless_blocks
        part = block // column_blocks
        start = first_row(config, part)
        group = block % column_blocks * shape.threads_x + tx
        codes, ends = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, parts)
        bias = load_bias(config, ape, cutlass.min(group, groups - 1), groups)
        rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
        cute.arch.sync_threads()
        total, dscore = fragments(config.window, config), fragments(config.window, config)
        total.fill(0.0)
        # A thread's two rows are half a part apart: the first step of the halving tree.
        for i in cutlass.range(shape.rows_each):
            local = i * shape.threads_y + ty
            row = start + local * parts
            if row < rows and group < groups:
                place = place_of(row, codes[local], group, groups)
                backward_row(config, kv, score, bias, grad_out, grad_kv, grad_score, dscore, place)
                zero_after_last(config, grad_kv, grad_score, place, ends[local], Int32(0), Int32(1))
                for k in cutlass.range(config.window, unroll_full=True):
                    apply(add, config, (total, k), (total, k), (dscore, k))
        _block_sum(config, total, leaves, part, group, groups)
    else:
        clear_rowless(config, cu_seqlens, grad_kv, grad_score, segments, total_tokens, groups, block, rowless_blocks)


@cute.jit
def _block_sum(
    config: Constexpr, total: cute.Tensor, leaves: cute.Tensor, part: Int32, group: Int32, groups: Int32
) -> None:
    """Halving tree over the block's row lanes; writes the part's sums."""
    shape = config.schedule
    tx, ty, _ = cute.arch.thread_idx()
    slots = config.window * shape.threads_x
    layout = cute.make_layout((shape.threads_y * slots, config.vec), stride=(config.vec, 1))
    shared = SmemAllocator().allocate_tensor(Float32, layout, 16)
    for w in cutlass.range_constexpr(config.window):
        cute.autovec_copy(total[w, None], shared[ty * slots + w * shape.threads_x + tx, None])
    cute.arch.sync_threads()
    sums = fragments(shape.threads_y, config)
    for w in cutlass.range(ty, config.window, shape.threads_y):
        if group < groups:
            for y in cutlass.range(shape.threads_y, unroll_full=True):
                cute.autovec_copy(shared[y * slots + w * shape.threads_x + tx, None], sums[y, None])
            halving_tree(config, sums, shape.threads_y, 1)
            at = part * config.window * groups + ape_entry(config, group, groups, w // config.ratio, w % config.ratio)
            cute.autovec_copy(sums[0, None], leaves[at, None])
