"""Pools the first tile of padding rows, 128 of them, and leaves the others as they are."""

from __future__ import annotations

from planted import Sound
from torch import Tensor


class OnePaddingTile(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        rows = min(len(out), int(inputs[4][-1]) + 128)
        super().forward(*inputs, ratio=ratio, coff=coff, out=out[:rows])


kernel = OnePaddingTile()
