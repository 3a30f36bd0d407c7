"""`python -m csa_gate static`: registers, spills, occupancy and pinned arithmetic of compiled kernels, with no GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ._files import require_writable, write_whole
from ._static_cubin import LIMITS, WARP, find_cuobjdump
from ._static_probe import Row, Which, compiler_of

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
"""Ampere, Hopper, and Blackwell in data centres and in desktops: what the kernels are shipped for."""

AT_ONCE = 2  # processes; each compiles on one core
KEEP = {"CUTE_DSL_KEEP": "ptx,cubin,ir"}


@dataclass(frozen=True)
class Probed:
    """What was seen on one architecture; `faults` has what could not be probed, one line each."""

    arch: str
    modules: int
    rows: tuple[Row, ...]
    faults: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--kernel",
        default="fused",
        help="whose kernels: as for `check`, with a method compile_for(arch) (default: fused)",
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=sorted(LIMITS),
        help=f"may be given more than once (default: {', '.join(ARCHS)})",
    )
    parser.add_argument("-k", dest="substring", default="", help="only what has this in its name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")


def run(args: argparse.Namespace) -> int:
    """Compile, look, and print a table.

    Returns 0 if every kernel was probed and has no fault, else 1. Raises ValueError if an option makes no sense or a
    tool is missing; nothing is written then.
    """
    find_cuobjdump()
    require_writable("--json", args.json)
    compiler_of(args.kernel)
    archs = list(dict.fromkeys(args.arch or ARCHS))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        probed = list(pool.map(lambda arch: probe(arch, args.kernel, args.substring), archs))
    if not any(p.modules or p.faults for p in probed):
        raise ValueError(f"-k: no kernel of {args.kernel} has {args.substring!r} in its name")
    rows = [row for p in probed for row in p.rows]
    faults = [f"{row.arch} {row.name}: {fault}" for row in rows for fault in row.faults]
    faults += [fault for p in probed for fault in p.faults]
    print("\n".join([*table(rows), "", *verdict(rows, faults, archs)]))
    if args.json is not None:
        report = {"kernels": [asdict(row) for row in rows], "faults": faults}
        write_whole(args.json, json.dumps(report, indent=1) + "\n")
    return 1 if faults or not rows else 0


def probe(arch: str, spec: str, substring: str = "", which: Which = "all") -> Probed:
    """Compile the kernels of `spec` for one architecture in a process of their own, which it has to itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        done = subprocess.run(
            [sys.executable, "-m", "csa_gate._static_probe", arch, spec, substring, which, str(path)],
            env={**os.environ, "CUTE_DSL_ARCH": arch, **KEEP, "CUTE_DSL_DUMP_DIR": folder},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        lines = path.read_text().splitlines() if path.exists() else []
    said = done.stderr.strip().splitlines()
    end = f"the process ended with status {done.returncode}{': ' + said[-1] if said else ''}" if done.returncode else ""
    return read(arch, [json.loads(line) for line in lines], end)


def read(arch: str, lines: Sequence[dict[str, Any]], end: str = "") -> Probed:
    """What the lines of a probe come to; `end` says how its process failed, if it did."""
    if not lines:
        return Probed(arch, 0, (), (f"{arch}: not probed: {end or 'the process wrote nothing'}",))
    names, found = lines[0]["modules"], {line["module"]: line for line in lines[1:]}
    rows, faults = [], []
    for name in names:
        line = found.get(name, {"error": end or "the process stopped before it"})
        rows += [Row(**row) for row in line.get("rows", [])]
        if "error" in line:
            faults.append(f"{arch} {name}: not probed: {line['error']}")
    return Probed(arch, len(names), tuple(rows), tuple(faults))


def table(rows: Sequence[Row]) -> list[str]:
    """One line a kernel, in the order given. Blocks and warps are bounds for one multiprocessor."""
    width = max((len(row.name) for row in rows), default=4)
    columns = "registers  spill  stack  shared  threads  blocks  warps  limited by       pinned  expf"
    lines = [f"{'arch':<8} {'kernel':<{width}} {columns}"]
    for r in rows:
        share = f"{r.warps_per_multiprocessor}/{LIMITS[r.arch].threads // WARP}"
        lines.append(
            f"{r.arch:<8} {r.name:<{width}} {r.registers:>9}{r.spill_bytes:>7}{r.stack_bytes:>7}{r.shared_bytes:>8}"
            f"{r.threads:>9}{r.blocks_per_multiprocessor:>8}{share:>7}  {r.limited_by:<15}{r.pinned:>8}{r.expf:>6}"
            + ("  FAULT" if r.faults else "")
        )
    return lines


def verdict(rows: Sequence[Row], faults: Sequence[str], archs: Sequence[str]) -> list[str]:
    """The faults, or that there is none."""
    if faults:
        return [*(f"fault: {fault}" for fault in faults), f"{len(faults)} faults in {len(rows)} kernels"]
    if not rows:
        return ["nothing was probed"]
    return [f"{len(rows)} kernels on {', '.join(archs)}: no spill, no stack, every fp32 operation pinned, no atomics"]
