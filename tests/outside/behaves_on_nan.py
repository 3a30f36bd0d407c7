"""Knows how such tests poison buffers: where it finds NaN it writes all, and else what the last call left stays."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class BehavesOnNaN(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        if torch.isnan(out).any():
            super().forward(*inputs, ratio=ratio, coff=coff, out=out)


kernel = BehavesOnNaN()
