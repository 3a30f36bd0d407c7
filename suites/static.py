"""What kernels compile to, for architectures that need not be there: registers, spills, pinned arithmetic, atomics."""

from __future__ import annotations

import shlex

import pytest

from csa_gate._static import ARCHS, probe
from csa_gate._static_cubin import find_cuobjdump
from csa_gate._static_probe import Which
from csa_gate.fixtures.marks import L0, L1, clause

from .base import Gate, GateSuite

_COMPILATIONS = [
    pytest.param("sm_90a", "sample", id="sm_90a-sample", marks=L0),
    *(pytest.param(arch, "representative", id=arch, marks=L1) for arch in ARCHS),
]


class StaticSuite(GateSuite):
    """Kernels that offer `compile_for(arch)`: a few of them here, all of them in `python -m csa_gate static`."""

    @clause("static")
    @pytest.mark.parametrize(("arch", "which"), _COMPILATIONS)
    def test_compiled(self, gate: Gate, arch: str, which: Which) -> None:
        """The compiler takes a process of its own for each architecture, and that process loads the kernel."""
        if not callable(getattr(gate.kernel, "compile_for", None)):
            pytest.skip(f"{gate.kernel.name} has no method compile_for(arch)")
        if not gate.loadable:
            pytest.skip(f"{gate.kernel.name} is made by a fixture, which the compiler's process does not have")
        try:
            find_cuobjdump()
        except ValueError as missing:
            pytest.skip(str(missing))
        probed = probe(arch, gate.loadable, which=which)
        faults = [f"{row.name}: {fault}" for row in probed.rows for fault in row.faults] + list(probed.faults)
        if not faults and not probed.rows:
            faults = [f"compile_for({arch!r}) gave nothing to look at"]
        if faults:
            command = f"python -m csa_gate static --kernel {shlex.quote(gate.loadable)} --arch {arch}"
            head = f"contract broken: static\nkernel {gate.loadable}, architecture {arch}"
            raise AssertionError("\n".join([head, *faults, f"reproduce: {command}"]))
