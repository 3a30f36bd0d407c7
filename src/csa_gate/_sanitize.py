"""`python -m csa_gate sanitize`: the kernels under compute-sanitizer, one case for each schedule, on a CUDA device."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ._files import require_writable, write_whole
from ._toolkit import find_tool

TOOLS: dict[str, tuple[str, str]] = {
    "memcheck": ("overrun", "accesses outside of what is allocated"),
    "racecheck": ("race", "races on shared memory"),
    "initcheck": ("unwritten", "reads of global memory that nobody wrote"),
    "synccheck": ("divergence", "barriers that not all threads reach"),
}
"""Each tool, the fault of `_sanitize_plants` that it must find in a self-check, and what it looks for."""

REPORTED = 86  # exit status of the sanitizer that stands for reports; not one that Python has of its own accord
TIMEOUT_S = 1800  # a kernel that hangs is a fault too
SHOWN = 10  # different reports that are printed of each tool
_PREFIX = "========="
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_NO_REPORT = ("COMPUTE-SANITIZER", "Target application returned an error", "Error: process didn't terminate")


@dataclass(frozen=True)
class Sanitized:
    """What one tool said of one process.

    ran: the cases that were run to their end; planned: those that should have been.
    count: of the tool's summary, None if it wrote none. reports: a line each, as far as the tool prints them.
    end: how the process ended, if not well.
    """

    tool: str
    planned: tuple[str, ...]
    ran: tuple[str, ...]
    count: int | None
    reports: tuple[str, ...]
    end: str = ""

    @property
    def faults(self) -> list[str]:
        """Why this does not pass, one line each."""
        found = [f"{self.tool}: {report}" for report in list(dict.fromkeys(self.reports))[:SHOWN]]
        if self.count is None:
            found.append(f"{self.tool}: the log has no summary, so that nothing was looked at")
        elif self.count or self.reports:
            found.append(f"{self.tool}: {self.count} reports")
        missing = [name for name in self.planned if name not in self.ran]
        if not self.planned:
            found.append(f"{self.tool}: no case was begun")
        if missing:
            found.append(f"{self.tool}: {len(missing)} cases did not run to their end, first {missing[0]}")
        if self.end:
            found.append(f"{self.tool}: {self.end}")
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--kernel", default="fused", help="as for `check` (default: fused)")
    parser.add_argument(
        "--tool", action="append", choices=TOOLS, help=f"may be given more than once (default: {', '.join(TOOLS)})"
    )
    parser.add_argument("-k", dest="substring", default="", help="only cases with this in their name")
    parser.add_argument("--all", action="store_true", help="every edge of every schedule, not one case for each")
    parser.add_argument("--self-check", action="store_true", help="run faulty kernels, which the tools must report")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen there as well")


def run(args: argparse.Namespace) -> int:
    """Run every tool over a process of its own and print what it reports.

    Returns 0 if all cases ran and nothing was reported, else 1; with --self-check 0 if each tool reported its plant.
    Raises ValueError if an option makes no sense, or there is no tool or no device; nothing is written then.
    """
    from csa_gate.fixtures.kernels import choose_device, load_kernel

    choose_device("cuda", load_kernel(args.kernel))
    sanitizer = find_sanitizer()
    require_writable("--json", args.json)
    which = "all" if args.all else "covering"
    if not args.self_check:
        _require_cases(which, args.substring)
    tools = list(dict.fromkeys(args.tool or TOOLS))
    workers = {
        tool: ["plant", TOOLS[tool][0]] if args.self_check else ["cases", args.kernel, which, args.substring]
        for tool in tools
    }
    with ThreadPoolExecutor(len(tools)) as pool:
        seen = list(pool.map(lambda tool: sanitize(sanitizer, tool, workers[tool]), tools))
    faults = missed(seen) if args.self_check else [fault for one in seen for fault in one.faults]
    print("\n".join([*table(seen), *(f"fault: {fault}" for fault in faults), conclusion(faults, args.self_check)]))
    if args.json is not None:
        write_whole(args.json, json.dumps({"tools": [asdict(one) for one in seen], "faults": faults}, indent=1) + "\n")
    return 1 if faults else 0


def find_sanitizer() -> str:
    """The path of compute-sanitizer. Raises ValueError if there is none."""
    found = find_tool("compute-sanitizer")
    if found is None:
        raise ValueError("compute-sanitizer: found none, need that of a CUDA toolkit, on the PATH or below CUDA_HOME")
    return found


def sanitize(sanitizer: str, tool: str, worker: Sequence[str]) -> Sanitized:
    """Run `_sanitize_worker` with these arguments under one tool."""
    with tempfile.TemporaryDirectory() as folder:
        log, lines = Path(folder) / "log", Path(folder) / "lines"
        command = [sanitizer, *options(tool, log), sys.executable, "-m", "csa_gate._sanitize_worker"]
        # An allocation for each tensor: the caching allocator's are larger than what they are asked for.
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                [*command, *worker, str(lines)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            end = f"no end after {TIMEOUT_S} s"
        else:
            said = done.stdout.strip().splitlines()
            ended = f"the process ended with status {done.returncode}{': ' + said[-1] if said else ''}"
            end = "" if done.returncode in (0, REPORTED) else ended
        said = log.read_text(errors="replace").splitlines() if log.exists() else []
        return read(tool, said, lines.read_text().splitlines() if lines.exists() else [], end)


def options(tool: str, log: Path) -> list[str]:
    """The sanitizer's. Errors of the API are left out: libraries try calls that fail, and ours raise."""
    common = ["--tool", tool, "--error-exitcode", str(REPORTED), "--log-file", str(log), "--show-backtrace", "no"]
    return common + (["--report-api-errors", "no"] if tool == "memcheck" else [])


def read(tool: str, log: Sequence[str], lines: Sequence[str], end: str = "") -> Sanitized:
    """What a log of the sanitizer and the worker's lines come to; `end` says how the process failed, if it did."""
    written = [json.loads(line) for line in lines]
    planned = tuple(written[0]["cases"]) if written else ()
    ran = tuple(line["ran"] for line in written[1:])
    counts = [int(found[1]) for line in log if (found := _SUMMARY.search(line))]
    # Racecheck closes with two summaries in some versions, of which one counts no hazards.
    return Sanitized(tool, planned, ran, max(counts, default=None), tuple(reports(log)), end)


def reports(log: Sequence[str]) -> list[str]:
    """The reports of a log, each as its headline and the first line below, which has the kernel."""
    found: list[str] = []
    fresh = False
    for line in log:
        if not line.startswith(_PREFIX):
            continue
        text = line.removeprefix(_PREFIX)
        if fresh and text.startswith("  "):
            found[-1] += f", {text.strip()}"
        fresh = bool(text.strip()) and not text.startswith("  ")
        if fresh:
            fresh = not (_SUMMARY.search(text) or "SUMMARY:" in text or text.strip().startswith(_NO_REPORT))
        if fresh:
            found.append(text.strip())
    return found


def missed(seen: Sequence[Sanitized]) -> list[str]:
    """The plants that their tools did not report."""
    faults = []
    for one in seen:
        plant = TOOLS[one.tool][0]
        if not one.count or not any(f"{plant}_kernel" in report for report in one.reports):
            why = f": {one.end}" if one.end else ""
            faults.append(f"{one.tool}: did not report the planted {plant}{why}")
    return faults


def table(seen: Sequence[Sanitized]) -> list[str]:
    """One line a tool."""
    lines = [f"{'tool':<10}{'cases':>7}{'ran':>7}{'reports':>9}  looks for"]
    for one in seen:
        count = "?" if one.count is None else one.count
        lines.append(f"{one.tool:<10}{len(one.planned):>7}{len(one.ran):>7}{count:>9}  {TOOLS[one.tool][1]}")
    return lines


def conclusion(faults: Sequence[str], self_check: bool) -> str:
    """The last line."""
    if faults:
        return f"{len(faults)} faults"
    return "every planted fault was reported" if self_check else "nothing was reported"


def _require_cases(which: str, substring: str) -> None:
    from ._sanitize_worker import chosen

    if not chosen(which, substring):
        raise ValueError(f"-k: no case has {substring!r} in its name")
