"""Values: every clause that one result shows, over shapes, distributions and packs of documents."""

from __future__ import annotations

import pytest

from csa_gate.fixtures.cases import NUMERICS, PACKS
from csa_gate.fixtures.schedules import SCHEDULES
from csa_gate.oracles.judge import SINGLE_RESULT

from .base import Gate, GateSuite, Trial, clauses, each_distribution

OF_VALUES = ("forward_bits", "gradient_bits", "dape_bits", "error_bound", "dape_accuracy", "nonfinite")
OF_SCHEDULES = ("forward_bits", "gradient_bits", "dape_bits", "error_bound", "zero_slots")


class NumericsSuite(GateSuite):
    """A kernel's values. The fixtures are of class scope so that pytest runs the tests of one result in a row."""

    @pytest.fixture(scope="class", params=each_distribution(NUMERICS))
    @staticmethod
    def trial(request: pytest.FixtureRequest) -> Trial:
        """One problem with one distribution."""
        return Trial(*request.param)

    @pytest.fixture(scope="class", params=each_distribution(PACKS))
    @staticmethod
    def pack(request: pytest.FixtureRequest) -> Trial:
        """One batch of documents."""
        return Trial(*request.param)

    @pytest.fixture(scope="class", params=each_distribution(SCHEDULES))
    @staticmethod
    def edge(request: pytest.FixtureRequest) -> Trial:
        """One problem at the edge of a schedule."""
        return Trial(*request.param)

    @pytest.mark.parametrize("name", clauses(OF_VALUES))
    def test_values(self, gate: Gate, trial: Trial, name: str) -> None:
        problem, bits = trial.case.problem, {"forward_bits": gate.contract.forward_bits}
        bits["gradient_bits"] = gate.contract.gradient_bits
        if bits.get(name) == "eager" and problem.head_dim == 1 and gate.device.type == "cuda":
            pytest.skip("head_dim 1: torch takes another softmax kernel on CUDA, whose order is not specified")
        gate.judge(*trial.run(gate), name)

    @pytest.mark.parametrize("name", clauses(OF_SCHEDULES))
    def test_schedule(self, gate: Gate, edge: Trial, name: str) -> None:
        gate.judge(*edge.run(gate), name)

    @pytest.mark.parametrize("name", clauses(tuple(c for c in SINGLE_RESULT if c != "row_padding")))
    def test_pack(self, gate: Gate, pack: Trial, name: str) -> None:
        gate.judge(*pack.run(gate), name)
