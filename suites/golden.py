"""Golden vectors: portable bits written down once, and the values that are right."""

from __future__ import annotations

import pytest

from csa_gate.fixtures.golden import Vector, digest, load, names
from csa_gate.fixtures.kernels import refusal
from csa_gate.fixtures.marks import L0, L1, clause
from csa_gate.fixtures.relate import VALUES

from .base import Gate, GateSuite

_BITS = [pytest.param(name, marks=clause(name)) for name in VALUES]


class GoldenSuite(GateSuite):
    """The files of `csa_gate.fixtures.vectors`; their README has the format."""

    @L0
    @pytest.mark.parametrize("name", _BITS)
    @pytest.mark.parametrize("file", names(digests=False))
    def test_vectors(self, gate: Gate, file: str, name: str) -> None:
        for vector in _taken(gate, file, name):
            inputs = vector.inputs.to(gate.device)
            assert vector.portable is not None
            want, what = vector.portable.to(gate.device), f"against golden vector {vector.id}"
            gate.same(name, inputs, want, gate.run(inputs), what, outputs=VALUES[name])

    @L0
    @clause("error_bound")
    @pytest.mark.parametrize("file", names(digests=False))
    def test_exact_values(self, gate: Gate, file: str) -> None:
        """Kernels of other bits too: twice the bound, since the value written down is rounded as well."""
        for vector in _taken(gate, file, "error_bound"):
            inputs = vector.inputs.to(gate.device)
            assert vector.exact is not None
            want, what = vector.exact.to(gate.device), f"against the exact values of golden vector {vector.id}"
            gate.near("error_bound", inputs, want, gate.run(inputs), what)

    @L1
    @pytest.mark.parametrize("name", _BITS)
    @pytest.mark.parametrize("file", names(digests=True))
    def test_digests(self, gate: Gate, file: str, name: str) -> None:
        for vector in _taken(gate, file, name):
            inputs = vector.inputs.to(gate.device)
            result = gate.run(inputs)
            wrong = [o for o in VALUES[name] if digest(getattr(result, o)) != vector.digests[o]]
            if wrong:
                gate.judge(inputs, result, name)
                pytest.fail(f"{vector.id}: {', '.join(wrong)} has another digest, though `ordered` agrees with it here")


def _taken(gate: Gate, file: str, name: str) -> list[Vector]:
    """The vectors of a file that the kernel takes; skips the test if there are none, or other bits are claimed."""
    if name in VALUES and getattr(gate.contract, name) != "portable":
        pytest.skip(f"{name} of the kernel are those of another reference")
    vectors = load(file)
    taken = [vector for vector in vectors if refusal(gate.kernel, vector.inputs.problem) is None]
    if not taken:
        pytest.skip(f"no vector is taken: {refusal(gate.kernel, vectors[0].inputs.problem)}")
    return taken
