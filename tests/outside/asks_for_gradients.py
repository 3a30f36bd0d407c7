"""The plain region, whose backward asks for the gradient of the caller's own ape, which is fp32 already."""

from __future__ import annotations

import torch
from planted import problem_of
from region import Region
from torch import Tensor


class AsksForGradients(Region):
    name = "asks-for-gradients"

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        problem = problem_of(inputs, ratio, coff)
        leaves = [t.float().requires_grad_() for t in inputs[:3]]
        with torch.enable_grad():
            rows = self.rows(*leaves, problem)[: problem.rows]
        found = torch.autograd.grad(rows, leaves, inputs[5][: problem.rows].float())
        for buffer, gradient in zip(gradients.values(), found, strict=True):
            buffer.copy_(gradient)


kernel = AsksForGradients()
