"""GPU kernels whose block shares a row's window: for long windows, of any length."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

from .arith import FAR, add, apply, storage
from .block import clear_rowless, known_groups, locate_rows
from .config import LEAF_ROWS, Config
from .gaps import zero_after_last
from .row import divide, dkv_of, dscore_of, near_divide, near_powers, term_of, to_powers
from .shares import (
    Block,
    always_exists,
    any_row,
    bias_entry,
    enter_block,
    entry_of,
    exists,
    load_own,
    load_own_bias,
    own_entries,
    own_logits,
    runs,
)
from .sums import block_highest, lane_sum, pool_sum
from .window import Place, entry, fragments, place_of, row_entry, same, store_rounded


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
            elif exists(config, place, first, ty):
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
    """A block pools one row."""
    shape = config.schedule
    groups = known_groups(config, groups)
    number, _, _ = cute.arch.block_idx()
    row = number // column_blocks
    codes, _ = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, row, 1)
    block = enter_block(config)
    group = number % column_blocks * shape.threads_x + block.tx
    cute.arch.sync_threads()
    # Threads past the last column work on the last one's, and keep it to themselves.
    place = place_of(row, codes[0], cutlass.min(group, groups - 1), groups)
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
        for local in cutlass.range(shape.rows_each):
            row = start + local * parts
            if row < rows:
                place = place_of(row, codes[local], cutlass.min(group, groups - 1), groups)
                weights, values = own_weights(config, kv, score, ape, place, block)
                store_gradients(config, weights, values, grad_out, grad_kv, grad_score, total, place, inside, block)
                if inside:
                    lanes = Int32(shape.threads_y)
                    zero_after_last(config, grad_kv, grad_score, place, ends[local], block.ty, lanes)
        if inside:
            leaf = columns_of_part(config, leaves, part, groups)
            _store_part(config, total, leaf, any_row(group, groups), block.ty)
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
    total: cute.Tensor,
    place: Place,
    inside: Boolean,
    block: Block,
) -> None:
    """Write the gradients of the thread's entries of one row, and add their dscore to `total`, (own, vec) fp32."""
    dscore = fragments(own_entries(config), config)
    go = fragments(1, config, storage(config))
    cute.autovec_copy(grad_out[row_entry(place), None], go[0, None])
    for i in cutlass.range_constexpr(own_entries(config)):
        apply(term_of, config, (dscore, i), (go, 0), (values, i), (weights, i))
    sum_of_terms = lane_sum(config, dscore, block)
    for run in cutlass.const_expr(runs(config)):
        writes = inside
        if cutlass.const_expr(not always_exists(config, run[0])):
            writes = writes & exists(config, place, run[0], block.ty)
        if writes:
            for i in cutlass.const_expr(run):
                half, k = entry_of(config, i, block.ty)
                at = entry(config, place, half, k)
                apply(dscore_of, config, (dscore, i), (weights, i), (sum_of_terms, 0), (dscore, i))
                store_rounded(config, grad_score, at, same, (dscore, i))
                store_rounded(config, grad_kv, at, dkv_of, (go, 0), (weights, i))
                apply(add, config, (total, i), (total, i), (dscore, i))


def columns_of_part(config: Config, leaves: cute.Tensor, part: Int32, groups: Int32) -> cute.Tensor:
    """One part of a leaf, laid out as ape."""
    size = config.window * groups
    layout = cute.make_layout((size, config.vec), stride=(config.vec, 1))
    return cute.make_tensor(leaves[part * size, None].iterator, layout)


@cute.jit
def _store_part(config: Constexpr, total: cute.Tensor, leaf: cute.Tensor, place: Place, ty: Int32) -> None:
    """Write the thread's sums of dscore over one part of a leaf."""
    for i in cutlass.range_constexpr(own_entries(config)):
        if i * config.schedule.threads_y + ty < config.window:
            half, k = entry_of(config, i, ty)
            cute.autovec_copy(total[i, None], leaf[bias_entry(config, place, half, k), None])
