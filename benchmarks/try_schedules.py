"""What would another schedule take? GPU kernels cut as the lines of a file say, beside the shipped ones.

    python benchmarks/try_schedules.py FILE    # a few seconds a line, a GPU

A line of FILE is JSON: `lens` (the segments' tokens), `ratio`, `coff`, `head_dim`, `direction`; and, left out for what
is shipped, `vec` (columns of a thread) and `schedule` (fields of `fused.config.Schedule`). For example

    {"lens": [65536], "ratio": 32, "coff": 2, "head_dim": 512, "direction": "forward"}
    {"lens": [65536], "ratio": 32, "coff": 2, "head_dim": 512, "direction": "forward",
     "vec": 2, "schedule": {"threads_x": 16, "threads_y": 4, "min_blocks": 8}}

each on one line. No schedule changes a bit, so that `differ` behind a time means: these kernels cannot run that
schedule (`tests/test_schedules.py` says what they take for granted). Bits are compared with the first line of the same
problem and direction.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from price_of_bits import Patch, patched
from torch import Tensor

from csa_gate._bench_clock import CudaClock
from csa_gate._bench_packs import Pack, floor_us
from csa_gate._bench_subjects import Buffers, KernelSubject
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.fused import compiled
from csa_gate.fused.config import Config, Direction
from csa_gate.oracles import Problem
from csa_gate.oracles.bits import same_bits

Line = dict[str, Any]


def configured(line: Line) -> list[Patch]:
    """What makes calls in the line's direction be compiled as it says."""
    shipped = compiled.configure

    def configure(direction: Direction, *rest: Any) -> Config:
        config = shipped(direction, *rest)
        if direction != line["direction"]:
            return config
        schedule = replace(config.schedule, **line.get("schedule", {}))
        return replace(config, vec=line.get("vec", config.vec), schedule=schedule)

    return [(compiled, "configure", configure)]


def results(buffers: Buffers, direction: Direction) -> list[Tensor]:
    """What a call in this direction writes."""
    return [buffers.out] if direction == "forward" else [buffers.grad_kv, buffers.grad_score, buffers.grad_ape]


def problem_of(line: Line) -> Problem:
    return Problem(tuple(line["lens"]), line["ratio"], line["coff"], line["head_dim"])


def measure(problem: Problem, lines: list[Line], clock: CudaClock, bandwidth: float, device: torch.device) -> None:
    """Print a line for each of one problem."""
    lens = f"{len(problem.lens)} segments, {sum(problem.lens)} tokens"
    pack = Pack(f"{lens}, ratio {problem.ratio}, coff {problem.coff}, head_dim {problem.head_dim}", problem)
    print(pack.id)
    buffers = [Buffers.make(problem, device, seed) for seed in range(clock.sets(pack.traffic("forward")))]
    subject = KernelSubject(load_kernel("fused"))
    first: dict[Direction, list[Tensor]] = {}
    for line in lines:
        direction: Direction = line["direction"]
        for tensor in results(buffers[0], direction):
            tensor.fill_(7)
        with patched(configured(line)):
            us = clock.kernel_us([subject.calls(each)[direction] for each in buffers])
        written = [tensor.clone() for tensor in results(buffers[0], direction)]
        same = all(map(same_bits, written, first.setdefault(direction, written)))
        floor = us / floor_us(pack.traffic(direction), bandwidth)
        change = json.dumps({name: line[name] for name in ("vec", "schedule") if name in line})
        verdict = "" if same else "differ "
        print(f"  {direction:<8} {us:7.1f} us  {floor:5.2f} of the floor  {verdict}{change}", flush=True)


def main() -> int:
    """Measure what the file named on the command line asks for."""
    lines = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines() if text.strip()]
    device = torch.device("cuda")
    clock = CudaClock(device, 20)
    bandwidth = clock.bandwidth()
    print(f"{torch.cuda.get_device_name()}, add at {bandwidth / 1e12:.2f} TB/s")
    for problem, of_it in groupby(lines, problem_of):
        measure(problem, list(of_it), clock, bandwidth, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
