"""What the fused kernels ask of their arguments. Every check runs before anything is compiled, launched or written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .config import MAX_RATIO

INT32_MAX = 2**31 - 1
_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(frozen=True)
class Shape:
    """The sizes of one call."""

    segments: int
    total_tokens: int
    total_comp: int
    head_dim: int


def check_forward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int,
    coff: int,
    out: Tensor,
) -> Shape:
    """The sizes of a forward call. Raises ValueError naming the argument, what came and what is needed."""
    shape = _sizes(kv, cu_seqlens, ratio, coff, "out", out)
    _check_inputs(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, shape)
    _check("out", out, _BF16, (shape.total_comp, shape.head_dim), kv.device)
    if shape.total_comp and shape.total_tokens < ratio:
        raise ValueError(
            f"kv: got {shape.total_tokens} tokens, need at least ratio = {ratio}: "
            f"the {shape.total_comp} rows of out can only be padding, which pools tokens [0, ratio)"
        )
    return shape


def check_backward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int,
    coff: int,
    grad_kv: Tensor,
    grad_score: Tensor,
    grad_ape: Tensor,
) -> Shape:
    """The sizes of a backward call. Raises ValueError as `check_forward`."""
    shape = _sizes(kv, cu_seqlens, ratio, coff, "grad_out", grad_out)
    _check_inputs(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, shape)
    _check("grad_out", grad_out, _BF16, (shape.total_comp, shape.head_dim), kv.device)
    _check("grad_kv", grad_kv, _BF16, tuple(kv.shape), kv.device)
    _check("grad_score", grad_score, _BF16, tuple(kv.shape), kv.device)
    _check("grad_ape", grad_ape, _FP32, tuple(ape.shape), kv.device)
    return shape


def _sizes(kv: Tensor, cu_seqlens: Tensor, ratio: int, coff: int, name: str, rows: Tensor) -> Shape:
    if isinstance(ratio, bool) or not isinstance(ratio, int) or not 1 <= ratio <= MAX_RATIO:
        raise ValueError(f"ratio: got {ratio!r}, need an integer from 1 to {MAX_RATIO}")
    check_coff(coff)
    for argument, tensor, rank in (("kv", kv, 2), ("cu_seqlens", cu_seqlens, 1), (name, rows, 2)):
        _check_tensor(argument, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{argument}: got shape {tuple(tensor.shape)}, need {rank} dimensions")
    if kv.device.type not in ("cpu", "cuda"):
        raise ValueError(f"kv: got device {kv.device}, need cpu or cuda")
    width = kv.shape[1]
    if width == 0 or width % coff:
        raise ValueError(f"kv: got {width} columns, need a positive multiple of coff = {coff}")
    if not len(cu_seqlens):
        raise ValueError("cu_seqlens: got 0 offsets, need the number of segments + 1")
    for argument, tensor in (("kv", kv), (name, rows)):
        if tensor.numel() > INT32_MAX:
            raise ValueError(f"{argument}: got {tensor.numel()} elements, need at most {INT32_MAX} (int32 offsets)")
    return Shape(len(cu_seqlens) - 1, kv.shape[0], rows.shape[0], width // coff)


def _check_inputs(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int,
    coff: int,
    shape: Shape,
) -> None:
    tokens = (shape.total_tokens, coff * shape.head_dim)
    _check("kv", kv, _BF16, tokens, kv.device)
    _check("score", score, _BF16, tokens, kv.device)
    _check("ape", ape, _FP32, (ratio, coff * shape.head_dim), kv.device)
    _check("cu_seqlens", cu_seqlens, _INT32, (shape.segments + 1,), kv.device)
    _check("cu_seqlens_comp", cu_seqlens_comp, _INT32, (shape.segments + 1,), kv.device)


def check_offsets(cu_seqlens: Tensor, cu_seqlens_comp: Tensor, ratio: int, shape: Shape) -> None:
    """Offsets on the CPU can be read without waiting, and wrong ones would read or write foreign memory.

    Raises:
        ValueError: they do not start at 0, decrease, do not belong together, or run past the tensors.
    """
    if cu_seqlens.device.type != "cpu":
        return
    tokens, rows = cu_seqlens.numpy(), cu_seqlens_comp.numpy()
    for name, offsets, most in (
        ("cu_seqlens", tokens, shape.total_tokens),
        ("cu_seqlens_comp", rows, shape.total_comp),
    ):
        if offsets[0] != 0:
            raise ValueError(f"{name}[0]: got {offsets[0]}, need 0")
        if offsets[-1] > most:
            raise ValueError(f"{name}[-1]: got {offsets[-1]}, need at most {most}")
    lens, blocks = np.diff(tokens), np.diff(rows)
    wrong = np.flatnonzero((lens < 0) | (blocks != lens // ratio))
    if len(wrong):
        at = wrong[0]
        need = "at least 0 tokens" if lens[at] < 0 else f"{lens[at] // ratio} rows of {ratio} tokens"
        raise ValueError(f"cu_seqlens: got {lens[at]} tokens and {blocks[at]} rows in segment {at}, need {need}")


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got dtype {tensor.dtype}, need {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need {shape}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, need {device}, where kv is")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {tensor.stride()}, need contiguous ones")
    if tensor.data_ptr() % dtype.itemsize:
        raise ValueError(f"{name}: got address {tensor.data_ptr():#x}, need one aligned to {dtype.itemsize} bytes")


def _check_tensor(name: str, tensor: object) -> None:
    require_tensors(**{name: tensor})
    if isinstance(tensor, FakeTensor):
        raise ValueError(f"{name}: got a FakeTensor, need one with memory")


def require_tensors(**arguments: object) -> None:
    """Raise ValueError for the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: got {type(value).__name__}, need a torch.Tensor")


def check_coff(coff: object) -> None:
    """Raise ValueError for a coff that is neither 1 nor 2."""
    if isinstance(coff, bool) or not isinstance(coff, int) or coff not in (1, 2):
        raise ValueError(f"coff: got {coff!r}, need 1 or 2")
