"""Keeps one workspace a shape for the whole process: calls at the same time share it."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class SharedWorkspace(Sound):
    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        mine = self.kept.setdefault(tuple(out.shape), torch.empty_like(out))
        super().forward(*inputs, ratio=ratio, coff=coff, out=mine)
        out.copy_(mine)


kernel = SharedWorkspace()
