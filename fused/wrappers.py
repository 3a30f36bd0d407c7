"""The fused kernels as functions that allocate their results, under the names and arguments of `cudnn.csa`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch._subclasses import FakeTensor

from .api import compress_backward, compress_forward
from .checks import (
    INT32_MAX,
    check_coff,
    check_dtype,
    check_layout,
    check_own_memory,
    check_ratio,
    check_rows,
    check_storage,
    check_tensor,
    is_integer,
    require_sized,
)
from .streams import StreamLike, call_on


class NamedTensors(dict[str, Tensor]):
    """Tensors by name that unpack like a tuple: iteration and integer keys give the values, in order.

    `keys()`, `items()`, `in` and `**` are those of a dict.
    """

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Tensor:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def csa_compressor_forward_wrapper(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    stream: StreamLike | None = None,
) -> NamedTensors:
    """Pool every `ratio` tokens of a packed batch into one row; see `compress_forward` for the contract.

    Allocates `out` and nothing else, and does not synchronise if `total_comp` is named. Neither differentiable nor for
    torch.compile to trace: `compress_thd` is both.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp: as in `compress_forward`.
        ratio: 1 to 256.
        head_dim: columns of a row; None takes `kv.shape[1] / coff`.
        coff: 1, or 2 for overlapping windows.
        total_comp: rows of out, which may exceed `cu_seqlens_comp[-1]` (a capacity). None reads that element, which
            waits for the device.
        stream: where to allocate and run, a torch stream or a CUDA handle; the tensors used are recorded there. None
            is the current stream of the tensors' device.

    Returns:
        {"out": (total_comp, head_dim) bf16}.

    Raises:
        ValueError: naming the argument, what came and what is needed.
        RuntimeError: under CUDA graph capture, if `total_comp` is None or the kernel is not compiled yet (one earlier
            call, or `CSACompressorForward.compile`, does that); the capture stays usable.
    """
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    ratio, coff = check_ratio(ratio), check_coff(coff)
    head_dim = head_dim_of(kv, coff, head_dim)

    def launch() -> tuple[Tensor, ...]:
        out = empty_rows(kv, head_dim, rows_of(cu_seqlens_comp, total_comp))
        return (compress_forward(*inputs, ratio=ratio, coff=coff, out=out),)

    (out,) = call_on(stream, inputs, launch)
    return NamedTensors(out=out)


def csa_compressor_backward_wrapper(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    stream: StreamLike | None = None,
    deterministic: bool = False,
) -> NamedTensors:
    """Gradients of the forward wrapper's `out`; see `compress_backward` for the contract.

    Allocates the gradients and the one workspace that `compress_backward` names, and does not synchronise.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, stream: as in the forward wrapper.
        grad_out: (total_comp, head_dim), bf16; rows past cu_seqlens_comp[-1] are ignored.
        deterministic: without effect: the gradients are the same in every run with either value.

    Returns:
        {"grad_kv": as kv, "grad_score": as score, "grad_ape": as ape}.

    Raises:
        ValueError, RuntimeError: as the forward wrapper.
    """
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
    ratio, coff = check_ratio(ratio), check_coff(coff)
    head_dim_of(kv, coff, head_dim)

    def launch() -> tuple[Tensor, ...]:
        return allocating_backward(*inputs, ratio, coff)

    grad_kv, grad_score, grad_ape = call_on(stream, inputs, launch)
    return NamedTensors(grad_kv=grad_kv, grad_score=grad_score, grad_ape=grad_ape)


def allocating_backward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int,
    coff: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`compress_backward` into new tensors."""
    for name, tensor in (("kv", kv), ("score", score), ("ape", ape)):  # before as much memory is asked for
        check_tensor(name, tensor)
        check_own_memory(name, tensor)
    return compress_backward(
        kv,
        score,
        ape,
        cu_seqlens,
        cu_seqlens_comp,
        grad_out,
        ratio=ratio,
        coff=coff,
        grad_kv=torch.empty_like(kv),
        grad_score=torch.empty_like(score),
        grad_ape=torch.empty_like(ape),
    )


def empty_rows(kv: Tensor, head_dim: int, rows: int) -> Tensor:
    """An `out` of `rows` rows, uninitialised, where kv is. Raises ValueError for more than int32 offsets reach."""
    if rows * head_dim > INT32_MAX:
        raise ValueError(
            f"total_comp: got {rows} rows of {head_dim}, need at most {INT32_MAX} elements (int32 offsets)"
        )
    return torch.empty((rows, head_dim), dtype=torch.bfloat16, device=kv.device)


def head_dim_of(kv: Tensor, coff: int, head_dim: int | None = None) -> int:
    """Columns of a row, by the width of kv. Raises ValueError if kv has no such width or `head_dim` is another one."""
    require_sized(kv=kv)
    if kv.dim() != 2:
        raise ValueError(f"kv: got shape {tuple(kv.shape)}, need 2 dimensions")
    coff = check_coff(coff)
    width = kv.shape[1]
    if head_dim is not None and not (is_integer(head_dim) and coff * head_dim == width):
        raise ValueError(f"head_dim: got {head_dim!r}, need {width / coff:g}: kv has {width} columns, coff is {coff}")
    return width // coff


def rows_of(cu_seqlens_comp: Tensor, total_comp: int | None) -> int:
    """`total_comp`, or the last element of `cu_seqlens_comp` for None, which waits for the device.

    Raises:
        ValueError: `total_comp` is not a number of rows that int32 offsets reach, or `cu_seqlens_comp` ends in none.
        RuntimeError: `total_comp` is None under CUDA graph capture, where nothing can be waited for.
    """
    rows = check_rows(total_comp)
    if rows is not None:
        if rows > INT32_MAX:
            raise ValueError(f"total_comp: got {rows} rows, need at most {INT32_MAX} (int32 offsets)")
        return rows
    # The kernels' own checks come after this read: of another dtype it could give no number, or a wrong one.
    check_layout("cu_seqlens_comp", cu_seqlens_comp)
    check_dtype("cu_seqlens_comp", cu_seqlens_comp, torch.int32)
    if cu_seqlens_comp.dim() != 1 or not len(cu_seqlens_comp):
        shape = tuple(cu_seqlens_comp.shape)
        raise ValueError(f"cu_seqlens_comp: got shape {shape}, need the number of segments + 1")
    if cu_seqlens_comp.is_meta:
        raise ValueError("cu_seqlens_comp: got device meta, need one to read the number of rows on, or a total_comp")
    if isinstance(cu_seqlens_comp, FakeTensor):
        raise ValueError("cu_seqlens_comp: got a FakeTensor, need values to read the number of rows, or a total_comp")
    if not torch.compiler.is_compiling():
        if is_batchedtensor(cu_seqlens_comp):
            raise ValueError(
                "cu_seqlens_comp: got one inside torch.func.vmap, need one to read the number of rows, or a total_comp"
            )
        check_storage("cu_seqlens_comp", cu_seqlens_comp)
    if cu_seqlens_comp.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("total_comp: got None under CUDA graph capture, which cannot wait; name the rows of out")
    rows = int(cu_seqlens_comp[-1].item())
    if rows < 0:
        raise ValueError(f"cu_seqlens_comp: got {rows} at the end, need a number of rows")
    return rows
