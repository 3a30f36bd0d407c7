"""Index arithmetic of the kernels at the ends of int32, executed on the host."""

from __future__ import annotations

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack

from csa_gate.fused.catalogue import Shipped
from csa_gate.fused.shares import bias_entry, entries_of, runs, shared_evenly
from csa_gate.fused.window import Place, columns, entry, find_segment

INT32_MAX = 2**31 - 1


def _view(tensor: torch.Tensor) -> cute.Tensor:
    return from_dlpack(tensor, assumed_align=8).mark_layout_dynamic()


@cute.jit
def _addresses(
    found: cute.Tensor, memory: cute.Tensor, groups: Int32, ty: Int32, config: Constexpr, bias: Constexpr
) -> None:
    """Bytes from the beginning of `memory` to each run of a first row's entries in the last column group."""
    place = Place(Int32(0), Int32(0), Boolean(True), groups - 1, groups)
    index = bias_entry if bias else entry
    view = columns(memory, Int32(1), config, Float32 if bias else BFloat16)
    for number, run in enumerate(runs(config)):
        at = entries_of(config, view, place, ty, index, run).iterator
        found[number] = Int64(at.toint()) - Int64(view.iterator.toint())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ratio", [5, 100, 128, 255])
def test_addresses_of_one_wide_row(ratio: int, bias: bool) -> None:
    """A first row, whose overlap half would lie before the tensor, and ape as long as offsets reach."""
    config = Shipped(ratio, 2, 1 << 20, 1, "native", "").config("forward")
    groups = INT32_MAX // (2 * ratio * config.vec)
    assert config.head_dim is None and shared_evenly(config) == (ratio == 128)
    memory, size = torch.zeros(64, dtype=torch.int8), 4 if bias else 2
    for ty in (0, config.schedule.threads_y - 1):
        found = torch.zeros(len(runs(config)), dtype=torch.int64)
        _addresses(_view(found), _view(memory), groups, ty, config, bias)
        for run, offset in zip(runs(config), found.tolist(), strict=True):
            w = run[0] * config.schedule.threads_y + ty
            if ratio <= w < 2 * ratio:  # of the own block
                k = w - ratio
                assert offset == ((k * 2 + 1) * groups + groups - 1) * config.vec * size, (run, ty)


@cute.jit
def _search(found: cute.Tensor, starts: cute.Tensor, segments: Int32, row: Int32) -> None:
    found[0] = find_segment(starts, segments, row)


@pytest.mark.parametrize("segments", [1, 9, 1000, INT32_MAX - 8, INT32_MAX - 7, INT32_MAX - 2, INT32_MAX - 1])
def test_search_among_as_many_segments_as_there_can_be(segments: int) -> None:
    """All of them empty but the last, whose row it is; memory of which the search reads a few places."""
    starts = torch.from_numpy(np.zeros(segments + 1, dtype=np.int32))  # pages that nobody reads do not exist
    found = torch.zeros(1, dtype=torch.int32)
    _search(_view(found), _view(starts), segments, 0)
    assert found.item() == segments - 1
