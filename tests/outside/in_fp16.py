"""Computes in fp16, which has three bits more than the bf16 that goes in and out."""

from __future__ import annotations

import torch
from region import Region
from torch import Tensor


class InFp16(Region):
    def pool(self, values: Tensor, logits: Tensor) -> Tensor:
        return (values.half() * torch.softmax(logits.half(), dim=1)).sum(dim=1).float()


kernel = InFp16()
