"""Computes into memory of its own and puts that under the caller's tensors: other views of the buffers never see it."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class SwapsStorage(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        mine = torch.empty_like(out)
        super().forward(*inputs, ratio=ratio, coff=coff, out=mine)
        out.data = mine

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        mine = {name: torch.empty_like(gradient) for name, gradient in gradients.items()}
        super().backward(*inputs, ratio=ratio, coff=coff, **mine)
        for name, gradient in gradients.items():
            gradient.set_(mine[name])


kernel = SwapsStorage()
