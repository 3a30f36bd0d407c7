"""One session of the suites over one mutated kernel, in a process of its own, until its first failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from csa_gate.fixtures.mutants import SOURCE, Fault, plant

SUITES = ("--pyargs", "csa_gate.suites")
"""What pytest is told to run."""

Kind = Literal["passed", "broken", "crash", "hang", "error"]

COPY = "mutated_fused"
_KERNEL = f'''"""A mutated copy of the fused kernels, under test."""

import {COPY}

from csa_gate.fixtures.adapters.fused import FusedKernel

kernel = FusedKernel("mutant", kernels={COPY})
'''

# Sessions are forked from one process that has imported everything and computed nothing: imports take longer than most
# sessions. It starts no threads and no CUDA, so that a fork is a fresh process but for its imports.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, "csa_gate.fixtures.adapters.fused", "csa_gate.suites.test_compressor"])


@dataclass(frozen=True)
class End:
    """How a session ended.

    kind: `passed`, every test of the level; `broken`, a clause; `crash` or `hang`, the process, or what it did on the
        GPU, after which no process can go on there; `error`, something that no clause says anything about: an import, a
        compilation, an exception of another kind.
    clause, case: that were broken, and in which test.
    what: the first line of an error, or how the process died.
    seconds: from the start of the process to its end.
    """

    kind: Kind
    clause: str = ""
    case: str = ""
    what: str = ""
    seconds: float = field(default=0.0, compare=False)


class FirstFailure:
    """Pytest plugin: runs the tests that should see a fault first, and keeps the first failure of all."""

    def __init__(self, clause: str = "", case: str = "") -> None:
        self._clause, self._case = clause, case
        self.end = End("passed")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the tests of the clause first, of these the cases named; all keep their order beside that."""

        def place(item: pytest.Item) -> int:
            if all(marker.args != (self._clause,) for marker in item.iter_markers("clause")):
                return 3
            if self._case and self._case in item.name:
                return 0
            # Where one result is held to many clauses, the cases are there for values and take longer.
            return 2 if "name" in getattr(getattr(item, "callspec", None), "params", ()) else 1

        items.sort(key=place)

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]) -> None:
        """Keep what failed first: a verdict says which clause is broken, anything else is no verdict."""
        import torch  # here, as the process that sessions are forked from has it anyway

        if self.end.kind != "passed" or call.excinfo is None:
            return
        error = call.excinfo.value
        verdict = re.match(r"contract broken: (\w+)", str(error))
        what = _first_line(f"{call.excinfo.typename}: {error}")
        if verdict and isinstance(error, AssertionError):
            self.end = End("broken", verdict[1], node.name)
        elif isinstance(error, torch.AcceleratorError):
            self.end = End("crash", "crash", node.name, what)
        else:
            self.end = End("error", "", node.name, what)


def run_session(
    fault: Fault | None,
    level: str,
    folder: Path,
    *,
    device: str,
    threads: int,
    limit: float | None = None,
    source: Path = SOURCE,
    suites: Sequence[str] = SUITES,
) -> End:
    """Plant `fault` (None: none) in a copy of `source` and run the tests of `level` over it.

    Args:
        folder: an empty one for the copy, its kernel file and the session's output.
        device: `cpu` or `cuda`.
        threads: of torch.
        limit: seconds after which the process is killed and counts as hanging; None waits for ever.
        suites: what pytest is told to run.
    """
    plant(fault, folder / COPY, source)
    (folder / "kernel.py").write_text(_KERNEL)
    (folder / "pytest.ini").touch()  # so that pytest looks for no other configuration
    started = time.monotonic()
    first = FirstFailure(fault.clause, fault.case) if fault else FirstFailure()
    process = _CONTEXT.Process(target=_session, args=(folder, level, first, device, threads, suites), daemon=True)
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        end = End("hang", "hang", what=f"no end after {limit:.0f} s")
    else:
        end = _read(folder, process.exitcode)
    process.close()
    return End(**{**asdict(end), "seconds": time.monotonic() - started})


def _read(folder: Path, status: int | None) -> End:
    path = folder / "end.json"
    if status == 0 and path.exists():
        return End(**json.loads(path.read_text()))
    if status is not None and status < 0:
        return End("crash", "crash", what=f"killed by signal {-status}")
    return End("error", what=f"the process ended with status {status}: {_last_line(folder / 'log')}")


def _session(folder: Path, level: str, first: FirstFailure, device: str, threads: int, suites: Sequence[str]) -> None:
    """The process's own part: pytest, with all that it says in the file `log`, and how it ended in `end.json`."""
    import torch

    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT)
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.pop("PYTEST_ADDOPTS", None)  # meant for sessions of the user's own
    torch.set_num_threads(threads)
    # The last two take as long as many a session: one imports hypothesis anew, one collects all garbage ten times.
    without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "hypothesispytest", "unraisableexception")]
    options = ["-m", level, "-x", *without, "--tb=short"]
    kernel = ["--csa-kernel=kernel.py:kernel", f"--csa-device={device}"]
    status = pytest.main([*suites, *options, *kernel], plugins=[first])
    end = first.end
    if (status == pytest.ExitCode.OK) != (end.kind == "passed"):
        end = End("error", what=f"pytest ended with status {int(status)}: {_last_line(Path('log'))}")
    Path("end.json").write_text(json.dumps(asdict(end)))


def _first_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())[:300]


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
