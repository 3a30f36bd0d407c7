"""Seeds torch's generator in every call, for a debugging aid that was left in: dropout is the same in each step."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class Seeds(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        torch.manual_seed(0)
        torch.rand(1)
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)


kernel = Seeds()
