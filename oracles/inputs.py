"""`Inputs`, the tensors of one problem, and `Result`, what an oracle or a kernel makes of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .checks import require, require_memory, require_tensor
from .problem import Problem

_DTYPES = {
    "kv": torch.bfloat16,
    "score": torch.bfloat16,
    "ape": torch.float32,
    "grad_out": torch.bfloat16,
    "cu_seqlens": torch.int32,
    "cu_seqlens_comp": torch.int32,
}


@dataclass(frozen=True)
class Inputs:
    """The tensors of one problem, all on one device and with memory; any strides will do.

    Args:
        problem: the geometry that the tensors must fit.
        kv, score: (total_tokens, coff * head_dim), bf16.
        ape: (ratio, coff * head_dim), fp32.
        grad_out: (total_comp, head_dim), bf16; rows at or past `problem.rows` are ignored by every oracle.
        cu_seqlens, cu_seqlens_comp: (B+1,), int32, with the values of the problem.
        seed, distribution: how `make_inputs` made them, None where it did not.

    Raises:
        ValueError: naming the tensor, what came and what is needed.
    """

    problem: Problem
    kv: Tensor
    score: Tensor
    ape: Tensor
    grad_out: Tensor
    cu_seqlens: Tensor
    cu_seqlens_comp: Tensor
    seed: int | None = None
    distribution: str | None = None

    def __post_init__(self) -> None:
        require("problem", self.problem, Problem)
        p = self.problem
        offsets = (len(p.lens) + 1,)
        shapes = {
            "kv": (p.total_tokens, p.width),
            "score": (p.total_tokens, p.width),
            "ape": (p.ratio, p.width),
            "grad_out": (p.total_comp, p.head_dim),
            "cu_seqlens": offsets,
            "cu_seqlens_comp": offsets,
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            require_tensor(name, tensor)
            if tensor.dtype != _DTYPES[name]:
                raise ValueError(f"{name}: got dtype {tensor.dtype}, need {_DTYPES[name]}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need {shape} for {p}")
            if tensor.device != self.kv.device:
                raise ValueError(f"{name}: got device {tensor.device}, need {self.kv.device}, where kv is")
            require_memory(name, tensor)
        for name in ("cu_seqlens", "cu_seqlens_comp"):
            got, need = getattr(self, name).tolist(), getattr(p, name).tolist()
            if got != need:
                at = next(i for i, (a, b) in enumerate(zip(got, need, strict=True)) if a != b)
                raise ValueError(f"{name}[{at}]: got {got[at]}, need {need[at]} for {p}")

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def to(self, device: torch.device | str) -> Inputs:
        """The same values on another device."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Result:
    """The four outputs of forward and backward.

    out: (total_comp, head_dim); grad_kv, grad_score: as kv; grad_ape: as ape. A kernel and the `mp`, `eager` and
    `ordered` oracles give bf16, bf16, bf16 and fp32; `fp64` gives fp64 throughout.
    """

    out: Tensor
    grad_kv: Tensor
    grad_score: Tensor
    grad_ape: Tensor

    def items(self) -> list[tuple[str, Tensor]]:
        """The outputs by name, in the order of the fields."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]

    def to(self, device: torch.device | str) -> Result:
        """The same values on another device."""
        return Result(**{name: tensor.to(device) for name, tensor in self.items()})
