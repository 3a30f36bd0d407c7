"""The compressor as the plain PyTorch region: gather, add, softmax, multiply, sum, and autograd for the gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import windows
from .checks import one_of, require
from .inputs import Inputs, Result
from .problem import Problem


@dataclass(frozen=True)
class Numerics:
    """Where an implementation rounds, and what it puts for an invalid logit; the default rounds nowhere but at the end.

    Everything is computed in fp32 except as follows; a gradient passes backward through each rounding as autograd
    has it, rounded to the same dtype.

    ape_dtype: ape is rounded to it before the add.
    logit_dtype: score + ape is rounded to it (an implementation that keeps the sum in a state of that dtype).
    weight_dtype: the softmax weights are rounded to it.
    product_dtype: values and weights are multiplied, and the products summed, in it.
    mask: the logit of an invalid entry (its value is 0 in any case).
    """

    ape_dtype: torch.dtype = torch.float32
    logit_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    product_dtype: torch.dtype = torch.float32
    mask: float = float("-inf")


_BF16 = torch.bfloat16

NUMERICS: dict[str, Numerics] = {
    "fp32": Numerics(),
    "megatron": Numerics(weight_dtype=_BF16, product_dtype=_BF16),
    "transformers": Numerics(ape_dtype=_BF16, logit_dtype=_BF16, weight_dtype=_BF16, product_dtype=_BF16),
    "maxtext": Numerics(weight_dtype=_BF16, product_dtype=_BF16, mask=-1e4),
    "sglang": Numerics(mask=torch.finfo(torch.float32).min),
}
"""Numerics of public implementations of the operator, by name, as their sources stood in 2026."""


def eager(inputs: Inputs, *, numerics: str | Numerics = "fp32", output_dtype: torch.dtype = torch.bfloat16) -> Result:
    """Forward and backward by PyTorch's own operations, over all rows in one call.

    Padding rows are part of the call, since the number of rows decides in which order CUDA adds, but they are pooled
    from detached copies: no gradient comes from them, whatever is in their data or in their grad_out. Memory: about
    twelve fp32 tensors of (total_comp, window, head_dim).

    Args:
        numerics: a key of `NUMERICS`, or a `Numerics`.
        output_dtype: of out, grad_kv and grad_score; fp32 leaves them unrounded. grad_ape is fp32.

    Raises:
        ValueError: `inputs` are none, `numerics` is an unknown name, or `output_dtype` another than bf16 and fp32.
    """
    require("inputs", inputs, Inputs)
    if isinstance(numerics, str):
        numerics = NUMERICS.get(numerics, numerics)
    if not isinstance(numerics, Numerics):
        raise ValueError(f"numerics: got {numerics!r}, need a Numerics or one of {', '.join(NUMERICS)}")
    one_of("output_dtype", output_dtype, (torch.bfloat16, torch.float32))
    problem = inputs.problem
    with torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
        # fp32 leaves: their gradients are rounded once, below.
        leaves = [t.detach().float().clone().requires_grad_() for t in (inputs.kv, inputs.score, inputs.ape)]
        frozen = [t.detach() for t in leaves]
        real = _windows(leaves, problem, numerics, slice(0, problem.rows))
        padding = _windows(frozen, problem, numerics, slice(problem.rows, None))
        values, logits = (torch.cat(parts) for parts in zip(real, padding, strict=True))
        weights = _round(torch.softmax(logits, dim=1), numerics.weight_dtype)
        out = (values.to(numerics.product_dtype) * weights.to(numerics.product_dtype)).sum(dim=1)
        grad_kv, grad_score, grad_ape = torch.autograd.grad(out, leaves, inputs.grad_out.to(out.dtype))
    return Result(out.detach().to(output_dtype), grad_kv.to(output_dtype), grad_score.to(output_dtype), grad_ape)


def _windows(tensors: list[Tensor], problem: Problem, numerics: Numerics, rows: slice) -> tuple[Tensor, Tensor]:
    """Values and logits (n, window, head_dim) of some rows, fp32, from kv, score and ape in fp32."""
    kv, score, ape = tensors
    values = windows.gather(kv, problem, 0.0, rows)
    logits = windows.logits(score, _round(ape, numerics.ape_dtype), problem, rows, fill=numerics.mask)
    return values, _round(logits, numerics.logit_dtype)


def _round(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype).float()
