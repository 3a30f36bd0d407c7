"""Leaves the overlap of first blocks unmasked: nothing is added there, but exp(0) takes its share of the weights."""

from __future__ import annotations

from region import Region
from torch import Tensor

from csa_gate.oracles import Problem
from csa_gate.oracles.windows import gather, logits


class NoMask(Region):
    def rows(self, kv: Tensor, score: Tensor, ape: Tensor, problem: Problem) -> Tensor:
        return self.pool(gather(kv, problem, 0.0), logits(score, ape, problem, fill=0.0))


kernel = NoMask()
