"""The CPU caller: the kernels' own functions in plain loops, compiled for the host.

Worker `worker` of `workers` has its share of the column groups, which have nothing to do with each other, and of the
segments without rows; workers need not wait for one another.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .ape import accumulate, leaf_sum, sum_leaves, total_of
from .arith import apply, ceil_div, storage
from .config import LEAF_LANES, LEAF_ROWS, Config
from .gaps import zero_after_last, zero_rowless
from .row import backward_row, forward_row
from .window import (
    ape_entry,
    columns,
    fragments,
    load_bias,
    locate,
    place_of,
)


@cute.jit
def forward(
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor,
    segments: Int32,
    total_tokens: Int32,
    total_comp: Int32,
    head_dim: Int32,
    worker: Int32,
    workers: Int32,
    config: Constexpr,
) -> None:
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    kv_view, score_view = columns(kv, size, config, kind), columns(score, size, config, kind)
    ape_view = columns(ape, config.window * groups, config)
    out_view = columns(out, total_comp * groups, config, kind)
    for row in cutlass.range(total_comp):
        code, _ = locate(config, cu_seqlens, cu_seqlens_comp, segments, row)
        for group in cutlass.range(worker * groups // workers, (worker + 1) * groups // workers):
            bias = load_bias(config, ape_view, group, groups)
            forward_row(config, kv_view, score_view, bias, out_view, place_of(row, code, group, groups))


@cute.jit
def backward(
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    grad_out: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    grad_ape: cute.Tensor,
    leaves: cute.Tensor,
    scratch: cute.Tensor,
    segments: Int32,
    total_tokens: Int32,
    total_comp: Int32,
    head_dim: Int32,
    worker: Int32,
    workers: Int32,
    config: Constexpr,
) -> None:
    """`leaves` holds ceil(total_comp / LEAF_ROWS) * ratio * width fp32, `scratch` LEAF_ROWS * window * vec."""
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    kv_view, score_view = columns(kv, size, config, kind), columns(score, size, config, kind)
    grad_kv_view, grad_score_view = columns(grad_kv, size, config, kind), columns(grad_score, size, config, kind)
    grad_out_view = columns(grad_out, total_comp * groups, config, kind)
    ape_size = config.window * groups
    ape_view, grad_ape_view = columns(ape, ape_size, config), columns(grad_ape, ape_size, config)
    rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
    count = ceil_div(rows, LEAF_ROWS)
    leaves_view = columns(leaves, count * ape_size, config)
    positions = columns(scratch, Int32(LEAF_ROWS * config.window), config)
    first, last = worker * groups // workers, (worker + 1) * groups // workers
    for leaf in cutlass.range(count):
        for group in cutlass.range(first, last):
            bias = load_bias(config, ape_view, group, groups)
            for position in cutlass.range(LEAF_ROWS):
                row = leaf * LEAF_ROWS + position
                dscore = _of_position(config, positions, position)
                if row < rows:
                    code, end = locate(config, cu_seqlens, cu_seqlens_comp, segments, row)
                    place = place_of(row, code, group, groups)
                    backward_row(
                        config, kv_view, score_view, bias, grad_out_view, grad_kv_view, grad_score_view, dscore, place
                    )
                    zero_after_last(config, grad_kv_view, grad_score_view, place, end, Int32(0), Int32(1))
                else:
                    for k in cutlass.range(config.window):
                        dscore[k, None].fill(0.0)
            leaf_sum(config, positions, LEAF_ROWS, 1, config.window)
            for half in cutlass.range_constexpr(config.coff):
                for k in cutlass.range(config.ratio):
                    at = leaf * ape_size + ape_entry(config, group, groups, half, k)
                    cute.autovec_copy(positions[half * config.ratio + k, None], leaves_view[at, None])
    high, low = fragments(LEAF_LANES, config), fragments(LEAF_LANES, config)
    for entry in cutlass.range(config.window):
        for at in cutlass.range(entry * groups + first, entry * groups + last):
            for lane in cutlass.range(LEAF_LANES):
                sum_leaves(config, leaves_view, count, 1, 1, ape_size, at, lane, high, low, lane)
            for step in cutlass.range_constexpr(1, LEAF_LANES.bit_length()):
                half = LEAF_LANES >> step
                for lane in cutlass.range(half):
                    accumulate(config, high, low, lane, (high, half + lane), (low, half + lane))
            apply(total_of, config, (grad_ape_view, at), (high, 0), (low, 0))
    zero_rowless(
        config,
        cu_seqlens,
        grad_kv_view,
        grad_score_view,
        segments,
        total_tokens,
        groups,
        worker,
        workers,
        Int32(0),
        Int32(1),
    )


def _of_position(config: Config, positions: cute.Tensor, position: Int32) -> cute.Tensor:
    """The (window, vec) dscore of one leaf position."""
    layout = cute.make_layout((config.window, config.vec), stride=(config.vec, 1))
    return cute.make_tensor(positions[position * config.window, None].iterator, layout)
