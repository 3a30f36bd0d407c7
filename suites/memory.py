"""Nothing is written outside the outputs, no input changes, and buffers may lie anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import pytest

from csa_gate.fixtures.canary import Around, GuardedInputs
from csa_gate.fixtures.cases import MEMORY, OFFSETS, Case
from csa_gate.fixtures.marks import L1, clause
from csa_gate.oracles import Inputs, Result

from .base import Gate, GateSuite, each

_READ, _WRITTEN = ("kv", "score", "ape", "grad_out"), ("out", "grad_kv", "grad_score", "grad_ape")
_OFFSETS = ("cu_seqlens", "cu_seqlens_comp")
_SHIFTS: dict[str, dict[str, int]] = {
    "inputs": dict.fromkeys((*_READ, *_OFFSETS), 1),
    "outputs": dict.fromkeys(_WRITTEN, 1),
}
_SHIFTS["both"] = _SHIFTS["inputs"] | _SHIFTS["outputs"]
_FINER = {name: {name: 1} for name in (*_READ, *_OFFSETS, *_WRITTEN)}
_FINER |= {f"all-by-{count}": dict.fromkeys((*_READ, *_OFFSETS, *_WRITTEN), count) for count in (2, 4, 8, 16, 32)}
_SHIFTED = [case for case in MEMORY if case.id in OFFSETS]


class MemorySuite(GateSuite):
    """Buffers of exactly the right size between guards; every run of every other theme is watched as well."""

    @clause("memory")
    @pytest.mark.parametrize("poison", ["nan", "aa"])
    @pytest.mark.parametrize("case", each(MEMORY))
    def test_guards(self, gate: Gate, case: Case, poison: str) -> None:
        gate.run(gate.inputs(case), poison=poison)

    @clause("memory")
    @pytest.mark.parametrize("around", get_args(Around))
    @pytest.mark.parametrize("case", each(MEMORY))
    def test_around_inputs(self, gate: Gate, case: Case, around: Around) -> None:
        """What lies around the inputs is not written, and if it is read makes no difference."""
        plain = gate.inputs(case)
        inputs, got = _guarded(gate, plain, {}, around)
        gate.hold("memory", inputs, got, f"with {around} values around its inputs", plain=(plain, gate.run(plain)))

    @clause("memory")
    @pytest.mark.parametrize("side", _SHIFTS)
    @pytest.mark.parametrize("case", each(_SHIFTED))
    def test_storage_offset(self, gate: Gate, case: Case, side: str) -> None:
        """Contiguous views one element into their storage: no base address has more than its dtype's alignment."""
        _hold_shifted(gate, case, _SHIFTS[side])

    @L1
    @clause("memory")
    @pytest.mark.parametrize("which", _FINER)
    @pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in _SHIFTED])
    def test_single_offset(self, gate: Gate, case: Case, which: str) -> None:
        """One tensor alone, whose address a kernel may take for like the others'; all of them, but not by one."""
        _hold_shifted(gate, case, _FINER[which])


def _hold_shifted(gate: Gate, case: Case, shift: Mapping[str, int]) -> None:
    plain = gate.inputs(case)
    inputs, got = _guarded(gate, plain, shift, "odd")
    what = "with " + ", ".join(f"{name} {count} elements off its alignment" for name, count in shift.items())
    gate.hold("memory", inputs, got, what, plain=(plain, gate.run(plain)))


def _guarded(gate: Gate, inputs: Inputs, shift: Mapping[str, int], around: Around) -> tuple[Inputs, Result]:
    guarded = GuardedInputs(inputs, shift, around)
    got = gate.run(guarded.inputs, offset=shift)
    gate.intact(guarded)
    return guarded.inputs, got
