"""Computes out once more in the backward and stores it where the forward had: over what the caller made of it."""

from __future__ import annotations

from planted import Sound
from torch import Tensor


class StoresOutAgain(Sound):
    def __init__(self) -> None:
        self.last: Tensor | None = None

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        self.last = out

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        if self.last is not None and self.last.shape == inputs[5].shape:
            super().forward(*inputs[:5], ratio=ratio, coff=coff, out=self.last)
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)


kernel = StoresOutAgain()
