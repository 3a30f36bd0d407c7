"""The GPU caller: launches for compute capability 8.0 and newer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from . import registers, streamed
from .ape import leaf_groups
from .arith import ceil_div, storage
from .block import grad_ape_kernel, launches_overlap
from .config import FEW_LEAF_ROWS, LEAF_LANES, LEAF_ROWS, WARP, Config
from .window import columns

FAMILIES = {"registers": registers, "streamed": streamed}
ROWLESS_BLOCKS = 512  # at most: four a multiprocessor on the largest devices
ROWLESS_SEGMENTS = 64  # segments, or rows' worth of tokens, that one of these blocks is worth starting for


def shared_percent(config: Config) -> int:
    """Of a multiprocessor's memory, what its blocks' shared memory may take; caches have the rest."""
    return 30 if config.schedule.family == "registers" and not config.schedule.stages else 100


def leaf_vec(config: Config) -> int:
    """Columns of grad_ape that a thread sums over the leaves: four of a long window, which has many, if it divides."""
    return math.gcd(4, config.window * config.vec) if config.schedule.family == "streamed" else 1


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
    stream: Any,
    config: Constexpr,
) -> None:
    shape = config.schedule
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    column_blocks = ceil_div(groups, shape.threads_x)
    row_blocks = ceil_div(total_comp, shape.rows)
    FAMILIES[shape.family].forward_kernel(
        columns(kv, size, config, kind),
        columns(score, size, config, kind),
        columns(ape, config.window * groups, config),
        cu_seqlens,
        cu_seqlens_comp,
        columns(out, total_comp * groups, config, kind),
        segments,
        total_comp,
        groups,
        column_blocks,
        config,
    ).launch(
        grid=(row_blocks * column_blocks, 1, 1),
        block=(shape.threads_x, shape.threads_y, 1),
        stream=stream,
        min_blocks_per_mp=shape.min_blocks,
        preferred_smem_carveout=shared_percent(config),
    )


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
    segments: Int32,
    total_tokens: Int32,
    total_comp: Int32,
    head_dim: Int32,
    stream: Any,
    config: Constexpr,
) -> None:
    """`leaves` holds ceil(total_comp / LEAF_ROWS) * leaf_parts * ratio * width fp32."""
    shape = config.schedule
    kind = storage(config)
    groups = head_dim // config.vec
    size = total_tokens * config.coff * groups
    ape_size = config.window * groups
    count = ceil_div(total_comp, LEAF_ROWS) * shape.leaf_parts
    column_blocks = ceil_div(groups, shape.threads_x)
    rowless = ceil_div(cutlass.max(segments, total_tokens // config.ratio), ROWLESS_SEGMENTS)
    rowless_blocks = cutlass.min(cutlass.max(rowless, 1), ROWLESS_BLOCKS)
    FAMILIES[shape.family].backward_kernel(
        columns(kv, size, config, kind),
        columns(score, size, config, kind),
        columns(ape, ape_size, config),
        cu_seqlens,
        cu_seqlens_comp,
        columns(grad_out, total_comp * groups, config, kind),
        columns(grad_kv, size, config, kind),
        columns(grad_score, size, config, kind),
        columns(leaves, count * ape_size, config),
        segments,
        total_tokens,
        total_comp,
        rowless_blocks,
        groups,
        column_blocks,
        config,
    ).launch(
        grid=(count * column_blocks + rowless_blocks, 1, 1),
        block=(shape.threads_x, shape.threads_y, 1),
        stream=stream,
        min_blocks_per_mp=shape.min_blocks,
        preferred_smem_carveout=shared_percent(config),
    )
    wide = cutlass.const_expr(replace(config, vec=leaf_vec(config)))
    ape_groups = config.window * head_dim // wide.vec
    leaves_view, grad_ape_view = columns(leaves, count * ape_groups, wide), columns(grad_ape, ape_groups, wide)
    tensors = cu_seqlens_comp, leaves_view, grad_ape_view
    deal = cutlass.const_expr(WARP // leaf_groups(wide))
    # A thread that takes one column finds no other in its warp that has the same.
    if cutlass.const_expr(shape.leaf_parts == LEAF_ROWS and deal > 1):
        if total_comp <= FEW_LEAF_ROWS:
            lanes = Int32(1)
            while lanes * LEAF_ROWS < total_comp:
                lanes *= 2
            _sum_leaves(wide, *tensors, segments, total_comp, ape_groups, deal, lanes, stream)
        else:
            _sum_leaves(wide, *tensors, segments, total_comp, ape_groups, 1, LEAF_LANES, stream)
    else:
        _sum_leaves(wide, *tensors, segments, total_comp, ape_groups, 1, LEAF_LANES, stream)


@cute.jit
def _sum_leaves(
    config: Constexpr,
    cu_seqlens_comp: cute.Tensor,
    leaves: cute.Tensor,
    grad_ape: cute.Tensor,
    segments: Int32,
    total_comp: Int32,
    size: Int32,
    deal: Constexpr,
    lanes: int | Int32,
    stream: Any,
) -> None:
    """Launch `grad_ape_kernel` with `lanes` running sums, each of `deal` threads."""
    width = cutlass.const_expr(leaf_groups(config))
    grad_ape_kernel(
        cu_seqlens_comp, leaves, grad_ape, segments, total_comp, size, config.schedule.leaf_parts, deal, config
    ).launch(
        grid=(ceil_div(size, width), 1, 1),
        block=(width, lanes * deal, 1),
        max_number_threads=(width, LEAF_LANES, 1) if deal > 1 else (0, 0, 0),
        stream=stream,
        use_pdl=launches_overlap(),
    )
