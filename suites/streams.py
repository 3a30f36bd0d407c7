"""CUDA streams and devices: work goes to the current stream of the tensors' device, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from csa_gate.fixtures.cases import TURNS, Case
from csa_gate.fixtures.marks import clause
from csa_gate.fixtures.replay import Stage, launch, side_stream
from csa_gate.fixtures.run import Buffers

from .base import Gate, GateSuite, each

_CASES = tuple(replace(turns.cases[0], id=turns.id, level=turns.level) for turns in TURNS)


class StreamsSuite(GateSuite):
    """Each test runs the kernel once before, so that what it compiles is compiled and the host stays ahead."""

    @clause("streams")
    @pytest.mark.parametrize("case", each(_CASES))
    def test_side_stream(self, gate: Gate, case: Case) -> None:
        """Inputs are produced on the stream of the call, offsets too, by work that is still queued when it comes."""
        gate.require_cuda()
        inputs = gate.inputs(case)
        want = gate.run(inputs)
        stage = Stage(inputs)
        staged, buffers = stage.load(inputs), Buffers(case.problem, gate.device)
        for tensor in stage.tensors.values():
            tensor.zero_()
        stream = _busy_stream(gate.device)
        with torch.cuda.stream(stream):
            stage.write(inputs)
            launch(gate.kernel, staged, buffers.result)
        stream.synchronize()
        what = "on a side stream against the default one"
        gate.hold("streams", staged, buffers.result, what, plain=(inputs, want), want=want)

    @clause("streams")
    @pytest.mark.parametrize("case", each(_CASES))
    def test_reused_memory(self, gate: Gate, case: Case) -> None:
        """Inputs are freed after the call and their memory gets other contents, in the order of the same stream."""
        gate.require_cuda()
        inputs = gate.inputs(case)
        want = gate.run(inputs)
        buffers = Buffers(case.problem, gate.device)
        stream = _busy_stream(gate.device)
        with torch.cuda.stream(stream):
            stage = Stage(inputs)
            staged = stage.load(inputs)
            _keep_busy(gate.device)
            launch(gate.kernel, staged, buffers.result)
            shapes = [(tensor.shape, tensor.dtype) for tensor in stage.tensors.values()]
            del stage, staged
            _ = [torch.zeros(shape, dtype=dtype, device=gate.device) for shape, dtype in shapes]
        stream.synchronize()
        what = "with inputs freed and overwritten after the call"
        gate.hold("streams", inputs, buffers.result, what, plain=(inputs, want), want=want)

    @clause("streams")
    @pytest.mark.parametrize("case", each(_CASES))
    def test_foreign_device(self, gate: Gate, case: Case) -> None:
        """Tensors lie on a device that is not the current one, and the current one stays."""
        gate.require_cuda()
        devices, current = torch.cuda.device_count(), torch.cuda.current_device()
        if devices < 2:
            pytest.skip("needs a second CUDA device")
        inputs = gate.inputs(case).to(torch.device("cuda", (current + 1) % devices))
        with torch.cuda.device(inputs.device):
            want = gate.run(inputs)
        got = gate.run(inputs)
        assert torch.cuda.current_device() == current, "the call changed the current device"
        what = "on a device that is not current against the current one"
        gate.hold("streams", inputs, got, what, plain=(inputs, want), want=want)


def _busy_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that has tens of milliseconds of work to do, ordered after all that was queued before."""
    stream = side_stream(device)
    with torch.cuda.stream(stream):
        _keep_busy(device)  # the first time, the host waits for the library to load
        torch.cuda.synchronize(device)
        _keep_busy(device)
    return stream


def _keep_busy(device: torch.device) -> None:
    matrix = torch.zeros((4096, 4096), device=device)
    for _ in range(20):
        matrix = matrix @ matrix
