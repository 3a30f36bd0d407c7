"""Which entries a row pools, and how one column group of them is loaded and stored.

Every function here and in `row` runs unchanged as part of a GPU thread and of the CPU loop. Tensors in memory come as
`columns` views, registers as (count, vec) fragments. Overlap has two halves: half 0 is the previous block in the
first-half columns, the last half always the row's own block; without overlap there is only the own block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32

from .arith import Group, Lane, apply, ceil_div, storage
from .config import Config

# A step of the search for a segment leaves one of so many parts, with all its loads on their way at once: 52.4 us in
# place of 59.6 with two for the backward of 4096 x 16 x 128; with 16 no less.
SEARCH_PARTS = 8


class Place(NamedTuple):
    """One row's column group: `groups` column groups make a row of out, `coff * groups` a token."""

    row: Int32
    token: Int32  # the first own token
    first: Boolean  # of its segment: the overlap half is invalid
    group: Int32
    groups: Int32


def columns(tensor: cute.Tensor, count: Int32, config: Config, dtype: type | None = None) -> cute.Tensor:
    """A contiguous tensor as (count, vec): column groups that one step loads and stores whole."""
    pointer = tensor.iterator if dtype is None else cute.recast_ptr(tensor.iterator, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout((count, config.vec), stride=(config.vec, 1)))


def fragments(count: int, config: Config, dtype: type = Float32) -> cute.Tensor:
    """Registers for `count` column groups, (count, vec)."""
    return cute.make_rmem_tensor(cute.make_layout((count, config.vec), stride=(config.vec, 1)), dtype)


def entry(config: Config, place: Place, half: int | Int32, k: Int32) -> Int32:
    """Index in kv of entry `k` of one half of a row's window."""
    back = (config.coff - 1 - half) * config.ratio
    return ((place.token - back + k) * config.coff + half) * place.groups + place.group


def ape_entry(config: Config, group: Int32, groups: Int32, half: int | Int32, k: Int32) -> Int32:
    """Index in ape of the position bias of the same entry."""
    return (k * config.coff + half) * groups + group


def row_entry(place: Place) -> Int32:
    """Index in out and grad_out."""
    return place.row * place.groups + place.group


@cute.jit
def find_segment(cu_seqlens_comp: cute.Tensor, segments: Int32, row: Int32) -> Int32:
    """The segment that holds `row`: the last one that starts at or before it, so empty ones are stepped over."""
    low = Int32(0)
    left = segments  # how many are in question, from `low` on; an end of theirs could leave int32
    while left > 1:
        step = ceil_div(left, SEARCH_PARTS)
        before = Int32(0)
        for i in cutlass.range_constexpr(1, SEARCH_PARTS):
            start = cu_seqlens_comp[low + cutlass.min(i * step, left - 1)]
            if (i * step < left) & (start <= row):
                before += 1
        low += before * step
        left = cutlass.min(step, left - before * step)
    return low


@cute.jit
def locate(
    config: Constexpr, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor, segments: Int32, row: Int32
) -> tuple[Int32, Int32]:
    """Where a row lies, as two numbers.

    The first is its first own token, or −1 − token if the row is its segment's first block, which padding rows are
    too: −1. The second is the end of the segment if the row is its last one, else −1.
    """
    # No load waits for more than the search: every wait on memory here holds up a whole block.
    last = cu_seqlens_comp[segments]
    segment = find_segment(cu_seqlens_comp, segments, row)
    following = cutlass.min(segment + 1, segments)
    block = row - cu_seqlens_comp[segment]
    stop = cu_seqlens_comp[following]
    token = cu_seqlens[segment] + block * config.ratio
    segment_end = cu_seqlens[following]
    code = Int32(-1)
    end = Int32(-1)
    if row < last:
        code = token
        if block == 0:
            code = -1 - token
        if row + 1 == stop:
            end = segment_end
    return code, end


def place_of(row: Int32, code: Int32, group: Int32, groups: Int32) -> Place:
    """One column group of the row that `locate` gave `code` for."""
    return Place(row, code ^ (code >> 31), code < 0, group, groups)


@cute.jit
def load_bias(config: Constexpr, ape: cute.Tensor, group: Int32, groups: Int32) -> cute.Tensor:
    """ape for every entry of a window, (window, vec) fp32: the same in every row."""
    bias = fragments(config.window, config)
    for half in cutlass.range_constexpr(config.coff):
        for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
            at = ape_entry(config, group, groups, half, k)
            cute.autovec_copy(ape[at, None], bias[half * config.ratio + k, None])
    return bias


def own_block(config: Config) -> int:
    """The first entry of a window in a segment's first row, where the overlap half is invalid and left out.

    Left out is as good as a weight of 0: no sum has other bits for a term of +0.
    """
    return config.window - config.ratio


@cute.jit
def load_window(
    config: Constexpr, memory: cute.Tensor, place: Place, start: Constexpr, index: Constexpr = entry
) -> cute.Tensor:
    """A row's window of kv or score, (window, vec) in `storage`, of which entries from `start` on exist."""
    window = fragments(config.window, config, storage(config))
    for half in cutlass.range_constexpr(start // config.ratio, config.coff):
        for k in cutlass.range(config.ratio, unroll_full=config.on_gpu):
            cute.autovec_copy(memory[index(config, place, half, k), None], window[half * config.ratio + k, None])
    return window


def store_rounded(
    config: Config, memory: cute.Tensor, at: Int32, operation: Callable[..., Lane], *operands: Group
) -> None:
    rounded = fragments(1, config, storage(config))
    apply(operation, config, (rounded, 0), *operands)
    cute.autovec_copy(rounded[0, None], memory[at, None])


def same(a: Lane) -> Lane:
    return a
