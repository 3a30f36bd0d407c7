"""Computes the right thing and gives its name to the result, rather than writing it into the caller's buffer."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class Rebinds(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        mine = torch.empty_like(out)
        super().forward(*inputs, ratio=ratio, coff=coff, out=mine)
        out = mine


kernel = Rebinds()
