"""What the fused kernels ask of their arguments. Every check runs before anything is compiled, launched or written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .config import LEAF_ROWS, MAX_RATIO

INPUTS = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
INT32_MAX = 2**31 - 1

DEBUG = os.environ.get("CSA_GATE_DEBUG", "") not in ("", "0")
"""Debug mode, set by the environment variable when this module is imported: on CUDA too, every call checks all that
`check_contents` looks at. Each call then waits for the device, and none can be captured in a CUDA graph."""

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
    _check_output("out", out, _BF16, (shape.total_comp, shape.head_dim), kv.device)
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
    _check_output("grad_kv", grad_kv, _BF16, tuple(kv.shape), kv.device)
    _check_output("grad_score", grad_score, _BF16, tuple(kv.shape), kv.device)
    _check_output("grad_ape", grad_ape, _FP32, tuple(ape.shape), kv.device)
    return shape


def _sizes(kv: Tensor, cu_seqlens: Tensor, ratio: int, coff: int, name: str, rows: Tensor) -> Shape:
    check_ratio(ratio)
    check_coff(coff)
    for argument, tensor, rank in (("kv", kv, 2), ("cu_seqlens", cu_seqlens, 1), (name, rows, 2)):
        check_tensor(argument, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{argument}: got shape {tuple(tensor.shape)}, need {rank} dimensions")
    if kv.device.type not in ("cpu", "cuda"):
        raise ValueError(f"kv: got device {kv.device}, need cpu or cuda")
    width = kv.shape[1]
    if width == 0 or width % coff:
        raise ValueError(f"kv: got {width} columns, need a positive multiple of coff = {coff}")
    if not len(cu_seqlens):
        raise ValueError("cu_seqlens: got 0 offsets, need the number of segments + 1")
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


def check_contents(ratio: int, shape: Shape, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Look at what shapes do not show: the values of the offsets, and whether outputs have memory of their own.

    Wrong ones would read or write foreign memory. On the CPU this is part of every call; on CUDA reading an offset
    waits for the device, so that it is left to debug mode.

    Args:
        ratio, shape: as checked.
        inputs, outputs: the tensors of the call by name, checked.

    Raises:
        ValueError: the offsets do not start at 0, decrease, do not belong together or run past the tensors; an output
            overlaps an input or another output.
        RuntimeError: in debug mode, while a CUDA graph is captured, which stays usable.
    """
    device = inputs["kv"].device
    if device.type == "cuda":
        if not DEBUG:
            return
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "CSA_GATE_DEBUG: got a call under CUDA graph capture, which cannot wait to read cu_seqlens; "
                    "capture without debug mode"
                )
    _check_offsets(inputs["cu_seqlens"], inputs["cu_seqlens_comp"], ratio, shape)
    _check_overlap(inputs, outputs)


def _check_offsets(cu_seqlens: Tensor, cu_seqlens_comp: Tensor, ratio: int, shape: Shape) -> None:
    # In int32 a crafted decrease would pass for an increase.
    tokens, rows = (t.cpu().numpy().astype(np.int64) for t in (cu_seqlens, cu_seqlens_comp))
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


def _check_overlap(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    seen = dict(inputs)
    for name, output in outputs.items():
        start = output.data_ptr()
        for other, tensor in seen.items():
            begin = tensor.data_ptr()
            if max(start, begin) < min(start + output.nbytes, begin + tensor.nbytes):
                raise ValueError(f"{name}: got memory that {other} has too, need its own")
        seen[name] = output


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    check_tensor(name, tensor)
    check_dtype(name, tensor, dtype)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need {shape}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, need {device}, where kv is")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {tensor.stride()}, need contiguous ones")


def _check_output(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    _check(name, tensor, dtype, shape, device)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: got a tensor that requires grad, need one that does not (autograd sees no write here)"
        )


def check_memory(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a tensor with no memory for all of its elements, or where they are not aligned.

    Samples have none, so the checks that they share with the tensors of a call do not ask.
    """
    for name, tensor in tensors.items():
        check_own_memory(name, tensor)
        if is_misaligned(tensor):
            raise ValueError(f"{name}: got address {tensor.data_ptr():#x}, need one aligned to {tensor.itemsize} bytes")


def check_own_memory(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless all elements of `tensor` lie in memory of its own."""
    if has_no_address(tensor):
        raise ValueError(
            f"{name}: got a {type(tensor).__name__} that wraps others or has no memory of its own, "
            "need a plain tensor (not a subclass's wrapper, not one inside a transform of torch.func)"
        )
    check_storage(name, tensor)


def check_storage(name: str, tensor: Tensor) -> None:
    """Raise ValueError if the storage of `tensor` was freed or cut short, as `untyped_storage().resize_` does."""
    if not tensor.numel():
        return
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        stored = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # inside a transform of torch.func
        return
    if stored < (last + 1) * tensor.itemsize:
        raise ValueError(
            f"{name}: got a storage of {stored} bytes, need {(last + 1) * tensor.itemsize} (freed or resized?)"
        )


def has_no_address(tensor: Tensor) -> bool:
    """Whether torch has the elements elsewhere, or nowhere, unlike those of a storage that was freed.

    So it is with the wrappers of subclasses and of torch.func's transforms, and with zero tensors; not on meta.
    """
    try:
        tensor.untyped_storage().data_ptr()  # that of the tensor itself may be its offset from nothing
    except RuntimeError:
        return True
    return False


def check_tensor(name: str, tensor: object) -> None:
    """Raise ValueError unless `tensor` is a strided tensor with values as they are read, in reach of int32 offsets."""
    check_layout(name, tensor)
    assert isinstance(tensor, Tensor)
    if isinstance(tensor, FakeTensor):
        raise ValueError(f"{name}: got a FakeTensor, need one with memory")
    if tensor.is_neg():
        raise ValueError(f"{name}: got a view with torch's negative bit, need its values in memory (resolve_neg())")
    if tensor.numel() > INT32_MAX:
        raise ValueError(f"{name}: got {tensor.numel()} elements, need at most {INT32_MAX} (int32 offsets)")


def check_layout(name: str, tensor: object) -> None:
    """Raise ValueError unless `tensor` is a strided tensor, with memory or without."""
    require_sized(**{name: tensor})
    assert isinstance(tensor, Tensor)
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: got {tensor.layout}, need torch.strided")


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the elements of `tensor` are of this type."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got dtype {tensor.dtype}, need {dtype}")


def require_sized(**arguments: object) -> None:
    """Raise ValueError for the first argument that is no tensor, or a nested one: torch gives no shape of that."""
    require_tensors(**arguments)
    for name, tensor in arguments.items():
        if tensor.is_nested:  # type: ignore[attr-defined]
            raise ValueError(f"{name}: got a nested tensor, need torch.strided")


def require_tensors(**arguments: object) -> None:
    """Raise ValueError for the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: got {type(value).__name__}, need a torch.Tensor")


def check_devices(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a tensor that is not where kv is: with one on meta, torch would compute nothing."""
    device = tensors["kv"].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name}: got device {tensor.device}, need {device}, where kv is")


def workspace_elements(rows: int, leaf_parts: int, entries: int) -> int:
    """fp32 elements of the backward's workspace: for each leaf of grad_ape's sum its parts, each as long as ape.

    Like all else they have to be in reach of int32 offsets.

    Args:
        rows: of grad_out.
        leaf_parts: `Schedule.leaf_parts`.
        entries: elements of ape.
    """
    return -(-rows // LEAF_ROWS) * leaf_parts * entries


def is_misaligned(tensor: Tensor) -> bool:
    """Whether the address of a tensor that has one is no multiple of its element's size."""
    return tensor.data_ptr() % tensor.itemsize != 0


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python's or NumPy's; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_ratio(ratio: int) -> int:
    """`ratio` as a Python integer. Raises ValueError if it is none from 1 to MAX_RATIO."""
    if not is_integer(ratio) or not 1 <= ratio <= MAX_RATIO:
        raise ValueError(f"ratio: got {ratio!r}, need an integer from 1 to {MAX_RATIO}")
    return int(ratio)


def check_coff(coff: int) -> int:
    """`coff` as a Python integer. Raises ValueError if it is neither 1 nor 2."""
    if not is_integer(coff) or coff not in (1, 2):
        raise ValueError(f"coff: got {coff!r}, need 1 or 2")
    return int(coff)


def check_switch(name: str, value: bool) -> bool:
    """`value` as a Python bool. Raises ValueError if it is no bool: a string like 'no' would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: got {value!r}, need True or False")
    return bool(value)


def check_rows(total_comp: int | None) -> int | None:
    """`total_comp` as a Python integer, or None. Raises ValueError if it is neither."""
    if total_comp is None:
        return None
    if not is_integer(total_comp) or total_comp < 0:
        raise ValueError(f"total_comp: got {total_comp!r}, need a number of rows or None")
    return int(total_comp)
