"""`python -m csa_gate bench`: kernels against the eager region, a peer's kernels and the speed of the memory."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from csa_gate import __version__
from csa_gate.fixtures.kernels import choose_device, load_kernel

from . import _bench_picture
from ._bench_clock import Clock, CpuClock, CudaClock
from ._bench_measure import Row, measure
from ._bench_packs import Pack, choose
from ._bench_report import LEGEND, aims, table, targets
from ._bench_runs import medians
from ._bench_subjects import EagerSubject, KernelSubject, PeerSubject, Subject
from ._files import require_outputs, write_whole

REPEATS = {"cuda": 20, "cpu": 7, "smoke": 3}
SMOKE_ELEMENTS = 1 << 18  # of the copy on the CPU: a megabyte


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--smoke", action="store_true", help="tiny packs on the CPU: does everything still run?")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda, with --smoke: cpu)")
    parser.add_argument("--kernel", default="fused", help="what to measure, as for `check` (default: fused)")
    parser.add_argument("--pack", nargs="+", metavar="ID", help="packs, or groups of them, by name")
    parser.add_argument(
        "--without", action="append", default=[], choices=("eager", "peer"), help="leave a column empty"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="replays, whose median counts (default: 20)")
    parser.add_argument(
        "--medians", nargs="+", type=Path, metavar="FILE", help="measure nothing: the medians of runs that --json wrote"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well, after every pack")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them into this PNG as well")


def run(args: argparse.Namespace) -> int:
    """Measure and print, line by line as it comes; or print what earlier runs measured.

    Returns 0, or 1 if the kernel could not be measured on one of the packs. Raises ValueError if an option makes no
    sense on this machine; nothing is measured or written then.
    """
    if args.medians is not None:
        return _print_medians(args)
    kind = "smoke" if args.smoke else args.device or "cuda"
    if args.smoke and args.device == "cuda":
        raise ValueError("--smoke: runs on the CPU, not with --device cuda")
    if args.repeats is not None and args.repeats < 1:
        raise ValueError(f"--repeats: got {args.repeats}, need at least 1")
    chosen = choose(args.pack, kind)
    _require_outputs(args)
    kernel = load_kernel(args.kernel)
    device = choose_device("cuda" if kind == "cuda" else "cpu", kernel)
    repeats = args.repeats or REPEATS[kind]
    clock: Clock
    if device.type == "cuda":
        clock = CudaClock(device, repeats)
    else:
        clock = CpuClock(repeats, **({"elements": SMOKE_ELEMENTS} if args.smoke else {}))
    subjects: list[Subject] = [KernelSubject(kernel)]
    subjects += [EagerSubject()] * ("eager" not in args.without)
    if device.type == "cuda" and "peer" not in args.without:
        subjects += [PeerSubject(deterministic=False), PeerSubject(deterministic=True)]
    about = describe(args, device)
    print("\n".join(f"{name}: {text}" for name, text in about.items()), flush=True)
    rows = _measure_all(chosen, subjects, clock, device, partial(write_json, about=about, path=args.json))
    report(rows, about, args)
    return 0 if all("ours" in row.us for row in rows) else 1


def _print_medians(args: argparse.Namespace) -> int:
    others = ("smoke", "device", "pack", "without", "repeats")
    named = [f"--{name}" for name in others if getattr(args, name)]
    if named:
        raise ValueError(f"--medians: got {' and '.join(named)} too, need none of that: nothing is measured")
    _require_outputs(args)
    rows, bandwidths, about = medians(args.medians)
    print("\n".join([*(f"{name}: {text}" for name, text in about.items()), *table(rows)]), flush=True)
    write_json(rows, bandwidths, about, args.json)
    report(rows, about, args)
    return 0


def _require_outputs(args: argparse.Namespace) -> None:
    require_outputs({"--json": args.json, "--picture": args.picture})
    if args.picture is not None:
        _bench_picture.require()


def _measure_all(
    chosen: Sequence[Pack],
    subjects: Sequence[Subject],
    clock: Clock,
    device: torch.device,
    keep: Callable[[list[Row], list[float]], None],
) -> list[Row]:
    """All rows.

    keep: gets, after each pack, those that there are and the bandwidth for each number of threads that they were
        measured with, so that a run that is stopped has not measured in vain.
    """
    before, start = torch.get_num_threads(), time.perf_counter()
    counts = [before] if device.type == "cuda" else [n for n in (1, 2) if n <= (os.cpu_count() or 1)]
    rows: list[Row] = []
    bandwidths = []
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            bandwidths.append(clock.bandwidth())
            print(f"copy: {bandwidths[-1] / 1e9:.1f} GB/s, the floor's", flush=True)
            for pack in chosen:
                measured = measure(pack, subjects, clock, bandwidths[-1], device)
                print("\n".join(table(measured, header=not rows)), flush=True)
                notes = list(dict.fromkeys(note for row in measured for note in row.notes))
                print(
                    "\n".join([*(f"  {note}" for note in notes), f"  at {time.perf_counter() - start:.0f} s"]),
                    flush=True,
                )
                rows += measured
                keep(rows, bandwidths)
    finally:
        torch.set_num_threads(before)
    return rows


def write_json(rows: Sequence[Row], bandwidths: Sequence[float], about: dict[str, str], path: Path | None) -> None:
    """All figures into the file asked for, if one was."""
    if path is not None:
        content = {
            "about": about,
            "copy_bytes_per_second": list(bandwidths),
            "rows": [asdict(row) for row in rows],
            "targets": [asdict(target) for target in targets(rows)],
        }
        write_whole(path, json.dumps(content, indent=1) + "\n")


def report(rows: Sequence[Row], about: dict[str, str], args: argparse.Namespace) -> None:
    """The targets, and the picture if one was asked for."""
    print("\n".join([*LEGEND, "", *aims(targets(rows))]), flush=True)
    if args.picture is not None:
        _bench_picture.draw(rows, about["machine"], args.picture)


def describe(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """The command, the machine and the versions of everything that counts."""
    words = ["python", "-m", "csa_gate", "bench"]
    for name, value in vars(args).items():
        values = value if isinstance(value, list) else [value]
        if name == "without":
            words += [word for v in values for word in ("--without", v)]
        elif value is True:
            words.append(f"--{name}")
        elif value not in (None, False):
            words += [f"--{name}", *map(str, values)]
    machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine = (
            f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
            f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )
    packages = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", PeerSubject.WHEEL)
    versions = [f"csa-gate {__version__}", *(f"{name} {_version(name)}" for name in packages)]
    return {
        "command": shlex.join(words),
        "machine": machine,
        "versions": ", ".join([*versions, f"python {platform.python_version()}"]),
        "kernel": args.kernel,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
