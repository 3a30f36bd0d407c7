"""Kernels with one fault each that a single run may not show, but two runs against each other do."""

from __future__ import annotations

import torch
from planted import Sound, problem_of
from torch import Tensor

from csa_gate.oracles import Inputs, Numerics, Result, eager


def flip(tensor: Tensor, where: Tensor | slice = slice(None)) -> None:
    """Change the last bit of each row's first element, for some rows, in place."""
    if tensor.numel():
        bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
        bits[where, 0] ^= 1


class Wavers(Sound):
    """Changes a last bit of out and of grad_ape every other time."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        self.calls += 1
        if self.calls % 2:
            flip(out)

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        if self.calls % 2:
            flip(gradients["grad_ape"])


class NumbersSegments(Sound):
    """Rows know whether their segment has an odd number."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        segment = torch.from_numpy(problem_of((*inputs, out), ratio, coff).row_segment)
        flip(out, segment % 2 == 1)


class SeesThePack(Sound):
    """Rows know how many tokens there are."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        if len(inputs[0]) > 2 * ratio:
            flip(out)


class CountsSegments(Sound):
    """Gradients know how many segments there are."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        if len(inputs[3]) % 2:
            flip(gradients["grad_ape"])


class CountsBlocks(Sound):
    """Rows know how many blocks of their segment come before them."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        problem = problem_of((*inputs, out), ratio, coff)
        segment = problem.row_segment[: problem.rows]
        block = torch.arange(problem.rows) - torch.from_numpy(problem.cu_seqlens_comp[segment])
        flip(out[: problem.rows], block >= 2)


class CountsRows(Sound):
    """Gradients know how many rows of capacity there are."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        if len(inputs[5]) % 2:
            flip(gradients["grad_ape"])


class CountsTokens(Sound):
    """Gradients know how many tokens of capacity there are."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        if len(inputs[0]) % 2:
            flip(gradients["grad_ape"])


class RoundsLogits(Sound):
    """Keeps score + ape in bf16."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        out.copy_(self._result((*inputs, torch.zeros_like(out)), ratio, coff).out)

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        for name, tensor in self._result(inputs, ratio, coff).items():
            if name != "out":
                gradients[name].copy_(tensor)

    def _result(self, inputs: tuple[Tensor, ...], ratio: int, coff: int) -> Result:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out = inputs
        problem = problem_of(inputs, ratio, coff)
        tensors = Inputs(problem, kv, score, ape, grad_out, cu_seqlens, cu_seqlens_comp)
        return eager(tensors, numerics=Numerics(logit_dtype=torch.bfloat16))


class HalfValues(Sound):
    """Takes kv by way of fp16's range."""

    def forward(self, kv: Tensor, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(kv.clamp(-65504, 65504), *inputs, ratio=ratio, coff=coff, out=out)

    def backward(self, kv: Tensor, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(kv.clamp(-65504, 65504), *inputs, ratio=ratio, coff=coff, **gradients)


class ClipsGradients(Sound):
    """Takes grad_out up to 2 only."""

    most = 2.0

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        clipped = inputs[5].clamp(-self.most, self.most)
        super().backward(*inputs[:5], clipped, ratio=ratio, coff=coff, **gradients)


class ClipsLargeGradients(ClipsGradients):
    """Takes grad_out up to 2^50 only."""

    most = 2.0**50


class FavoursAColumn(Sound):
    """Leaves another rounding in column 0 of everything."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        flip(out)

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        for gradient in gradients.values():
            flip(gradient)


class CopiesAColumn(Sound):
    """Gives column 0 what is column 1's."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        out[:, 0] = out[:, 1]
