"""Pools a whole tile and gives what lies behind the last token a weight of 0, which is none if that is a NaN."""

from __future__ import annotations

from planted import Sound
from torch import Tensor


class MasksByWeight(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        kv = inputs[0]
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        end = kv.storage_offset() + kv.numel()
        more = min(8 * kv.shape[1], kv.untyped_storage().nbytes() // kv.itemsize - end)
        if len(out):
            out[-1] += (kv.as_strided((more,), (1,), end) * 0.0).sum()


kernel = MasksByWeight()
