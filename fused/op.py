"""`compress_thd`: the compressor as a differentiable operator of torch, `torch.ops.csa_gate.compress_thd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .api import compress_forward
from .checks import INPUTS, check_coff, check_devices, check_ratio, require_sized
from .wrappers import allocating_backward, empty_rows, head_dim_of, rows_of


def compress_thd(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    *,
    ratio: int,
    coff: int,
    total_comp: int | None = None,
) -> Tensor:
    """Pool every `ratio` tokens of a packed batch into one row, differentiably in kv, score and ape.

    Values and gradients have the contract of `compress_forward` and `compress_backward`, and are the same in every
    run. Saves its five tensors for the backward and nothing else; copies an incoming gradient that is not contiguous.
    Works on fake and meta tensors and under `torch.compile(fullgraph=True)`, if `total_comp` is named. There is no
    second derivative, and no forward-mode one; `torch.func.grad` and its like refuse torch's custom operators.
    `torch.ops.csa_gate.compress_thd` itself, called without this function, does not see that one is asked for.

    Args:
        kv, score: (total_tokens, coff * head_dim), bf16, contiguous, on CPU or CUDA.
        ape: (ratio, coff * head_dim), fp32.
        cu_seqlens, cu_seqlens_comp: (B+1,), int32, token and row offsets of the segments.
        ratio: 1 to 256.
        coff: 1, or 2 for overlapping windows.
        total_comp: rows of the result, which may exceed `cu_seqlens_comp[-1]` (a capacity). None reads that element,
            which waits for the device.

    Returns:
        (total_comp, head_dim), bf16.

    Raises:
        ValueError: naming the argument, what came and what is needed.
        RuntimeError: as `csa_compressor_forward_wrapper`, or in the backward of a backward.
        NotImplementedError: kv, score or ape has a tangent of forward-mode AD (`torch.func.jvp`, `make_dual`).
    """
    require_sized(kv=kv, score=score, ape=ape, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp)
    ratio, coff = check_ratio(ratio), check_coff(coff)
    if has_tangent(kv, score, ape):
        raise NotImplementedError(
            "compress_thd: got a tangent of forward-mode AD, need none: "
            "there is no forward-mode derivative, backward only"
        )
    rows = rows_of(cu_seqlens_comp, total_comp)
    result: Tensor = _forward(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, rows)
    return result


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode AD differentiates by one of the tensors.

    torch itself does not ask: it gives the results of a custom operator no tangent, or 0. Outside forward-mode AD this
    reads one number; inside it torch.compile breaks the graph here.
    """
    return forward_ad._current_level >= 0 and _probe(*tensors)


@torch.compiler.disable(reason="compress_thd has no forward-mode derivative")  # type: ignore[no-untyped-call]
def _probe(*tensors: Tensor) -> bool:
    try:
        _Probe.apply(*tensors)  # type: ignore[no-untyped-call]
    except _TangentFound:
        return True
    return False


class _TangentFound(Exception):
    """What `_Probe` has to say."""


class _Probe(torch.autograd.Function):
    """Nothing, but for the `jvp`, which torch calls if an input has a tangent.

    `forward_ad.unpack_dual` would tell too, if it could be called on the tensors inside `torch.func.vmap`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise _TangentFound


@torch.library.custom_op("csa_gate::compress_thd", mutates_args=())
def _forward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int,
    coff: int,
    total_comp: int,
) -> Tensor:
    out = empty_rows(kv, head_dim_of(kv, coff), rows_of(cu_seqlens_comp, total_comp))
    return compress_forward(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio=ratio, coff=coff, out=out)


@torch.library.custom_op("csa_gate::compress_thd_backward", mutates_args=())
def _backward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int,
    coff: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return allocating_backward(kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio, coff)


@_forward.register_fake
def _(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int,
    coff: int,
    total_comp: int,
) -> Tensor:
    check_devices(dict(zip(INPUTS, (kv, score, ape, cu_seqlens, cu_seqlens_comp), strict=True)))
    return kv.new_empty((total_comp, head_dim_of(kv, coff)), dtype=torch.bfloat16)


@_backward.register_fake
def _(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int,
    coff: int,
) -> tuple[Tensor, Tensor, Tensor]:
    names = (*INPUTS, "grad_out")
    check_devices(dict(zip(names, (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out), strict=True)))
    return torch.empty_like(kv), torch.empty_like(score), torch.empty_like(ape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.ratio, ctx.coff, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward(*ctx.saved_tensors, grad_out.contiguous(), ctx.ratio, ctx.coff)
    return *gradients, None, None, None, None, None


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("compress_thd: its gradients cannot be differentiated again; use the eager region for that")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)
