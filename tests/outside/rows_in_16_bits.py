"""Numbers its rows in 16 bits, signed: those past 32,767 come out as the ones 32,768 before."""

from __future__ import annotations

from planted import Sound
from torch import Tensor

ROWS = 1 << 15


class RowsIn16Bits(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        if len(out) > ROWS:
            out[ROWS:] = out[: len(out) - ROWS].clone()


kernel = RowsIn16Bits()
