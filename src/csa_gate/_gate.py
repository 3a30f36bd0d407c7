"""One session's gate: the hooks that load the kernel in time, count the gate tests and judge the run."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Generator, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from . import __version__
from ._devices import share_devices
from ._items import describe, enrol, gate_items, subject_of, uses_common_kernel
from ._stops import held_back, leave_sigterm, take_sigterm
from ._summary import CLAUSE, DEVICE, KERNEL, MACHINE, Subject, Tally

if TYPE_CHECKING:
    from csa_gate.fixtures.kernels import Kernel

LEVELS = {"L0": "the quick level, every clause at least once", "L1": "the full level, whole packs included"}

_ERROR = "csa_gate_error"  # key in the output of an xdist worker


class Gate:
    """Registered as a plugin for one session. A session's process is the one that reports, or a worker of xdist's."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tally = Tally()
        self.faults: list[str] = []
        self.stopped = False
        self.collected = self.takes_part = False
        self.session: pytest.Session | None = None
        self.interrupted = self.finished = self._took_sigterm = False
        self.selected: set[str] = set()
        self.ended: set[str] = set()
        self.lost: list[str] = []
        self._refused: dict[tuple[str, str], str] = {}
        given = [str(arg).partition("=")[0] for arg in config.invocation_params.args]
        self.kernel_given, self.device_given = "--csa-kernel" in given, "--csa-device" in given
        self.is_worker = hasattr(config, "workerinput")
        self.suites_given = any(map(_names_suites, config.args))
        self.named = self.kernel_given or self.device_given or self.suites_given
        if self.named:
            self._watch_stops()

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel of --csa-kernel. Raises KernelError."""
        from csa_gate.fixtures.kernels import load_kernel

        return load_kernel(self.config.getoption("csa_kernel"))

    @cached_property
    def subject(self) -> dict[str, str]:
        """That kernel on the device of --csa-device, as properties of a test. Raises KernelError."""
        from csa_gate.fixtures.kernels import choose_device

        return subject_of(self.kernel, choose_device(self.config.getoption("csa_device"), self.kernel))

    def refuse(self, item: pytest.Item, why: str) -> NoReturn:
        """End a test whose kernel cannot be had: the first of its class fails, the others are skipped and not counted.

        Each worker of xdist's has a first one. It fails as often as it is run, and its failure is not an expected one.
        """
        assert item.parent is not None
        first = item.nodeid
        if item.get_closest_marker("xfail") is None:
            first = self._refused.setdefault((item.parent.nodeid, why), item.nodeid)
        if first == item.nodeid:
            pytest.fail(why, pytrace=False)
        item.user_properties[:] = [(key, value) for key, value in item.user_properties if key != CLAUSE]
        pytest.skip(f"{why}, see {first}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """End the run before anything is collected if the command line names what cannot be had."""
        self.session = session
        if self.is_worker or not (self.kernel_given or self.device_given):
            return
        with held_back():
            from csa_gate.fixtures.kernels import KernelError, require_device

            try:
                require_device(self.config.getoption("csa_device"))
                if self.kernel_given:
                    _ = self.subject
            except KernelError as error:
                raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Import what our suites stand on where an interrupt waits for it; but where xdist has workers, in those."""
        if self.suites_given and not self.config.pluginmanager.has_plugin("dsession"):
            with held_back():
                importlib.import_module("csa_gate.suites")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        """Enrol the gate tests, load the kernel if one that is left after deselection needs it, note what is to run."""
        self._or_end(items, enrol)
        result = yield
        self._or_end(items, self._prepare)
        self.selected.update(item.nodeid for item in items)
        if gate_items(items):
            self.collected = True
            self._watch_stops()
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: list[Any]) -> None:
        """Share out the GPUs before the workers start."""
        share_devices(specs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Know what a worker is about to run; which are gate tests it does not say."""
        self.selected.update(ids)

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        """The header. With xdist, whose reporting process collects nothing, only the summary has it."""
        described = [_strings(item.user_properties) for item in gate_items(items)]
        if not described:
            return []
        kernels = {properties.get(KERNEL, "the test classes' own") for properties in described}
        return self._header(kernels, {p[DEVICE]: p[MACHINE] for p in described if DEVICE in p})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report, if it is of a gate test and says how the test ended."""
        if self.is_worker:
            return
        if report.when not in ("setup", "call"):
            self.ended.add(report.nodeid)
        if report.when not in ("setup", "call", "teardown"):  # what xdist says of a test whose worker died
            self.lost.append(report.nodeid)
        properties = _strings(report.user_properties)
        if CLAUSE not in properties or report.outcome not in ("passed", "failed", "skipped"):
            return
        self._watch_stops()
        if report.when == "call" or report.outcome != "passed":
            self.tally.add(report.nodeid, properties, report.outcome, _skip_reason(report))

    def _watch_stops(self) -> None:
        """Let a time limit's SIGTERM end the run as Ctrl-C does, with a summary; a worker dies of it."""
        if not self.is_worker:
            self._took_sigterm |= take_sigterm()

    def pytest_keyboard_interrupt(self) -> None:
        """Note it: where the session has not begun, no other hook tells."""
        self.interrupted = True

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Close a report that pytest leaves open, one of a session that was stopped before it had begun."""
        if self._took_sigterm:
            leave_sigterm()
        status = self.session.exitstatus if self.session else pytest.ExitCode.INTERRUPTED
        begun = self.interrupted or (self.session is not None and status != pytest.ExitCode.USAGE_ERROR)
        if not begun or self.finished or not self.named or self._runs_nothing():
            return
        self.stopped = True
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        self._report(reporter or pytest.TerminalReporter(self.config), status)
        if self.session and status == pytest.ExitCode.OK:
            self.session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _runs_nothing(self) -> bool:
        """Whether no test is to run in this process."""
        option = self.config.getoption
        return self.is_worker or option("collectonly") or option("setuponly", False) or option("setupplan", False)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """End the run with the line that a worker of xdist's left."""
        message = getattr(node, "workeroutput", {}).get(_ERROR)
        if message is not None:
            raise pytest.UsageError(message)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Turn success into failure if the gate proved nothing, or did not run to its end."""
        self.finished = True
        if self._runs_nothing():
            return
        finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.stopped = not finished or bool(session.shouldstop or session.shouldfail or self.selected - self.ended)
        self.takes_part = bool(self.tally) or (
            self.stopped
            and (self.named or self.collected)
            and exitstatus not in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
        )
        if self.tally and not self.stopped:
            self.faults = self.tally.faults(whole=not narrowed_by(self.config))
        elif exitstatus == pytest.ExitCode.OK and (self.kernel_given or self.device_given) and not self.takes_part:
            self.faults = ["the command line names a kernel or a device, but no gate test took part"]
        if self.takes_part and self.lost:
            self.faults.append(f"{len(self.lost)} tests took their worker process with them: {', '.join(self.lost)}")
        if exitstatus == pytest.ExitCode.OK and (self.faults or (self.takes_part and self.stopped)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> Generator[None, Any, Any]:
        """Close the session's report with the gate's."""
        result = yield
        if self.takes_part or self.faults:
            self._report(terminalreporter, exitstatus)
        return result

    def _report(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        terminalreporter.section("csa-gate")
        if self.tally:
            header = self._header(self.tally.kernels, self.tally.machines)
            for line in [*header, *self.tally.table()]:
                terminalreporter.line(line)
        for line in self._not_run():
            terminalreporter.line(line, red=True)
        for fault in self.faults:
            terminalreporter.line(f"gate failed: {fault}", red=True)
        if not self.faults:
            passed = exitstatus == pytest.ExitCode.OK
            terminalreporter.line(self._verdict(passed), green=passed, red=not passed)

    def _not_run(self) -> list[str]:
        """What a run that was stopped left undone."""
        if not self.stopped:
            return []
        if not self.selected:
            return ["not run: all tests; the run stopped before they were collected"]
        missing = len(self.selected - self.ended)
        lines = [f"not run: {missing} of {len(self.selected)} tests"] if missing else []
        subjects = self.tally.unproved()
        if not subjects and "subject" in self.__dict__ and not self.tally:
            subject = Subject.of(self.subject)
            subjects = {subject: list(subject.claims)}
        return lines + [f"not run: every test of {', '.join(names)}, which {s} claims" for s, names in subjects.items()]

    def _verdict(self, passed: bool) -> str:
        if self.tally.failed:
            return f"gate failed: {self.tally.failed} tests failed"
        if self.stopped:
            return "no gate: the run stopped before its end"
        if not passed:
            return "no gate: the session failed outside the gate tests"
        if narrowed := narrowed_by(self.config):
            return f"no gate: a narrowed run ({', '.join(narrowed)})"
        return f"gate passed: {self.tally.kept}"

    def _header(self, kernels: Iterable[str], machines: dict[str, str]) -> list[str]:
        spec = self.config.getoption("csa_kernel")
        common = self.__dict__.get("kernel")  # not loaded where every test class has its own
        names = [f"{k} ({spec})" if common and k == common.name != spec else k for k in sorted(kernels)]
        devices = [f"{device} ({machine})" for device, machine in machines.items()]
        versions = [f"{name} {_version(name)}" for name in ("torch", "nvidia-cutlass-dsl")]
        return [
            f"kernel: {', '.join(names) or 'none that could be had'}",
            f"device: {', '.join(devices) or self.config.getoption('csa_device')}",
            f"versions: {', '.join([f'csa-gate {__version__}', *versions, f'python {platform.python_version()}'])}",
        ]

    def _or_end(self, items: list[pytest.Item], step: Callable[[list[pytest.Item]], None]) -> None:
        """Take a step; where it fails, end the run. A worker cannot, so it hands over no tests and leaves a line."""
        try:
            with held_back():  # a kernel is imported
                step(items)
        except ValueError as error:
            if not self.is_worker:
                raise pytest.UsageError(str(error)) from error
            self.config.workeroutput[_ERROR] = str(error)  # type: ignore[attr-defined]
            items.clear()

    def _prepare(self, items: list[pytest.Item]) -> None:
        ours = gate_items(items)
        for item in ours:
            if uses_common_kernel(item):
                describe(item, self.subject)
        if ours:
            _share_cores()


def narrowed_by(config: pytest.Config) -> list[str]:
    """What on the command line picked single tests rather than a level: such a run need not touch every clause.

    -m counts where it names more than levels; a directory or a file does not count, unless it is a file of our own
    suites. What is not listed here is held against the run: a gate must not pass by leaving tests out.
    """
    flags = {"-k": "keyword", "--deselect": "deselect", "--lf": "lf", "--stepwise": "stepwise"}
    picked = [flag for flag, dest in flags.items() if config.getoption(dest, None)]
    if set(re.findall(r"\w+", config.getoption("markexpr", ""))) - {"and", "or", "not", *LEVELS}:
        picked.append("-m")
    picked += [arg for arg in config.args if "::" in arg or _names_suites(arg, whole=False)]
    return picked


def _names_suites(arg: str, whole: bool = True) -> bool:
    """Whether an argument of the command line names a file of our own suites, or (`whole`) all of them."""
    path, suites = arg.partition("::")[0], (Path(__file__).parent / "suites").resolve()
    if path == "csa_gate.suites" or Path(path).resolve() == suites:
        return whole
    return path.startswith("csa_gate.suites.") or suites in Path(path).resolve().parents


def _share_cores() -> None:
    """Leave each worker of xdist's its part of the cores: torch takes all of them by default."""
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def _strings(properties: Iterable[tuple[str, object]]) -> dict[str, str]:
    return {key: value for key, value in properties if isinstance(value, str)}


def _skip_reason(report: pytest.TestReport) -> str:
    if report.outcome != "skipped":
        return ""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail or 'no reason given'}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
