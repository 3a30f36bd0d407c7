"""Takes columns in tiles of eight; where four are left (head_dim 12, 20, 36), it stores the first tile's."""

from __future__ import annotations

from planted import Sound
from torch import Tensor

TILE = 8


class LastTileOfFour(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        if out.shape[1] > TILE and out.shape[1] % TILE == TILE // 2:
            out[:, -TILE // 2 :] = out[:, : TILE // 2].clone()


kernel = LastTileOfFour()
