"""`compress_forward` and `compress_backward`: the fused kernels on torch tensors, into given buffers."""

from __future__ import annotations

from torch import Tensor

from . import compiled
from .checks import INPUTS, check_backward, check_coff, check_contents, check_forward, check_memory, check_ratio
from .config import Exp


def compress_forward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    *,
    ratio: int,
    coff: int,
    out: Tensor,
    exp: Exp | None = None,
) -> Tensor:
    """Pool every `ratio` tokens of a packed batch into one row.

    On CUDA out has the bits of the fp32-intermediate PyTorch region on the same device; in portable mode it has the
    same bits on every machine. Runs on the current stream of the tensors' device, without synchronisation.

    On the CPU every call checks the offsets' values, and that out has memory of its own. On CUDA both are up to the
    caller, unless the process was started with CSA_GATE_DEBUG=1: debug mode checks them there too, in every call, for
    which it waits for the device.

    Args:
        kv, score: (total_tokens, coff * head_dim), bf16, contiguous, on CPU or CUDA.
        ape: (ratio, coff * head_dim), fp32.
        cu_seqlens: (B+1,), int32, token offsets of the segments, from 0, non-decreasing, at most total_tokens.
        cu_seqlens_comp: (B+1,), int32, row offsets: segment s has `len_s // ratio` rows.
        ratio: 1 to 256.
        coff: 1, or 2 for overlapping windows.
        out: (total_comp, head_dim), bf16, written whole; rows past cu_seqlens_comp[-1] pool tokens [0, ratio). It
            overlaps no input and, unless gradients are off, does not require grad.
        exp: `native` (CUDA only, and the default there) or `portable` (the default on the CPU).

    Returns:
        out.

    Raises:
        ValueError: naming the argument, what came and what is needed; nothing is written then.
        RuntimeError: while a CUDA graph is captured, which stays usable: the kernel is not compiled yet, or debug mode
            is on.
    """
    tensors = [kv, score, ape, cu_seqlens, cu_seqlens_comp, out]
    if not compiled.rerun("forward", ratio, coff, exp, tensors):
        ratio, coff = check_ratio(ratio), check_coff(coff)
        shape = check_forward(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, out)
        _check_exp(exp, kv)
        inputs = dict(zip(INPUTS, tensors, strict=False))
        check_memory(inputs | {"out": out})
        check_contents(ratio, shape, inputs, {"out": out})
        if shape.total_comp:
            compiled.run("forward", ratio, coff, shape, exp, tensors)
    return out


def compress_backward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    *,
    ratio: int,
    coff: int,
    grad_kv: Tensor,
    grad_score: Tensor,
    grad_ape: Tensor,
    exp: Exp | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `compress_forward`, every element written: exact +0 where no row consumes a slot.

    grad_kv and grad_score have the reference's bits as out has; grad_ape is summed by a tree that the rows alone
    determine: the same from run to run, and in portable mode from device to device. An fp32 workspace of
    ceil(total_comp / 32) * ratio * coff * head_dim elements is allocated, 16 times that for windows above 32 on CUDA.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, exp: as in `compress_forward`.
        grad_out: (total_comp, head_dim), bf16; rows past cu_seqlens_comp[-1] are ignored.
        grad_kv, grad_score: as kv.
        grad_ape: as ape. The three overlap neither each other nor an input, and are otherwise as out.

    Returns:
        (grad_kv, grad_score, grad_ape).

    Raises:
        ValueError, RuntimeError: as `compress_forward`; ValueError too for a workspace of 2^31 elements or more.
    """
    gradients = (grad_kv, grad_score, grad_ape)
    tensors = [kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, *gradients]
    if not compiled.rerun("backward", ratio, coff, exp, tensors):
        ratio, coff = check_ratio(ratio), check_coff(coff)
        shape = check_backward(
            kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio, coff, grad_kv, grad_score, grad_ape
        )
        _check_exp(exp, kv)
        inputs = dict(zip((*INPUTS, "grad_out"), tensors, strict=False))
        outputs = {"grad_kv": grad_kv, "grad_score": grad_score, "grad_ape": grad_ape}
        check_memory(inputs | outputs)
        check_contents(ratio, shape, inputs, outputs)
        if shape.total_comp:
            compiled.run("backward", ratio, coff, shape, exp, tensors)
        else:
            for gradient in gradients:
                gradient.zero_()
    return gradients


def _check_exp(exp: Exp | None, kv: Tensor) -> None:
    if exp is not None and not (isinstance(exp, str) and exp in ("native", "portable")):
        raise ValueError(f"exp: got {exp!r}, need 'native' or 'portable'")
    if exp == "native" and not kv.is_cuda:
        raise ValueError(f"exp: got 'native' for tensors on {kv.device}, need 'portable' there")
