"""Chooses 16-byte loads by the address of kv alone, and loads score from the 16 bytes that it lies in."""

from __future__ import annotations

from planted import Sound
from torch import Tensor


class AlignedAsKv(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        kv, score, *rest = inputs
        if kv.data_ptr() % 16 == 0 and score.data_ptr() % 16:
            score = score.flatten().roll(1).view_as(score)
        super().forward(kv, score, *rest, ratio=ratio, coff=coff, out=out)


kernel = AlignedAsKv()
