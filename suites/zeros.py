"""Gradients of slots that no row consumes: exact +0 over whatever the buffers held, and nothing of what is in them."""

from __future__ import annotations

import pytest

from csa_gate.fixtures.cases import ZERO_SLOTS, Case
from csa_gate.fixtures.derive import fill_unconsumed
from csa_gate.fixtures.marks import clause

from .base import Gate, GateSuite, each


class ZeroSlotsSuite(GateSuite):
    """Zero slots, class by class."""

    @clause("zero_slots")
    @pytest.mark.parametrize("poison", ["nan", "inf", "aa", "random"])
    @pytest.mark.parametrize("case", each(ZERO_SLOTS))
    def test_zero_slots(self, gate: Gate, case: Case, poison: str) -> None:
        inputs = gate.inputs(case)
        gate.judge(inputs, gate.run(inputs, poison=poison), "zero_slots", poison=poison)

    @pytest.mark.parametrize("fill", ["nan", "inf"])
    @pytest.mark.parametrize("name", [pytest.param(c, marks=clause(c)) for c in ("zero_slots", "nonfinite")])
    @pytest.mark.parametrize("case", each(ZERO_SLOTS))
    def test_unconsumed_values(self, gate: Gate, case: Case, name: str, fill: str) -> None:
        """Inf and NaN in slots of kv and score that no row consumes come out nowhere."""
        inputs = fill_unconsumed(gate.inputs(case), fill)
        gate.judge(inputs, gate.run(inputs), name)
