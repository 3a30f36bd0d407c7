"""What every theme stands on: cases as parameters, and `Gate`, one test's kernel held to its claims."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from csa_gate._items import class_kernel, uses_common_kernel
from csa_gate.fixtures.canary import GuardedInputs, MemoryFault, Snapshot
from csa_gate.fixtures.cases import Case, Turns
from csa_gate.fixtures.kernels import Kernel, contract_on, refusal
from csa_gate.fixtures.marks import L0, L1, clause
from csa_gate.fixtures.relate import Relation, relate, same_order
from csa_gate.fixtures.run import run
from csa_gate.fixtures.vast import Vast
from csa_gate.oracles import Inputs, Problem, Result
from csa_gate.oracles.judge import check_command, compare, judge
from csa_gate.oracles.references import reference

GIVEN_SUITE = "csa_gate.suites.test_compressor"
_LEVELS = {"L0": L0, "L1": L1}


def each(table: Iterable[Case | Turns | Vast]) -> list[object]:
    """The rows of a table as parameters, with their ids and levels."""
    return [pytest.param(row, id=row.id, marks=_LEVELS[row.level]) for row in table]


def each_distribution(table: Iterable[Case]) -> list[object]:
    """(case, distribution) pairs as parameters, with the ids and levels of the cases."""
    return [
        pytest.param((case, distribution), id=f"{case.id}-{distribution}", marks=_LEVELS[case.level])
        for case in table
        for distribution in case.distributions
    ]


def clauses(names: Iterable[str]) -> list[object]:
    """Clauses as parameters, each marked as its own."""
    return [pytest.param(name, marks=clause(name)) for name in names]


class Gate:
    """The kernel of one test on one device, and what holds it to its claims.

    Whatever is asked of it skips the test, with the reason, where the kernel does not take the problem.
    """

    def __init__(self, kernel: Kernel, device: torch.device, spec: str, command: str, loadable: str = "") -> None:
        contract = contract_on(kernel, device)
        assert contract is not None, "the fixture `device` gives a device that the kernel runs on"
        self.kernel, self.device, self.contract = kernel, device, contract
        self._spec, self.command = spec, command
        self.loadable = spec or loadable  # what `load_kernel` takes in another process; empty if a fixture made it

    def require(self, problem: Problem) -> None:
        """Skip the test if the kernel does not take `problem`."""
        reason = refusal(self.kernel, problem)
        if reason is not None:
            pytest.skip(reason)

    def require_cuda(self) -> None:
        """Skip the test if the device is none of CUDA's."""
        if self.device.type != "cuda":
            pytest.skip("needs a CUDA device")

    def inputs(self, case: Case, distribution: str | None = None) -> Inputs:
        """The tensors of a case that the kernel takes."""
        if case.cuda:
            self.require_cuda()
        self.require(case.problem)
        return case.inputs(self.device, distribution)

    def run(self, inputs: Inputs, **options: Any) -> Result:
        """`csa_gate.fixtures.run.run` of the kernel."""
        __tracebackhide__ = True
        self.require(inputs.problem)
        try:
            return run(self.kernel, inputs, **options)
        except MemoryFault as fault:
            raise MemoryFault(f"{fault}\nreproduce: {self.command}") from None

    def intact(self, watched: Snapshot | GuardedInputs) -> None:
        """Hold memory that is watched beside a run's own to be as it was."""
        __tracebackhide__ = True
        try:
            watched.check()
        except MemoryFault as fault:
            raise MemoryFault(f"contract broken: memory\n{fault}\nreproduce: {self.command}") from None

    def judge(self, inputs: Inputs, result: Result, clause: str, *, poison: str = "nan") -> None:
        """Hold one result to one clause of `SINGLE_RESULT`; skip the test if there is nothing to look at.

        `poison` is what the buffers held, for the command that reproduces a failure.
        """
        __tracebackhide__ = True
        # `csa_gate check` knows a kernel by its name on the command line and inputs by their seed.
        command = check_command(inputs, self._spec)
        reproduce = f"{command} --clause {clause} --poison {poison}" if command else self.command
        verdict = judge(self.contract, inputs, result, kernel=self._name, clauses=(clause,), reproduce=reproduce)
        if not verdict.checked:
            pytest.skip(f"{clause} has nothing to look at in this case")
        if not verdict:
            raise AssertionError(verdict.message)

    def same(
        self,
        clause: str,
        inputs: Inputs,
        want: Result,
        got: Result,
        what: str,
        *,
        outputs: Iterable[str] | None = None,
        rows: slice | None = None,
        tokens: slice | None = None,
    ) -> None:
        """Hold two results to be the same bits: all outputs, or those named; arguments as in `judge.compare`."""
        __tracebackhide__ = True
        verdict = compare(
            clause, inputs, want, got, kernel=self._name, what=what,
            outputs=None if outputs is None else tuple(outputs), rows=rows, tokens=tokens, reproduce=self.command,
        )  # fmt: skip
        if not verdict:
            raise AssertionError(verdict.message)

    def near(self, clause: str, inputs: Inputs, want: Result, got: Result, what: str) -> None:
        """Hold a result to correctly rounded values: within its bound, and theirs, which is no larger."""
        __tracebackhide__ = True
        bound = reference(inputs, "bound")
        verdict = compare(
            clause, inputs, Result(**{name: tensor.double() for name, tensor in want.items()}), got, kernel=self._name,
            what=what, bound=Result(**{name: 2 * tensor for name, tensor in bound.items()}), reproduce=self.command,
        )  # fmt: skip
        if not verdict:
            raise AssertionError(verdict.message)

    def hold(
        self,
        clause: str,
        inputs: Inputs,
        got: Result,
        what: str,
        *,
        plain: tuple[Inputs, Result],
        want: Result | None = None,
    ) -> None:
        """Hold what came of an unusual call to all that is claimed of any.

        First, where `want` is given, to its bits in the outputs that the kernel claims to repeat; then to every clause
        of `SINGLE_RESULT` that the kernel keeps in an ordinary call, `plain`: what it breaks there is no fault of
        `clause`. Skips the test if the kernel claims none of these.
        """
        __tracebackhide__ = True
        repeated = self.repeated if want is not None else ()
        if want is not None and repeated:
            self.same(clause, inputs, want, got, what, outputs=repeated)
        verdict = judge(self.contract, inputs, got, kernel=self._name)
        if not repeated and not verdict.checked:
            pytest.skip(f"{self.kernel.name} claims neither to repeat itself nor anything of a single result here")
        if verdict:
            return
        kept = set(verdict.broken) - set(judge(self.contract, *plain, clauses=verdict.broken).broken)
        if kept:
            verdict = judge(self.contract, inputs, got, kernel=self._name, clauses=kept, reproduce=self.command)
            raise AssertionError(f"contract broken: {clause}, {what}\n{verdict.message}")

    def relate(self, relation: Relation, case: Case, clause: str) -> bool:
        """Hold a case that the kernel takes to a relation under one clause; False if there is nothing to look at."""
        __tracebackhide__ = True
        inputs = case.inputs(self.device)
        command = check_command(inputs, self._spec)
        command = f"{command} --property {relation.name} --clause {clause}" if command else self.command
        try:
            verdicts = relate(
                relation, self.kernel, self.contract, inputs, (clause,), name=self._name, reproduce=command
            )
        except Exception as error:
            error.add_note(f"reproduce: {command}")
            raise
        for verdict in verdicts:
            if not verdict:
                raise AssertionError(verdict.message)
        return bool(verdicts)

    @property
    def repeated(self) -> tuple[str, ...]:
        """The outputs whose bits the kernel claims to repeat from run to run."""
        always = ("out", "grad_kv", "grad_score") if self.contract.deterministic else ()
        return (*always, "grad_ape") if self.contract.dape_deterministic else always

    def same_order(self, a: Problem, b: Problem) -> bool:
        """`csa_gate.fixtures.relate.same_order` of what the kernel claims."""
        return same_order(self.contract, a, b)

    @property
    def _name(self) -> str:
        return self._spec or self.kernel.name


class Trial:
    """One case with one distribution, run once for the tests of all its clauses."""

    def __init__(self, case: Case, distribution: str) -> None:
        self.case, self.distribution = case, distribution
        self._done: dict[tuple[str, torch.device], tuple[Inputs, Result]] = {}

    def run(self, gate: Gate) -> tuple[Inputs, Result]:
        """Inputs and outputs."""
        key = (gate.kernel.name, gate.device)  # a fixture may make a new kernel for each test
        if key not in self._done:
            inputs = gate.inputs(self.case, self.distribution)
            self._done[key] = inputs, gate.run(inputs)
        return self._done[key]


class GateSuite:
    """The fixture that all themes use."""

    @pytest.fixture
    def gate(self, request: pytest.FixtureRequest, kernel: Kernel, device: torch.device) -> Gate:
        """The kernel under test on its device."""
        own, spec, loadable = class_kernel(request.cls), "", ""
        if uses_common_kernel(request.node):
            spec = request.config.getoption("csa_kernel")
        elif isinstance(own, str):
            spec = own
        elif own is not None:
            loadable = f"{request.path}:{request.cls.__qualname__}.kernel"
        return Gate(kernel, device, spec, _command(request, device), loadable)


def _command(request: pytest.FixtureRequest, device: torch.device) -> str:
    """The command that runs this test again."""
    if request.cls.__module__ == GIVEN_SUITE:
        where = f"--pyargs csa_gate.suites --csa-kernel={shlex.quote(request.config.getoption('csa_kernel'))}"
    else:
        where = shlex.quote(str(request.path))
    return f"python -m pytest {where} --csa-device={device.type} -k {shlex.quote(request.node.name)}"
