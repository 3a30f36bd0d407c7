"""Size: a million tokens, tens of thousands of segments, wide rows, and all that flat int32 offsets reach."""

from __future__ import annotations

import pytest
import torch

from csa_gate.fixtures.cases import SCALE
from csa_gate.fixtures.vast import VAST, Vast
from csa_gate.oracles import Inputs, Result

from .base import Gate, GateSuite, Trial, clauses, each, each_distribution

OF_SIZE = ("forward_bits", "gradient_bits", "dape_bits", "error_bound", "zero_slots")
OF_SEGMENTS = ("forward_bits", "gradient_bits", "zero_slots")


class VastTrial:
    """One problem, run once for the tests of all its clauses; of its result the judged segments are kept."""

    def __init__(self, vast: Vast) -> None:
        self.vast = vast
        self._done: dict[tuple[str, torch.device], tuple[Inputs, Result]] = {}

    def run(self, gate: Gate) -> tuple[Inputs, Result]:
        """Inputs and outputs of the judged segments. Skips the test where there is no device that large."""
        gate.require_cuda()
        gate.require(self.vast.problem)
        key = (gate.kernel.name, gate.device)
        if key not in self._done:
            torch.cuda.empty_cache()
            free, need = torch.cuda.mem_get_info(gate.device)[0], self.vast.device_bytes
            if free < need:
                pytest.skip(f"needs {need >> 30} GiB of free device memory, there are {free >> 30}")
            whole, part = self.vast.inputs(gate.device)
            self._done[key] = part, self.vast.cut(gate.run(whole))
            del whole
            torch.cuda.empty_cache()
        return self._done[key]


class ScaleSuite(GateSuite):
    """Nothing that overflows but with size."""

    @pytest.fixture(scope="class", params=each_distribution(SCALE))
    @staticmethod
    def large(request: pytest.FixtureRequest) -> Trial:
        """One large problem, judged whole."""
        return Trial(*request.param)

    @pytest.fixture(scope="class", params=each(VAST))
    @staticmethod
    def vast(request: pytest.FixtureRequest) -> VastTrial:
        """One problem of which a few segments are judged."""
        return VastTrial(request.param)

    @pytest.mark.parametrize("name", clauses(OF_SIZE))
    def test_size(self, gate: Gate, large: Trial, name: str) -> None:
        gate.judge(*large.run(gate), name)

    @pytest.mark.parametrize("name", clauses(OF_SEGMENTS))
    def test_flat_offsets(self, gate: Gate, vast: VastTrial, name: str) -> None:
        """Segments among filler have the bits that they have alone."""
        if name == "forward_bits" and not gate.same_order(vast.vast.problem, vast.vast.part):
            pytest.skip("the number of rows sets the order of the pooling sum")
        gate.judge(*vast.run(gate), name)
