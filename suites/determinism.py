"""The same inputs give the same bits: whatever the buffers held, wherever they lie, however calls are queued."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from csa_gate._another_process import in_other_processes
from csa_gate.fixtures.callers import CALLERS
from csa_gate.fixtures.canary import Snapshot
from csa_gate.fixtures.cases import CALLED, DETERMINISM, THREADS, Case
from csa_gate.fixtures.marks import L1, clause
from csa_gate.fixtures.replay import launch, launch_together
from csa_gate.fixtures.run import Buffers
from csa_gate.oracles import Result

from .base import Gate, GateSuite, each

_PAIRS = {"cpu": 8, "cuda": 1000}  # races between launches, of which a CPU has none, are rare events
_TOGETHER = {"cpu": 200, "cuda": 100}  # calls of each of four threads
_PROCESSES = 3
_BOTH = [pytest.param(name, marks=clause(name)) for name in ("deterministic", "dape_deterministic")]


class DeterminismSuite(GateSuite):
    """Run to run."""

    @pytest.mark.parametrize("name", _BOTH)
    @pytest.mark.parametrize("case", each(DETERMINISM))
    def test_run_to_run(self, gate: Gate, case: Case, name: str) -> None:
        inputs = gate.inputs(case)
        want = gate.run(inputs)
        kept = []  # so that each run has its buffers and workspaces elsewhere
        for number, poison in enumerate(("zero", "inf", "random", "ones"), start=2):
            kept.append(torch.full((number * 12345,), float("nan"), device=gate.device))
            got = gate.run(inputs, poison=poison, seed=number)
            gate.same(name, inputs, want, got, f"run {number} (buffers held {poison}) against run 1")

    @pytest.mark.parametrize("name", _BOTH)
    @pytest.mark.parametrize("case", each(THREADS))
    def test_threads(self, gate: Gate, case: Case, name: str) -> None:
        """Threads of a CPU may share a call out, evenly or not; run by xdist, there would be only one."""
        if gate.device.type != "cpu":
            pytest.skip("needs a kernel on the CPU: its threads have no share in a GPU's work")
        inputs = gate.inputs(case)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            want = gate.run(inputs)
            for threads in (2, 3, 8):
                torch.set_num_threads(threads)
                gate.same(name, inputs, want, gate.run(inputs), f"on {threads} threads against one")
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("name", _BOTH)
    @pytest.mark.parametrize("caller", CALLERS)
    @pytest.mark.parametrize("case", each(c for c in DETERMINISM if c.id in CALLED))
    def test_caller(self, gate: Gate, case: Case, caller: str, name: str) -> None:
        """As a framework calls a kernel: in the modes that torch has, and from a thread of autograd's."""
        inputs = gate.inputs(case)
        got = gate.run(inputs, called=CALLERS[caller])
        gate.same(name, inputs, gate.run(inputs), got, f"called {caller} against a plain call")

    @pytest.mark.parametrize("name", _BOTH)
    @pytest.mark.parametrize("case", each(c for c in DETERMINISM if c.id in CALLED))
    def test_together(self, gate: Gate, case: Case, name: str) -> None:
        """Calls from several threads at once, two by two with the same inputs: none sees what another has in hand."""
        several = [gate.inputs(case), gate.inputs(replace(case, seed=case.seed + 1))]
        wants, kept = [gate.run(inputs) for inputs in several], [Snapshot(inputs) for inputs in several]
        done = launch_together(gate.kernel, [*several, *several], _TOGETHER[gate.device.type])
        for number, results in enumerate(done):
            inputs, want = several[number % 2], wants[number % 2]
            for got in results:
                gate.same(name, inputs, want, got, f"in one of {len(done)} threads against a call alone")
        for snapshot in kept:
            gate.intact(snapshot)

    @L1
    @pytest.mark.parametrize("name", _BOTH)
    @pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in DETERMINISM if c.id == CALLED[0]])
    def test_another_process(self, gate: Gate, case: Case, name: str) -> None:
        """What a kernel chooses once a process, by timing say, changes no bit."""
        if not gate.loadable:
            pytest.skip(f"{gate.kernel.name} is made by a fixture, which another process does not have")
        inputs = gate.inputs(case)
        want = gate.run(inputs)
        for number, got in enumerate(in_other_processes(gate.loadable, case.id, gate.device, _PROCESSES), start=1):
            gate.same(name, inputs, want, got, f"in another process, the {number}. of {_PROCESSES}, against this one")

    @L1
    @pytest.mark.parametrize("name", _BOTH)
    @pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in DETERMINISM if c.problem.tokens < 4096])
    def test_back_to_back(self, gate: Gate, case: Case, name: str) -> None:
        """Forward and backward pairs queued without waiting in between."""
        inputs = gate.inputs(case)
        want = gate.run(inputs)
        pairs = _PAIRS[gate.device.type]
        blank = Buffers(case.problem, gate.device).result
        stacks = {name: tensor.expand(pairs, *tensor.shape).clone() for name, tensor in blank.items()}
        results = [Result(**{name: stack[i] for name, stack in stacks.items()}) for i in range(pairs)]
        for result in results:
            launch(gate.kernel, inputs, result)
        for number, got in enumerate(results, start=1):
            gate.same(name, inputs, want, got, f"pair {number} of {pairs} queued at once against a run alone")
