"""Golden vectors: portable bits written down once, and the values that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
import torch

from csa_gate.fixtures.golden import Vector, digests, load, names
from csa_gate.fixtures.kernels import refusal
from csa_gate.fixtures.marks import L0, L1, clause
from csa_gate.fixtures.relate import VALUES
from csa_gate.oracles import Result

from .base import Gate, GateSuite

T = TypeVar("T")

_BITS = [pytest.param(name, marks=clause(name)) for name in VALUES]
_LATER = ("middle", "long")  # nearly every case has a shape of its own, and so is compiled for itself
_VECTORS = [pytest.param(name, marks=L1 if name in _LATER else L0) for name in names(digests=False)]
_DIGESTS = [pytest.param(name, marks=L1) for name in names(digests=True)]


class Runs(Generic[T]):
    """The vectors of one file, each run once for the tests of all clauses; `keep` says what is kept of a result."""

    def __init__(self, file: str, keep: Callable[[Result], T]) -> None:
        self._file, self._keep = file, keep
        self._done: dict[tuple[str, torch.device], list[tuple[Vector, T]]] = {}

    def of(self, gate: Gate) -> list[tuple[Vector, T]]:
        """Those that the kernel takes; skips the test if there are none."""
        vectors = load(self._file)
        key = (gate.kernel.name, gate.device)  # a fixture may make a new kernel for each test
        if key not in self._done:
            taken = [vector for vector in vectors if refusal(gate.kernel, vector.inputs.problem) is None]
            self._done[key] = [(v, self._keep(gate.run(v.inputs.to(gate.device)))) for v in taken]
        if not self._done[key]:
            gate.require(vectors[0].inputs.problem)
        return self._done[key]


class GoldenSuite(GateSuite):
    """The files of `csa_gate.fixtures.vectors`; their README has the format."""

    @pytest.fixture(scope="class", params=_VECTORS)
    @staticmethod
    def vectors(request: pytest.FixtureRequest) -> Runs[Result]:
        """One file of vectors."""
        return Runs(request.param, lambda result: result)

    @pytest.fixture(scope="class", params=_DIGESTS)
    @staticmethod
    def digested(request: pytest.FixtureRequest) -> Runs[dict[str, str]]:
        """One file of digests."""
        return Runs(request.param, digests)

    @pytest.mark.parametrize("name", _BITS)
    def test_vectors(self, gate: Gate, vectors: Runs[Result], name: str) -> None:
        _require_portable(gate, name)
        for vector, got in vectors.of(gate):
            assert vector.portable is not None
            want, what = vector.portable.to(gate.device), f"against golden vector {vector.id}"
            gate.same(name, vector.inputs.to(gate.device), want, got, what, outputs=VALUES[name])

    @clause("error_bound")
    def test_exact_values(self, gate: Gate, vectors: Runs[Result]) -> None:
        for vector, got in vectors.of(gate):
            assert vector.exact is not None
            want, what = vector.exact.to(gate.device), f"against the exact values of golden vector {vector.id}"
            gate.near("error_bound", vector.inputs.to(gate.device), want, got, what)

    @pytest.mark.parametrize("name", _BITS)
    def test_digests(self, gate: Gate, digested: Runs[dict[str, str]], name: str) -> None:
        _require_portable(gate, name)
        for vector, got in digested.of(gate):
            wrong = [output for output in VALUES[name] if got[output] != vector.digests[output]]
            if wrong:
                inputs = vector.inputs.to(gate.device)
                gate.judge(inputs, gate.run(inputs), name)
                what = f"{vector.id}: the digest of {', '.join(wrong)} is another one"
                pytest.fail(f"contract broken: {name}\n{what}, though `ordered` agrees here\nreproduce: {gate.command}")


def _require_portable(gate: Gate, name: str) -> None:
    if getattr(gate.contract, name) != "portable":
        pytest.skip(f"{name} here are those of {getattr(gate.contract, name)}: no golden vector has them")
