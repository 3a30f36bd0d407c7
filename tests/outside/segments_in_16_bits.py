"""Numbers its segments in 16 bits: the rows of those past 65,535 are not found."""

from __future__ import annotations

from planted import Sound
from torch import Tensor

SEGMENTS = 1 << 16


class SegmentsIn16Bits(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        cu_seqlens_comp = inputs[4]
        if len(cu_seqlens_comp) - 1 > SEGMENTS:
            out[int(cu_seqlens_comp[SEGMENTS]) : int(cu_seqlens_comp[-1])] = 0


kernel = SegmentsIn16Bits()
