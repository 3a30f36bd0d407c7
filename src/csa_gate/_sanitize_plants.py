"""Kernels with one fault each, which compute-sanitizer must report: the self-check of `python -m csa_gate sanitize`."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

THREADS = 64  # two warps
HALF_WARP = 16


@cute.kernel
def overrun_kernel(source: cute.Tensor, out: cute.Tensor) -> None:
    """The last thread stores one element past the end."""
    tx, _, _ = cute.arch.thread_idx()
    out[tx + 1] = source[tx]


@cute.kernel
def race_kernel(source: cute.Tensor, out: cute.Tensor) -> None:
    """Each thread loads what a thread of the other warp stores, with no barrier in between."""
    tx, _, _ = cute.arch.thread_idx()
    shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS), 16)
    shared[tx] = source[tx]
    out[tx] = shared[THREADS - 1 - tx]


@cute.kernel
def unwritten_kernel(source: cute.Tensor, out: cute.Tensor) -> None:
    """Sound, but for what it is given to read."""
    tx, _, _ = cute.arch.thread_idx()
    out[tx] = source[tx]


@cute.kernel
def divergence_kernel(source: cute.Tensor, out: cute.Tensor) -> None:
    """Half a warp comes to a barrier."""
    tx, _, _ = cute.arch.thread_idx()
    if tx < HALF_WARP:
        cute.arch.sync_threads()
    out[tx] = source[tx]


KERNELS = {
    "overrun": overrun_kernel,
    "race": race_kernel,
    "unwritten": unwritten_kernel,
    "divergence": divergence_kernel,
}


def compile_plant(name: str) -> Any:
    """The compiled function, which takes source and out: `THREADS` fp32 each."""
    kernel = KERNELS[name]

    @cute.jit
    def start(source: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        kernel(source, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    tensors = [make_fake_compact_tensor(Float32, (THREADS,)) for _ in range(2)]
    return cute.compile(start, *tensors, make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")


def run(name: str) -> None:
    """Launch one of `KERNELS` and wait for it, whatever becomes of it: what it did is for the tool to say."""
    source = torch.empty(THREADS, device="cuda")
    if name != "unwritten":
        source.copy_(torch.ones(THREADS))
    compile_plant(name)(source, torch.empty(THREADS, device="cuda"))
    torch.cuda.synchronize()
