"""GPU kernels whose block shares a row's window: for long windows, of any length."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

from .arith import FAR, add, apply, quotient, reciprocal, storage
from .block import clear_rowless, first_row, known_column_blocks, known_groups, let_next_launch, locate_rows
from .config import Config
from .gaps import zero_after_last
from .row import dkv_of, dscore_of, near_powers, term_of, to_powers
from .shares import (
    Block,
    always_exists,
    any_row,
    bias_entry,
    enter_block,
    entries_of,
    entry_of,
    exists,
    load_own,
    load_own_bias,
    own_entries,
    own_logits,
    runs,
)
from .stack import enter_stack, in_turn, pop, push
from .sums import block_highest, own_weight, pool_sum, put, softmax_sum, take, take_in_turn, to_plane
from .window import Place, entry, fragments, place_of, row_entry, same, store_rounded


@cute.jit
def powers_to_plane(
    config: Constexpr, score: cute.Tensor, ape: cute.Tensor, bias: cute.Tensor, place: Place, block: Block
) -> tuple[cute.Tensor, Int32]:
    """Put exp(logit - top) of the thread's entries into the plane.

    bias: as `load_own_bias` gives it.

    Returns:
        The same powers, (own, vec), and a number that is not 0 if `divisor` may not be quick about them.
    """
    scores = load_own(config, score, place, block.ty, entry, storage(config))
    x = own_logits(config, scores, bias, place, block.ty)
    top = block_highest(config, x, block)
    far = own_powers(config, x, top, score, ape, place, block.ty)
    to_plane(config, x, block)
    return x, far


@cute.jit
def own_powers(
    config: Constexpr, x: cute.Tensor, top: cute.Tensor, score: cute.Tensor, ape: cute.Tensor, place: Place, ty: Int32
) -> Int32:
    """Turn the thread's logits into exp(x - top) in place; not 0 if one of them is far from the top."""
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
def divisor(
    config: Constexpr, block: Block, far: Int32, powers: cute.Tensor | None
) -> tuple[cute.Tensor, cute.Tensor]:
    """The sum of the powers in the plane and its reciprocal, (1, vec) each, by which `own_weight` divides.

    Powers for which its fast division is not meant are divided here, in the plane, and both numbers are 1; `powers`, of
    a thread that keeps its own, are then read anew.
    """
    total, r = softmax_sum(config, block), fragments(1, config)
    apply(reciprocal, config, (r, 0), (total, 0))
    if cutlass.const_expr(config.fast):
        if far != 0:
            _divide_plane(config, block, powers, total, r)
    else:
        _divide_plane(config, block, powers, total, r)
    return total, r


@cute.jit
def _divide_plane(
    config: Constexpr, block: Block, powers: cute.Tensor | None, total: cute.Tensor, r: cute.Tensor
) -> None:
    weight = fragments(1, config)
    for i in cutlass.range(own_entries(config), unroll=1):
        take(config, i, block, weight, 0)
        apply(quotient, config, (weight, 0), (weight, 0), (total, 0), (r, 0))
        put(config, i, block, weight, 0)
    if cutlass.const_expr(powers is not None):
        for i in cutlass.range_constexpr(own_entries(config)):
            take(config, i, block, powers, i)
    total.fill(1.0)
    r.fill(1.0)


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
    groups, column_blocks = known_groups(config, groups), known_column_blocks(config, column_blocks)
    number, _, _ = cute.arch.block_idx()
    row = number // column_blocks
    codes, _ = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, row, 1)
    block = enter_block(config)
    group = number % column_blocks * shape.threads_x + block.tx
    # Threads past the last column work on the last one's, and keep it to themselves.
    column = cutlass.min(group, groups - 1)
    bias = load_own_bias(config, ape, column, groups, block.ty)
    cute.arch.sync_threads()
    place = place_of(row, codes[0], column, groups)
    powers, far = powers_to_plane(config, score, ape, bias, place, block)
    values = load_own(config, kv, place, block.ty, entry, storage(config))
    total, r = divisor(config, block, far, powers)
    pooled = pool_sum(config, powers, values, total, r, block)
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
    """A block takes one part of a leaf: a row, or runs of rows and the first steps of the halving tree over them."""
    shape = config.schedule
    let_next_launch()
    groups, column_blocks = known_groups(config, groups), known_column_blocks(config, column_blocks)
    number, _, _ = cute.arch.block_idx()
    parts = cutlass.const_expr(shape.leaf_parts)
    if number >= rowless_blocks:
        number -= rowless_blocks
        part = number // column_blocks
        start = first_row(config, part)
        codes, ends = locate_rows(config, cu_seqlens, cu_seqlens_comp, segments, start, parts)
        block, stack = enter_block(config), enter_stack(config)
        group = number % column_blocks * shape.threads_x + block.tx
        inside = group < groups
        rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
        total = fragments(own_entries(config), config)
        total.fill(0.0)
        cute.arch.sync_threads()
        for i in cutlass.range(shape.rows_each):
            push(config, stack, total, i)
            local = in_turn(config, i)
            row = start + local * parts
            if row < rows:
                place = place_of(row, codes[local], cutlass.min(group, groups - 1), groups)
                bias = load_own_bias(config, ape, place.group, groups, block.ty)
                _, far = powers_to_plane(config, score, ape, bias, place, block)
                values = load_own(config, kv, place, block.ty, entry, storage(config))
                store_gradients(config, far, values, grad_out, grad_kv, grad_score, total, place, inside, block)
                if inside:
                    lanes = Int32(shape.threads_y)
                    zero_after_last(config, grad_kv, grad_score, place, ends[local], block.ty, lanes)
        pop(config, stack, total)
        if inside:
            leaf = columns_of_part(config, leaves, part, groups)
            _store_part(config, total, leaf, any_row(group, groups), block.ty)
    else:
        clear_rowless(config, cu_seqlens, grad_kv, grad_score, segments, total_tokens, groups, number, rowless_blocks)


@cute.jit
def store_gradients(
    config: Constexpr,
    far: Int32,
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
    go = fragments(1, config, storage(config))
    cute.autovec_copy(grad_out[row_entry(place), None], go[0, None])
    weights, term = fragments(own_entries(config), config), fragments(1, config)
    by, r = divisor(config, block, far, None)
    for run in cutlass.const_expr(runs(config)):
        writes = written(config, place, inside, run, block.ty)
        for i in cutlass.const_expr(run):
            # Read back, so that no power is in a register while the block waits for their sum.
            take_in_turn(config, i, block, weights, i)
            own_weight(config, weights, i, by, r, weights, i)
            apply(term_of, config, (term, 0), (go, 0), (values, i), (weights, i))
            put(config, i, block, term, 0)
        if writes:
            to = entries_of(config, grad_kv, place, block.ty, entry, run)
            for i in cutlass.const_expr(run):
                store_rounded(config, to, i - run[0], dkv_of, (go, 0), (weights, i))
    sum_of_terms = softmax_sum(config, block)
    dscore = fragments(own_entries(config), config)
    for i in cutlass.range_constexpr(own_entries(config)):
        take_in_turn(config, i, block, dscore, i)
    for run in cutlass.const_expr(runs(config)):
        if written(config, place, inside, run, block.ty):
            to = entries_of(config, grad_score, place, block.ty, entry, run)
            for i in cutlass.const_expr(run):
                apply(dscore_of, config, (dscore, i), (weights, i), (sum_of_terms, 0), (dscore, i))
                store_rounded(config, to, i - run[0], same, (dscore, i))
                apply(add, config, (total, i), (total, i), (dscore, i))


def written(config: Config, place: Place, inside: Boolean, run: range, ty: Int32) -> Boolean:
    """Whether a thread has gradients to write for a run of entries."""
    return inside if always_exists(config, run[0]) else inside & exists(config, place, run[0], ty)


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
