"""Compiled kernels by configuration and device, and how they are called with torch tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream
from torch import Tensor

from csa_gate._stops import held_back

from . import checks, cpu, gpu
from .checks import INT32_MAX, Shape, workspace_elements
from .config import (
    LEAF_ROWS,
    LOOP,
    STATIC_HEAD_DIMS,
    Config,
    Direction,
    Exp,
    orders,
    schedule_of,
    widest_on_gpu,
)

_LOCK = threading.Lock()  # the DSL compiles one function at a time
_FUNCTIONS: dict[tuple[Direction, Config, int | None], Callable[..., None]] = {}
_PLANS: dict[tuple[object, ...], Callable[[list[Tensor]], None]] = {}
_PLAIN = (Tensor, torch.nn.Parameter)  # what has memory of its own; subclasses need not
THREADED_ENTRIES = 1 << 19  # window entries times columns, about a millisecond on one core
MAX_PLANS = 1024  # of different shapes; beyond that all are forgotten, for callers whose every batch has its own
CPU_VEC = 8
LEAST_ADDRESS = 1 << 32  # a lower one may be no address but the place of a view in a storage that was freed


def configure(
    direction: Direction, ratio: int, coff: int, shape: Shape, exp: Exp, device: torch.device, tensors: list[Tensor]
) -> Config:
    """The configuration of one call: the widest accesses that head_dim and, on a GPU, the tensors' addresses allow."""
    window = coff * ratio
    on_gpu = device.type == "cuda"
    widest = widest_on_gpu(direction, window, shape.head_dim, shape.total_comp) if on_gpu else CPU_VEC

    def possible(vec: int) -> bool:
        aligned = not on_gpu or all(t.data_ptr() % (vec * t.itemsize) == 0 for t in tensors)
        return vec <= widest and shape.head_dim % vec == 0 and aligned

    vec = next(v for v in (8, 4, 2, 1) if v == 1 or possible(v))
    rows = None if exp == "portable" else shape.total_comp
    softmax_lanes, pool_lanes = orders(window, shape.head_dim, rows)
    schedule, head_dim = LOOP, None
    if on_gpu:
        schedule = schedule_of(direction, window, shape.head_dim, vec, shape.total_comp)
        head_dim = shape.head_dim if shape.head_dim in STATIC_HEAD_DIMS else None
        # What takes more registers: addresses and portable powers.
        if head_dim is None or exp == "portable":
            schedule = replace(schedule, min_blocks=1)
    return Config(ratio, coff, vec, softmax_lanes, pool_lanes, exp, schedule, head_dim)


def default_exp(device: torch.device) -> Exp:
    """CUDA's own exp where there is one, else the portable one."""
    return "native" if device.type == "cuda" else "portable"


def rerun(direction: Direction, ratio: int, coff: int, exp: Exp | None, tensors: list[Tensor]) -> bool:
    """Repeat a call whose like has succeeded before, on CUDA; False if there is none, and then nothing was written.

    What the key leaves open, dtypes, devices, strides, alignment and the other shapes, the compiled function checks
    itself before it launches; its objections are left to the caller's own checks, which name the argument. So is what
    it does not see: numbers that only equal the key's (True, 4.0), outputs that require grad, tensors with torch's
    negative bit, which it sets on no integers, or without memory, all that debug mode asks. A storage that was cut
    short is not seen here, nor a view that begins 4 GiB or more into a freed one: to ask storages takes longer than all
    else.
    """
    if checks.DEBUG or type(ratio) is not int or type(coff) is not int:
        return False
    try:
        kv, score, ape, _, _, rows, *gradients = tensors
        if type(kv) not in _PLAIN or tensors[-1].requires_grad:
            return False
        if kv.is_neg() or score.is_neg() or ape.is_neg() or rows.is_neg():
            return False
        if gradients:
            grad_kv, grad_score, grad_ape = gradients
            if grad_kv.requires_grad or grad_score.requires_grad:
                return False
            if grad_kv.is_neg() or grad_score.is_neg() or grad_ape.is_neg():
                return False
        if min(map(Tensor.data_ptr, tensors)) < LEAST_ADDRESS:  # wrappers of subclasses raise
            return False
        plan = _PLANS.get(_plan_key(direction, ratio, coff, exp, tensors))
        if plan is None:
            return False
        plan(tensors)
    except Exception:
        return False
    return True


def run(direction: Direction, ratio: int, coff: int, shape: Shape, exp: Exp | None, tensors: list[Tensor]) -> None:
    """Compile if need be, and run.

    tensors: checked; [kv, score, ape, cu_seqlens, cu_seqlens_comp, out], or for backward [..., grad_out, grad_kv,
    grad_score, grad_ape].

    Raises:
        ValueError: the workspace is longer than int32 offsets reach.
        RuntimeError: the function is not compiled yet and a CUDA graph is being captured, which would break it.
    """
    kv = tensors[0]
    config = configure(
        direction, ratio, coff, shape, exp or default_exp(kv.device), kv.device, tensors[:3] + tensors[5:]
    )
    leaves = workspace_elements(shape.total_comp, config.schedule.leaf_parts, tensors[2].numel())
    if direction == "backward" and leaves > INT32_MAX:
        raise ValueError(
            f"grad_out: got {shape.total_comp} rows, whose workspace has {leaves} elements, "
            f"need at most {INT32_MAX} there (int32 offsets)"
        )
    function = compiled_function(direction, config, kv.device.index)
    sizes = (shape.segments, shape.total_tokens, shape.total_comp, shape.head_dim)
    if not config.on_gpu:
        if direction == "backward":
            tensors = [*tensors, _host_scratch(leaves)]
        _run_on_host(function, direction, config, sizes, tensors)
        return

    device = kv.device

    def plan(tensors: list[Tensor]) -> None:
        if direction == "backward":
            tensors = [*tensors, torch.empty(leaves, dtype=torch.float32, device=device)]
        if torch.cuda.current_device() == device.index:
            function(*tensors, *sizes)
        else:
            with torch.cuda.device(device):
                function(*tensors, *sizes)

    plan(tensors)
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    _PLANS[_plan_key(direction, ratio, coff, exp, tensors)] = plan


def _plan_key(
    direction: Direction, ratio: int, coff: int, exp: Exp | None, tensors: list[Tensor]
) -> tuple[object, ...]:
    kv, offsets, rows = tensors[0], tensors[3], tensors[5]
    return direction, ratio, coff, exp, kv.shape, offsets.shape, rows.shape, kv.device


def _run_on_host(
    function: Callable[..., None], direction: Direction, config: Config, sizes: tuple[int, ...], tensors: list[Tensor]
) -> None:
    """Share a call out to as many threads as torch takes, if it is worth starting them; no bit depends on it."""
    _, _, rows, head_dim = sizes
    workers = min(torch.get_num_threads(), head_dim // config.vec)
    if rows * head_dim * config.window < THREADED_ENTRIES:
        workers = 1

    def work(worker: int) -> None:
        scratch = [_host_scratch(LEAF_ROWS * config.window * config.vec)] if direction == "backward" else []
        numbers = [Int32(n) for n in (*sizes, worker, workers)]
        function(*[_host_tensor(t) for t in tensors + scratch], *numbers)

    if workers == 1:
        work(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))


def compiled_function(direction: Direction, config: Config, device: int | None) -> Callable[..., None]:
    """The function of one configuration; one for each device, whose context holds the code."""
    key = (direction, config, device)
    if key not in _FUNCTIONS:
        if config.on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{direction} is not compiled for {config} yet, and a CUDA graph is being captured: "
                "run it once before the capture"
            )
        with _LOCK:
            if key not in _FUNCTIONS:
                _FUNCTIONS[key] = compile_function(direction, config)
    return _FUNCTIONS[key]


@held_back()
def compile_function(direction: Direction, config: Config) -> Callable[..., None]:
    """Compile one configuration, for the device at hand or the architecture that CUTE_DSL_ARCH names."""
    sizes = [Int32(1)] * 4  # segments, total_tokens, total_comp, head_dim
    if not config.on_gpu:
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.int32, torch.int32, torch.bfloat16]
        if direction == "backward":
            dtypes += [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32]
        samples = [_host_tensor(torch.empty(2, dtype=dtype, device="cpu")) for dtype in dtypes]
        return cute.compile(getattr(cpu, direction), *samples, *sizes, Int32(0), Int32(1), config)
    tensors = _device_tensors(direction, config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(getattr(gpu, direction), *tensors, *sizes, stream, config, options="--enable-tvm-ffi")


def _host_scratch(count: int) -> Tensor:
    """Memory for `count` fp32 numbers, whatever torch's default dtype and device are."""
    return torch.empty(count, dtype=torch.float32, device="cpu")


def _host_tensor(tensor: Tensor) -> Any:
    return from_dlpack(tensor.detach().reshape(-1)).mark_layout_dynamic()


def _device_tensors(direction: Direction, config: Config) -> list[Any]:
    """Stand-ins for the arguments; dimensions that must agree are one symbol, so the function compares them."""
    tokens, rows, offsets = (cute.sym_int32() for _ in range(3))
    width, head_dim = (cute.sym_int32(divisibility=config.vec) for _ in range(2))

    def matrix(dtype: Any, *shape: Any) -> Any:
        align = config.vec * dtype.width // 8
        return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=align)

    kv, ape = matrix(BFloat16, tokens, width), matrix(Float32, config.ratio, width)
    cu = make_fake_compact_tensor(Int32, (offsets,))
    tensors = [kv, kv, ape, cu, cu, matrix(BFloat16, rows, head_dim)]
    if direction == "backward":
        tensors += [kv, kv, ape, make_fake_compact_tensor(Float32, (cute.sym_int64(),), assumed_align=16)]
    return tensors
