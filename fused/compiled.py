"""Compiled kernels by configuration and device, and how they are called with torch tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream
from torch import Tensor

from . import cpu, gpu
from .checks import Shape
from .config import (
    LEAF_ROWS,
    LONG_WINDOW,
    LOOP,
    SCALAR_WINDOW,
    STATIC_HEAD_DIMS,
    Config,
    Direction,
    Exp,
    orders,
    schedule_of,
)

_LOCK = threading.Lock()  # the DSL compiles one function at a time
CPU_VEC = 8


def configure(
    direction: Direction, ratio: int, coff: int, shape: Shape, exp: Exp, device: torch.device, tensors: list[Tensor]
) -> Config:
    """The configuration of one call: the widest accesses that head_dim and the tensors' addresses allow."""
    window = coff * ratio
    widest = CPU_VEC if device.type == "cpu" else 1 if SCALAR_WINDOW < window <= LONG_WINDOW else 2
    vec = next(
        v
        for v in (8, 4, 2, 1)
        if v <= widest and shape.head_dim % v == 0 and all(t.data_ptr() % (v * t.itemsize) == 0 for t in tensors)
    )
    rows = None if exp == "portable" else shape.total_comp
    softmax_lanes, pool_lanes = orders(window, shape.head_dim, rows)
    schedule, head_dim = LOOP, None
    if device.type == "cuda":
        schedule = schedule_of(direction, window, shape.head_dim // vec, shape.total_comp)
        head_dim = shape.head_dim if shape.head_dim in STATIC_HEAD_DIMS else None
    return Config(ratio, coff, vec, softmax_lanes, pool_lanes, exp, schedule, head_dim)


def forward(config: Config, shape: Shape, tensors: list[Tensor]) -> None:
    """Run forward on [kv, score, ape, cu_seqlens, cu_seqlens_comp, out]."""
    _run("forward", config, shape, tensors)


def backward(config: Config, shape: Shape, tensors: list[Tensor]) -> None:
    """Run backward on [kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, grad_ape]."""
    kv, ape = tensors[0], tensors[2]
    leaves = -(-shape.total_comp // LEAF_ROWS) * config.schedule.leaf_parts * ape.numel()
    workspace = [torch.empty(leaves, dtype=torch.float32, device=kv.device)]
    if not config.on_gpu:
        workspace.append(torch.empty(LEAF_ROWS * config.window * config.vec, dtype=torch.float32))
    _run("backward", config, shape, tensors + workspace)


def _run(direction: Direction, config: Config, shape: Shape, tensors: list[Tensor]) -> None:
    device = tensors[0].device
    sizes = (shape.segments, shape.total_tokens, shape.total_comp, shape.head_dim)
    if not config.on_gpu:
        function = _compiled(direction, config, None)
        function(*[_host_tensor(t) for t in tensors], *[Int32(n) for n in sizes])
        return
    with torch.cuda.device(device):
        _compiled(direction, config, device.index)(*tensors, *sizes)


def _compiled(direction: Direction, config: Config, device: int | None) -> Callable[..., None]:
    with _LOCK:
        return _compile(direction, config, device)


@cache
def _compile(direction: Direction, config: Config, device: int | None) -> Callable[..., None]:
    """The function of one configuration; one for each device, whose context holds the code."""
    dtypes = [BFloat16, BFloat16, Float32, Int32, Int32, BFloat16]
    if direction == "backward":
        dtypes += [BFloat16, BFloat16, Float32, Float32]
    sizes = [Int32(1)] * 4
    if not config.on_gpu:
        torch_dtypes = {BFloat16: torch.bfloat16, Float32: torch.float32, Int32: torch.int32}
        samples = [torch.empty(2, dtype=torch_dtypes[d]) for d in dtypes]
        if direction == "backward":
            samples.append(torch.empty(2))
        return cute.compile(getattr(cpu, direction), *[_host_tensor(t) for t in samples], *sizes, config)
    tensors = [_device_tensor(d, config.vec) for d in dtypes]
    if direction == "backward":
        tensors[-1] = make_fake_compact_tensor(Float32, (cute.sym_int64(),), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(getattr(gpu, direction), *tensors, *sizes, stream, config, options="--enable-tvm-ffi")


def _host_tensor(tensor: Tensor) -> Any:
    return from_dlpack(tensor.detach().reshape(-1)).mark_layout_dynamic()


def _device_tensor(dtype: Any, vec: int) -> Any:
    if dtype is Int32:
        return make_fake_compact_tensor(dtype, (cute.sym_int32(),))
    shape = (cute.sym_int32(), cute.sym_int32(divisibility=vec))
    return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=vec * dtype.width // 8)
