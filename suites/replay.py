"""One memory, many calls: buffers and inputs that were something else before, in eager calls and in CUDA graphs."""

from __future__ import annotations

import pytest

from csa_gate.fixtures.cases import SHORTER, TURNS, Turns
from csa_gate.fixtures.marks import clause
from csa_gate.fixtures.replay import Graph, Stage
from csa_gate.fixtures.run import Buffers, run_backward, run_forward

from .base import Gate, GateSuite, each


class ReplaySuite(GateSuite):
    """A kernel that remembers anything by pointer or by shape fails here."""

    @clause("replay")
    @pytest.mark.parametrize("turns", each(SHORTER))
    def test_shorter_call(self, gate: Gate, turns: Turns) -> None:
        """Outputs go to the beginning of what an earlier, longer call left."""
        first = gate.inputs(turns.cases[0])
        plain = first, gate.run(first)
        buffers = Buffers(first.problem, gate.device)
        for case in turns.cases:
            inputs = gate.inputs(case)
            want = gate.run(inputs)
            got = gate.run(inputs, buffers=buffers.narrow(case.problem))
            what = f"{case.id} in used buffers against fresh ones"
            gate.hold("replay", inputs, got, what, plain=plain, want=want)

    @clause("replay")
    @pytest.mark.parametrize("turns", each(TURNS))
    def test_same_tensors(self, gate: Gate, turns: Turns) -> None:
        """Data and offsets change in place, all shapes stay."""
        first = gate.inputs(turns.cases[0])
        plain = first, gate.run(first)
        stage, buffers = Stage(first), Buffers(first.problem, gate.device)
        for case in turns.cases:
            inputs = gate.inputs(case)
            want = gate.run(inputs)
            staged = stage.load(inputs)
            got = gate.run(staged, buffers=buffers.narrow(case.problem))
            what = f"{case.id!r} in used tensors against fresh ones"
            gate.hold("replay", staged, got, what, plain=plain, want=want)

    @clause("replay")
    @pytest.mark.parametrize("turns", each(TURNS))
    def test_interleaved(self, gate: Gate, turns: Turns) -> None:
        """Backwards before any forward, and after those of others, as with microbatches: a call has all it needs."""
        cases = (turns.cases[0], *turns.cases)  # the first once more, for its backward to come early
        several = [gate.inputs(case) for case in cases]
        wants = [gate.run(inputs) for inputs in several]
        buffers = [Buffers(inputs.problem, gate.device) for inputs in several]
        run_backward(gate.kernel, several[0], buffers[0])
        for inputs, room in zip(several, buffers, strict=True):
            run_forward(gate.kernel, inputs, room)
        for inputs, room in zip(several[1:], buffers[1:], strict=True):
            run_backward(gate.kernel, inputs, room)
        for case, inputs, room, want in zip(cases, several, buffers, wants, strict=True):
            what = f"{case.id!r}: forwards of all, then backwards of all, against one after the other"
            gate.hold("replay", inputs, room.result, what, plain=(several[0], wants[0]), want=want)


class GraphSuite(GateSuite):
    """A CUDA graph, captured after one warm-up."""

    @clause("graph_replay")
    @pytest.mark.parametrize("captured", ["many", "few"])
    @pytest.mark.parametrize("turns", each(TURNS))
    def test_graph(self, gate: Gate, turns: Turns, captured: str) -> None:
        """Other data, lengths and numbers of rows than were captured, at the capacity captured."""
        gate.require_cuda()
        first = next(case for case in turns.cases if case.id == captured)
        graph = Graph(gate.kernel, gate.inputs(first))
        for number, case in enumerate(turns.cases):
            inputs = gate.inputs(case)
            want = gate.run(inputs)
            poison = ("nan", "random", "aa")[number % 3]
            staged, got = graph.replay(inputs, poison=poison, seed=number)
            what = f"{case.id!r} replayed in a graph captured with {captured!r}, against an eager call"
            gate.hold("graph_replay", staged, got, what, plain=(inputs, want), want=want)
