"""Wrappers and classes on a CUDA device: explicit streams, no waiting and no allocation, capture in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from csa_gate.fused import (
    CSACompressorBackward,
    CSACompressorForward,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from csa_gate.oracles import Inputs, Problem, Result, make_inputs, ordered
from csa_gate.oracles.bits import bit_pattern

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROBLEM = Problem((9, 0, 3, 14), ratio=4, coff=2, head_dim=8, row_capacity=7, token_capacity=28)
# Ratios that no other test uses, so that nothing is compiled for them yet.
CAPTURED = Problem((9, 0, 3, 14), ratio=6, coff=2, head_dim=8, row_capacity=7, token_capacity=28)
UNCOMPILED = Problem((14,), ratio=7, coff=1, head_dim=8)


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.kv, inputs.score, inputs.ape, inputs.cu_seqlens, inputs.cu_seqlens_comp


def specified(inputs: Inputs) -> Result:
    return ordered(inputs, exp="native")


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bit_pattern(a), bit_pattern(b))


def _handles(stream: torch.cuda.Stream) -> dict[str, Any]:
    from cuda.bindings import driver

    return {"torch": stream, "integer": stream.cuda_stream, "driver": driver.CUstream(stream.cuda_stream)}


@pytest.mark.parametrize("kind", ["torch", "integer", "driver"])
def test_explicit_stream(kind: str) -> None:
    """The work runs on the stream named, and memory freed meanwhile is not handed out before it is done."""
    inputs = make_inputs(PROBLEM, device="cuda")
    want = specified(inputs)
    side = torch.cuda.Stream()
    stream = _handles(side)[kind]
    # Afterwards nothing waits for the device any more, be it to compile or to allocate.
    csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=7, stream=stream)
    csa_compressor_backward_wrapper(*tensors_of(inputs), inputs.grad_out, stream=stream)
    tensors = [t.clone() for t in (*tensors_of(inputs), inputs.grad_out)]
    shapes = [(t.shape, t.dtype) for t in tensors]
    for shape, dtype in shapes:  # loads torch's kernels, which waits for the device too
        torch.zeros(shape, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    (out,) = csa_compressor_forward_wrapper(*tensors[:5], total_comp=7, stream=stream)
    gradients = csa_compressor_backward_wrapper(*tensors, stream=stream)
    tensors.clear()
    tensors += [torch.zeros(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "nothing was left to wait for"
    torch.cuda.current_stream().wait_stream(side)
    assert same(out, want.out)
    assert all(same(gradient, getattr(want, name)) for name, gradient in gradients.items())


@pytest.mark.parametrize("handle", [0, 1])
def test_default_stream(handle: int) -> None:
    """Both handles of the legacy default stream are torch's default stream."""
    inputs = make_inputs(PROBLEM, device="cuda")
    (out,) = csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=7, stream=handle)
    assert same(out, specified(inputs).out)


@pytest.mark.parametrize(
    ("stream", "text"), [(2, "stream: got the per-thread default stream"), ("side", "stream: got 'side', need a")]
)
def test_bad_stream(stream: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        csa_compressor_forward_wrapper(*tensors_of(make_inputs(PROBLEM, device="cuda")), total_comp=7, stream=stream)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_synchronisation_nor_allocation() -> None:
    """With total_comp named, forward allocates out, backward the gradients and one workspace, and nothing waits."""
    inputs = make_inputs(PROBLEM, device="cuda")
    calls: list[tuple[Callable[[], Any], int]] = [
        (lambda: csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=7), 1),
        (lambda: csa_compressor_backward_wrapper(*tensors_of(inputs), inputs.grad_out), 4),
    ]
    for call, allocations in calls:
        call()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == allocations


def test_capture_after_compile() -> None:
    """`compile` alone makes a capture safe; replays follow new data, other lengths and fewer rows."""
    inputs = make_inputs(CAPTURED, device="cuda")
    tensors = [t.clone() for t in (*tensors_of(inputs), inputs.grad_out)]
    out = torch.full_like(inputs.grad_out, float("nan"))
    buffers = {f"grad_{name}": torch.full_like(getattr(inputs, name), float("nan")) for name in ("kv", "score", "ape")}
    forward = CSACompressorForward(*tensors[:5], out, ratio=6)
    backward = CSACompressorBackward(*tensors[:5], out, ratio=6)
    forward.compile()
    backward.compile()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward.execute(*tensors[:5], out)
        backward.execute(*tensors, **buffers)
    for lens in ((9, 0, 3, 14), (6, 1, 0, 7), (28, 0, 0, 0)):
        other = make_inputs(Problem(lens, 6, 2, 8, row_capacity=7, token_capacity=28), 1, device="cuda")
        for tensor, new in zip(tensors, (*tensors_of(other), other.grad_out), strict=True):
            tensor.copy_(new)
        graph.replay()
        want = specified(other)
        assert same(out, want.out)
        assert all(same(buffer, getattr(want, name)) for name, buffer in buffers.items())


def test_compiling_under_capture() -> None:
    """What cannot be captured raises RuntimeError, and the capture goes on."""
    inputs, other = make_inputs(PROBLEM, device="cuda"), make_inputs(UNCOMPILED, device="cuda")
    csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="capture"):
            csa_compressor_forward_wrapper(*tensors_of(other), ratio=7, coff=1, total_comp=2)
        with pytest.raises(RuntimeError, match="total_comp: got None under CUDA graph capture"):
            csa_compressor_forward_wrapper(*tensors_of(inputs))
        (out,) = csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=7)
    graph.replay()
    assert same(out, specified(inputs).out)
    (later,) = csa_compressor_forward_wrapper(*tensors_of(other), ratio=7, coff=1, total_comp=2)
    assert same(later, specified(other).out)
