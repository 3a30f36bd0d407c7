"""`python -m csa_gate mutants`: how many planted faults the suites catch, and with what."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from csa_gate.fixtures.kernels import choose_device, load_kernel
from csa_gate.fixtures.mutants import CATALOGUE, SOURCE, Fault, misfit

from ._files import require_outputs, write_whole
from ._gate import LEVELS
from ._mutants_report import Fate, as_json, html, line, table, verdict
from ._mutants_session import SUITES, End, run_session

MOST_WORKERS = 8  # by default: each holds torch and, on a GPU, a context
PATIENCE = 10  # times as long as the control run: such a session hangs
LEAST_LIMIT = 120.0  # seconds
FIRST_LIMIT = 3600.0  # seconds, of what begins before the control run has ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "-k",
        dest="expression",
        default="",
        metavar="EXPR",
        help="only faults with this in id, file or clause; `a or b`",
    )
    parser.add_argument(
        "-n", dest="workers", type=int, metavar="WORKERS", help="faults at a time (default: one a core)"
    )
    parser.add_argument(
        "--level", nargs="+", choices=tuple(LEVELS), default=list(LEVELS), help="of the suites (default: L0, then L1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the fates there as well")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the table there as a page")


def run(args: argparse.Namespace) -> int:
    """Plant the faults, one at a time each in its own copy of the kernels, and print which of them the suites see.

    Returns 0 if every fault that runs on the device was killed, 1 if one survived or never came to a verdict, or if
    the suites fail without any fault: then nothing was planted. Raises ValueError if an option makes no sense or a
    fault no longer fits the code; nothing is run or written then.
    """
    cores = os.cpu_count() or 1
    workers = min(cores, MOST_WORKERS) if args.workers is None else args.workers
    if workers < 1:
        raise ValueError(f"-n: got {workers}, need at least 1")
    require_outputs({"--json": args.json, "--html": args.html})
    device = choose_device(args.device, load_kernel("fused")).type
    chosen = choose(CATALOGUE, args.expression)
    misfits = [why for fault in chosen if (why := misfit(fault, SOURCE)) is not None]
    if misfits:
        raise ValueError("the catalogue does not fit the code: " + "; ".join(misfits))
    here = [fault for fault in chosen if device in fault.on]
    if not here:
        raise ValueError(f"-k: none of the {len(chosen)} faults chosen can be seen on {device}")
    course = Course(device, workers, max(1, cores // workers))
    fates = course.run(here, [level for level in LEVELS if level in args.level])
    if fates is None:
        return 1
    elsewhere = [fault for fault in chosen if device not in fault.on]
    print("\n".join([*table(fates, elsewhere), "", *verdict(fates, elsewhere, device)]))
    if args.json is not None:
        write_whole(args.json, json.dumps(as_json(fates), indent=1) + "\n")
    if args.html is not None:
        write_whole(args.html, html(fates, elsewhere, device))
    return 0 if all(fate.killed for fate in fates) else 1


def choose(catalogue: Sequence[Fault], expression: str) -> list[Fault]:
    """The faults with one of the words of `expression`, which ` or ` separates, in their id, file or clause.

    All for the empty expression. Raises ValueError if no fault has a word, or if one is empty, which all would have.
    """
    words = [word.strip() for word in expression.split(" or ")]
    if expression and not all(words):
        raise ValueError(f"-k: got {expression!r} with an empty word, need one on both sides of each ` or `")
    texts = [f"{f.id} {f.file} {f.clause}" for f in catalogue]
    for word in words:
        if not any(word in text for text in texts):
            raise ValueError(f"-k: no fault has {word!r} in its id, file or clause")
    return [f for f, text in zip(catalogue, texts, strict=True) if any(word in text for word in words)]


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for sessions, none of which outlives a Ctrl-C: nothing is to be waited for then."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        end = threading.Thread(target=pool.shutdown, daemon=True)
        end.start()
        while end.is_alive():  # more than once: a session may be about to start
            for child in multiprocessing.active_children():
                child.kill()
            end.join(0.1)
        raise
    pool.shutdown()


@dataclass(frozen=True)
class Course:
    """A run over some faults: where, how many at a time, with how many of torch's threads each."""

    device: str
    workers: int
    threads: int

    def run(self, faults: Sequence[Fault], levels: Sequence[str]) -> list[Fate] | None:
        """The fates of the faults, in their order; None if the suites fail without any. Says what it does."""
        fates: dict[str, Fate] = {}
        alive = list(faults)
        for level in levels:
            with _pool(self.workers) as pool:
                # The faults need not wait for it, but no verdict counts before its own.
                control = pool.submit(self._session, None, level)
                sessions = {pool.submit(self._faulty_session, fault, level, control): fault for fault in alive}
                sound = control.result()
                print(f"{level} without a fault: {sound.kind}, {sound.seconds:.0f} s", flush=True)
                if sound.kind != "passed":
                    case = f"{sound.clause} {sound.case} {sound.what}".strip()
                    print(f"no fault was judged: the suites must pass without one, and do not: {case}", flush=True)
                    return None
                for session in as_completed(sessions):
                    fate = Fate.of(sessions[session], level, session.result())
                    fates[fate.fault.id] = fate
                    print(line(fate), flush=True)
            alive = [fault for fault in alive if fates[fault.id].survived]
            if not alive:
                break
        return [fates[fault.id] for fault in faults]

    def _faulty_session(self, fault: Fault, level: str, control: Future[End]) -> End:
        """A fault's session, but for one that would begin after the control run has failed."""
        if not control.done():
            return self._session(fault, level, FIRST_LIMIT)
        sound = control.result()
        if sound.kind != "passed":
            return sound
        return self._session(fault, level, max(LEAST_LIMIT, PATIENCE * sound.seconds))

    def _session(self, fault: Fault | None, level: str, limit: float | None = None) -> End:
        with tempfile.TemporaryDirectory(prefix="csa-gate-mutant-") as folder:
            return run_session(
                fault,
                level,
                Path(folder),
                device=self.device,
                threads=self.threads,
                limit=limit,
                source=SOURCE,
                suites=SUITES,
            )
