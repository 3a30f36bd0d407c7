"""Rounds the number of rows up to its tile and stores whole tiles."""

from __future__ import annotations

from planted import Sound
from torch import Tensor

TILE = 4


class OneTileMore(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        more = -len(out) % TILE * out.shape[1]
        out.as_strided((more,), (1,), out.storage_offset() + out.numel()).fill_(0.0)


kernel = OneTileMore()
