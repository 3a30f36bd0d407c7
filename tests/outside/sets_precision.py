"""Sets what it likes for its own matrix products, for the whole process."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class SetsPrecision(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        torch.set_float32_matmul_precision("medium")
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)


kernel = SetsPrecision()
