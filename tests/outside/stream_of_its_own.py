"""Runs on a stream of its own that nothing orders after the caller's; needs CUDA to go wrong."""

from __future__ import annotations

import torch
from planted import Sound
from torch import Tensor


class StreamOfItsOwn(Sound):
    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        with torch.cuda.stream(self._side(out.device)):
            super().forward(*inputs, ratio=ratio, coff=coff, out=out)


kernel = StreamOfItsOwn()
