"""`maybe_compress_thd_fused`: the fused compressor where it applies, for a caller that keeps its eager path."""

from __future__ import annotations

import logging
import os
import threading

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .checks import (
    INT32_MAX,
    check_rows,
    check_switch,
    has_no_address,
    is_integer,
    is_misaligned,
    require_tensors,
    workspace_elements,
)
from .classes import MINIMUM_CAPABILITY
from .config import LOOP, MAX_RATIO, schedule_of
from .op import compress_thd, has_tangent
from .wrappers import head_dim_of

SWITCH = "CSA_GATE_FUSED"
"""The environment variable that, set to 0, makes all calls decline; read at each call, or when torch.compile traces."""

_LOGGER = logging.getLogger(__name__)
_LOCK = threading.Lock()
_LOGGED: set[str] = set()


def maybe_compress_thd_fused(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    total_comp: int | None = None,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    enabled: bool = True,
) -> Tensor | None:
    """`compress_thd`, or None where the caller has to take its eager path.

    None for what the kernels do not cover: a dtype, a layout, a device, a ratio, more elements than int32 offsets
    reach, in the backward's workspace too if a gradient is needed; forward-mode AD, the other transforms of torch.func,
    wrapper subclasses such as DTensor. Each reason is logged once in a process, as a warning. Arguments that contradict
    each other, or whose storage was freed, are no such reason and raise, and
    `torch.use_deterministic_algorithms(True)` is none either: the gradients are the same in every run. Arguments and
    their order are those of the dispatch of this name in Megatron-LM.

    Args:
        kv, score: (total_tokens, coff * head_dim), or (total_tokens, 1, coff * head_dim) with a batch axis.
        ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio, coff: as in `compress_thd`.
        head_dim: columns of a row; None takes the width of kv over coff.
        enabled: the caller's own switch; False gives None without a word. A bool, Python's or NumPy's.

    Returns:
        (total_comp, head_dim), bf16, differentiable, with kv's batch axis if it has one; or None.

    Raises:
        ValueError: naming the argument, what came and what is needed, for sizes that do not fit each other, or a
            storage shorter than its tensor.
    """
    if not check_switch("enabled", enabled):
        return None
    require_tensors(kv=kv, score=score, ape=ape, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp)
    total_comp = check_rows(total_comp)
    reason = _why_not(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio, coff)
    if reason is not None:
        _log_once(reason)
        return None
    shape, batched = kv.shape, kv.dim() == 3
    if batched:
        kv = kv.squeeze(1)
    head_dim_of(kv, coff, head_dim)
    if score.shape != shape:  # a batch axis that only one of them has counts
        raise ValueError(f"score: got shape {tuple(score.shape)}, need {tuple(shape)}")
    score = score.view(kv.shape)
    out = compress_thd(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio=ratio, coff=coff, total_comp=total_comp)
    return out.unsqueeze(1) if batched else out


def _why_not(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    total_comp: int | None,
    ratio: int,
    coff: int,
) -> str | None:
    """What is not covered, in words that do not vary with sizes, so that the log has it once."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if kv.device.type not in ("cpu", "cuda"):
        return f"kv is on a {kv.device.type} device, not cpu or cuda"
    if kv.is_cuda and (found := _capability(kv.device)) < MINIMUM_CAPABILITY:
        return f"the device has compute capability {found}, not {MINIMUM_CAPABILITY} or newer"
    if not is_integer(ratio) or not 1 <= ratio <= MAX_RATIO:
        return f"ratio is {ratio!r}, not from 1 to {MAX_RATIO}"
    if not is_integer(coff) or coff not in (1, 2):
        return f"coff is {coff!r}, not 1 or 2"
    ratio, coff = int(ratio), int(coff)  # NumPy's would overflow
    if has_tangent(kv, score, ape):
        return "kv, score or ape has a tangent, and there is no forward-mode derivative"
    for name, tensor, dtype in (
        ("kv", kv, torch.bfloat16),
        ("score", score, torch.bfloat16),
        ("ape", ape, torch.float32),
        ("cu_seqlens", cu_seqlens, torch.int32),
        ("cu_seqlens_comp", cu_seqlens_comp, torch.int32),
    ):
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
        if tensor.is_nested or tensor.layout != torch.strided or not tensor.is_contiguous():
            return f"{name} is not contiguous"
        if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):  # the rest takes a tensor with memory
            continue
        if has_no_address(tensor):
            return f"{name} wraps other tensors or has no memory of its own"
        if is_misaligned(tensor):
            return f"{name} starts at an address that is no multiple of its element's size"
    if kv.dim() != 2 and (kv.dim() != 3 or kv.shape[1] != 1):
        return "kv is neither (tokens, columns) nor (tokens, 1, columns)"
    if not kv.shape[-1]:
        return "kv has no columns"
    if kv.numel() > INT32_MAX or (total_comp or 0) * (kv.shape[-1] // coff) > INT32_MAX:
        return f"kv or out has more than {INT32_MAX} elements, which int32 offsets do not reach"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (kv, score, ape)):
        rows = kv.shape[0] // ratio if total_comp is None else total_comp  # the most that kv's tokens can make
        if workspace_elements(rows, _leaf_parts(coff * ratio, kv.is_cuda), ape.numel()) > INT32_MAX:
            return f"the backward's workspace has more than {INT32_MAX} elements, which int32 offsets do not reach"
    if kv.shape[0] < ratio and total_comp:
        return "kv has fewer tokens than ratio, so that there is nothing that padding rows could pool"
    return None


def _leaf_parts(window: int, on_gpu: bool) -> int:
    """The most `leaf_parts` of the backward's schedules for this window, which a call of a single row has.

    Shapes beside the window, which torch.compile may trace as symbols, do not enter.
    """
    return schedule_of("backward", window, 1, 1, 1).leaf_parts if on_gpu else LOOP.leaf_parts


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)  # which torch.compile can trace
    return properties.major, properties.minor


def _log_once(reason: str) -> None:
    if torch.compiler.is_compiling():  # logging would break the graph; the eager path shows in it anyway
        return
    with _LOCK:
        if reason in _LOGGED:
            return
        _LOGGED.add(reason)
    _LOGGER.warning("The fused compressor is not used: %s.", reason)
