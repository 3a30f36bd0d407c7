"""Relations between runs, over problems that hypothesis draws, and shrinks where one is broken.

`HYPOTHESIS_PROFILE=nightly` draws many, of other shapes too, anew each time; else each test draws the same few every
time. Other profiles are other tests' business.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
import zlib
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

from csa_gate.fixtures.cases import Case
from csa_gate.fixtures.drawn import FAMILIES, Family, Shape, cases, draw_shape
from csa_gate.fixtures.kernels import refusal
from csa_gate.fixtures.marks import L0, L1, clause
from csa_gate.fixtures.relate import Relation
from csa_gate.fixtures.relations import RELATIONS

from .base import Gate, GateSuite

QUICK = hypothesis.settings(
    max_examples=12,
    deadline=None,  # the first of a shape is compiled
    database=None,
    derandomize=True,
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=(hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.nested_given),
)
NIGHTLY = hypothesis.settings(QUICK, max_examples=500, derandomize=False)
NIGHTLY_SHAPES = 12  # drawn for each family, once in each process; half a second each to compile

_FAMILIES = [pytest.param(f, id=f.name, marks=L0 if f.name == "short" else L1) for f in FAMILIES]
_RELATIONS = [
    pytest.param(relation, name, id=f"{relation.name}-{name}", marks=clause(name))
    for relation in RELATIONS
    for name in relation.clauses
]


class PropertySuite(GateSuite):
    """Every relation under every clause that implies it."""

    @pytest.mark.parametrize("family", _FAMILIES)
    @pytest.mark.parametrize(("relation", "name"), _RELATIONS)
    def test_property(self, gate: Gate, relation: Relation, name: str, family: Family) -> None:
        __tracebackhide__ = True
        nightly = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
        judged, refused = 0, "no problem was drawn in which it has something to look at"

        @hypothesis.given(cases((*family.shapes, *_other_shapes(family)) if nightly else family.shapes))
        def trial(case: Case) -> None:
            nonlocal judged, refused
            reason = refusal(gate.kernel, case.problem)
            if reason is None:
                judged += gate.relate(relation, case, name)
            else:
                refused = reason

        if not nightly:
            trial = hypothesis.seed(zlib.crc32(f"{relation.name} {name} {family.name}".encode()))(trial)
        with _no_files():
            (NIGHTLY if nightly else QUICK)(trial)()
        if not judged:
            pytest.skip(refused)


@functools.cache
def _other_shapes(family: Family) -> tuple[Shape, ...]:
    rng = random.SystemRandom()
    return tuple(draw_shape(rng.randint, family) for _ in range(NIGHTLY_SHAPES))


@contextlib.contextmanager
def _no_files() -> Iterator[None]:
    """Keep hypothesis, which notes the constants of the modules that it sees, out of the current folder."""
    before = storage_directory(intent_to_write=False).home_directory
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(before)
