"""Exact zeros in the gradient slots that no row consumes.

A segment's last row clears what it leaves over (its own first-half columns under overlap, and the tail, fewer than
`ratio` tokens); segments without a row and the tokens past the last segment are dealt out evenly. No slot is
written twice.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .arith import storage
from .window import Place, fragments


@cute.jit
def zero_group(config: Constexpr, grad_kv: cute.Tensor, grad_score: cute.Tensor, at: Int32) -> None:
    """Clear column group `at` of both gradients, given as `columns` views."""
    zero = fragments(1, config, storage(config))
    zero.fill(0)
    cute.autovec_copy(zero[0, None], grad_kv[at, None])
    cute.autovec_copy(zero[0, None], grad_score[at, None])


@cute.jit
def zero_after_last(
    config: Constexpr,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    place: Place,
    segment_end: Int32,
    lane: Int32,
    lanes: Int32,
) -> None:
    """What a segment's last row leaves over in its column group; nothing where `segment_end` is −1: not the last.

    `lane` of `lanes` threads that share the column group takes every lanes-th token.
    """
    if segment_end >= 0:
        if cutlass.const_expr(config.coff == 2):
            for k in cutlass.range(lane, config.ratio, lanes):
                zero_group(config, grad_kv, grad_score, (place.token + k) * 2 * place.groups + place.group)
        tail = place.token + config.ratio
        for k in cutlass.range(lane, segment_end - tail, lanes):
            for half in cutlass.range_constexpr(config.coff):
                at = ((tail + k) * config.coff + half) * place.groups + place.group
                zero_group(config, grad_kv, grad_score, at)


@cute.jit
def zero_rowless(
    config: Constexpr,
    cu_seqlens: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    segments: Int32,
    total_tokens: Int32,
    groups: Int32,
    worker: Int32,
    workers: Int32,
    lane: Int32,
    lanes: Int32,
) -> None:
    """Worker `worker` of `workers` clears its segments shorter than `ratio` and its tokens past cu_seqlens[-1].

    `lane` of `lanes` threads of the worker takes every lanes-th column group. Loops count from 0: from where they lie,
    the step past the last token or group could leave int32.
    """
    for segment in cutlass.range(worker, segments, workers):
        start = cu_seqlens[segment]
        end = cu_seqlens[segment + 1]
        if end - start < config.ratio:
            for i in cutlass.range(lane, (end - start) * config.coff * groups, lanes):
                zero_group(config, grad_kv, grad_score, start * config.coff * groups + i)
    padding = cu_seqlens[segments]
    for token in cutlass.range(worker, total_tokens - padding, workers):
        for i in cutlass.range(lane, config.coff * groups, lanes):
            zero_group(config, grad_kv, grad_score, (padding + token) * config.coff * groups + i)
