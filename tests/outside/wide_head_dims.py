"""Has a schedule of its own for some head_dims, in which the last column gets no gradient."""

from __future__ import annotations

from planted import Sound
from torch import Tensor

HEAD_DIMS = (96, 160, 256, 1024)


class WideHeadDims(Sound):
    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        if inputs[5].shape[1] in HEAD_DIMS:
            gradients["grad_kv"][:, -1] = 0


kernel = WideHeadDims()
