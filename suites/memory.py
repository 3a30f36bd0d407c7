"""Nothing is written outside the outputs, no input changes, and buffers may lie anywhere."""

from __future__ import annotations

import pytest

from csa_gate.fixtures.canary import shift_inputs
from csa_gate.fixtures.cases import MEMORY, OFFSETS, Case
from csa_gate.fixtures.marks import clause

from .base import Gate, GateSuite, each


class MemorySuite(GateSuite):
    """Buffers of exactly the right size between guards; every run of every other theme is watched as well."""

    @clause("memory")
    @pytest.mark.parametrize("poison", ["nan", "aa"])
    @pytest.mark.parametrize("case", each(MEMORY))
    def test_guards(self, gate: Gate, case: Case, poison: str) -> None:
        gate.run(gate.inputs(case), poison=poison)

    @clause("memory")
    @pytest.mark.parametrize("side", ["inputs", "outputs", "both"])
    @pytest.mark.parametrize("case", each(c for c in MEMORY if c.id in OFFSETS))
    def test_storage_offset(self, gate: Gate, case: Case, side: str) -> None:
        """Contiguous views one element into their storage: no base address has more than its dtype's alignment."""
        aligned = gate.inputs(case)
        inputs = aligned if side == "outputs" else shift_inputs(aligned)
        got = gate.run(inputs, offset=int(side != "inputs"))
        what = f"with {side} one element off their alignment"
        gate.hold("memory", inputs, got, what, plain=(aligned, gate.run(aligned)))
