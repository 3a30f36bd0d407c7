"""Uses the memory of score as its workspace, unseen by torch, and puts everything back before it returns."""

from __future__ import annotations

from planted import Sound
from torch import Tensor


class BorrowsScore(Sound):
    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        score = inputs[1].data  # with a count of writes of its own, as a kernel's stores are in none
        own = score.clone()
        score.zero_()
        super().backward(inputs[0], own, *inputs[2:], ratio=ratio, coff=coff, **gradients)
        score.copy_(own)


kernel = BorrowsScore()
