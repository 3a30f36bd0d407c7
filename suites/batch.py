"""A segment's rows and gradients do not depend on what else is in the pack, nor where it stands there."""

from __future__ import annotations

import pytest

from csa_gate.fixtures.cases import BATCH, Case
from csa_gate.fixtures.derive import part, select, spans
from csa_gate.fixtures.marks import clause
from csa_gate.oracles import Inputs, Result

from .base import Gate, GateSuite, each

MAX_ALONE = 12
"""Segments of one pack that are run alone."""


class BatchSuite(GateSuite):
    """Segments against their pack."""

    @clause("batch_invariance")
    @pytest.mark.parametrize("case", each(BATCH))
    def test_alone(self, gate: Gate, case: Case) -> None:
        pack = gate.inputs(case)
        got = gate.run(pack)
        for segment in range(min(MAX_ALONE, len(case.problem.lens))):
            alone = select(pack, [segment])
            _compare(gate, pack, got, segment, alone, gate.run(alone), 0, "in the pack against alone")

    @clause("batch_invariance")
    @pytest.mark.parametrize("case", each(BATCH))
    def test_reversed(self, gate: Gate, case: Case) -> None:
        pack = gate.inputs(case)
        got = gate.run(pack)
        order = range(len(case.problem.lens))[::-1]
        other = select(pack, order)
        want = gate.run(other)
        for place, segment in enumerate(order):
            _compare(gate, pack, got, segment, other, want, place, "in the pack against the pack reversed")

    @clause("batch_invariance")
    @pytest.mark.parametrize("case", each(c for c in BATCH if 0 in c.problem.lens))
    def test_empty_neighbours(self, gate: Gate, case: Case) -> None:
        pack = gate.inputs(case)
        got = gate.run(pack)
        filled = [s for s, length in enumerate(case.problem.lens) if length]
        other = select(pack, filled)
        want = gate.run(other)
        for place, segment in enumerate(filled):
            _compare(gate, pack, got, segment, other, want, place, "among empty segments against without them")


def _compare(
    gate: Gate, pack: Inputs, got: Result, segment: int, other: Inputs, want: Result, place: int, what: str
) -> None:
    """Hold segment `segment` of `got` to segment `place` of `want`."""
    rows, tokens = spans(pack.problem, segment)
    outputs = ["grad_kv", "grad_score"]
    if gate.same_order(pack.problem, other.problem):
        outputs.append("out")
    want = part(want, *spans(other.problem, place))
    what = f"segment {segment} {what}"
    gate.same("batch_invariance", pack, want, got, what, outputs=outputs, rows=rows, tokens=tokens)
