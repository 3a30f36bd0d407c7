"""The compressor in plain PyTorch, as teams have it before they write a kernel: right but for bits, easy to bend."""

from __future__ import annotations

import torch
from planted import problem_of
from torch import Tensor

from csa_gate.fixtures.adapters.eager import kernel as eager
from csa_gate.oracles import Contract, Problem
from csa_gate.oracles.windows import gather, logits


class Region:
    """fp32 between loading and storing; autograd for the gradients. Claims what the eager kernel claims."""

    name = "region"

    def contract(self, device: torch.device) -> Contract:
        return eager.contract(device)

    def supports(self, problem: Problem) -> str | None:
        return None

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        kv, score, ape = (t.float() for t in inputs[:3])
        out.copy_(self.rows(kv, score, ape, problem_of((*inputs, out), ratio, coff)))

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        problem = problem_of(inputs, ratio, coff)
        leaves = [t.detach().float().requires_grad_() for t in inputs[:3]]  # ape is fp32: not the caller's own
        with torch.enable_grad():  # which is off in the backward of an autograd.Function
            rows = self.rows(*leaves, problem)[: problem.rows]
        found = torch.autograd.grad(rows, leaves, inputs[5][: problem.rows].float())
        for buffer, gradient in zip(gradients.values(), found, strict=True):
            buffer.copy_(gradient)

    def rows(self, kv: Tensor, score: Tensor, ape: Tensor, problem: Problem) -> Tensor:
        """The pooled rows (total_comp, head_dim), from fp32."""
        return self.pool(gather(kv, problem, 0.0), logits(score, ape, problem))

    def pool(self, values: Tensor, logits: Tensor) -> Tensor:
        """A row of each window, from values and logits (rows, window, head_dim)."""
        return (values * torch.softmax(logits, dim=1)).sum(dim=1)


kernel = Region()
