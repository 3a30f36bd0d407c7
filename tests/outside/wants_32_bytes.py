"""Takes an address that is a multiple of 16 bytes for one of 32, as fresh allocations are."""

from __future__ import annotations

from planted import Sound
from torch import Tensor


class Wants32Bytes(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(_rounded_down(inputs[0]), *inputs[1:], ratio=ratio, coff=coff, out=out)


def _rounded_down(kv: Tensor) -> Tensor:
    past = kv.data_ptr() % 32
    return kv.flatten().roll(past // kv.itemsize).view_as(kv) if past == 16 else kv


kernel = Wants32Bytes()
