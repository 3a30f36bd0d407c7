"""Where does the host's time of a call go? Parts of it, in calls of torch.add(out=), alternating in one run.

    python benchmarks/host_parts.py    # seconds, a GPU

`function` is the compiled function alone, which checks its tensors and launches one kernel forward and two backward;
`workspace` the allocation that a backward needs; `call` all that a caller waits for, Python included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from csa_gate._bench_clock import CudaClock
from csa_gate._bench_subjects import Buffers, KernelSubject
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.fused import compiled
from csa_gate.fused.checks import Shape, workspace_elements
from csa_gate.oracles import Problem

PROBLEM = Problem((8192,), 4, 2, 128)


def parts(device: torch.device) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    p, b = PROBLEM, Buffers.make(PROBLEM, device, 0)
    shape = Shape(len(p.lens), p.total_tokens, p.total_comp, p.head_dim)
    sizes = (shape.segments, shape.total_tokens, shape.total_comp, shape.head_dim)
    inputs = [b.kv, b.score, b.ape, b.cu_seqlens, b.cu_seqlens_comp]
    calls = KernelSubject(load_kernel("fused")).calls(b)
    found: dict[str, Callable[[], object]] = {}
    for direction in ("forward", "backward"):
        outputs = [b.out] if direction == "forward" else [b.grad_out, b.grad_kv, b.grad_score, b.grad_ape]
        config = compiled.configure(direction, p.ratio, p.coff, shape, "native", device, [])
        function = compiled.compiled_function(direction, config, device.index)
        tensors = [*inputs, *outputs]
        if direction == "backward":
            count = workspace_elements(p.total_comp, config.schedule.leaf_parts, b.ape.numel())
            tensors.append(torch.empty(count, device=device))
            found["workspace"] = lambda count=count: torch.empty(count, dtype=torch.float32, device=device)
        found[f"{direction}: function"] = lambda f=function, t=tensors: f(*t, *sizes)
        found[f"{direction}: call"] = calls[direction]
    return found


def main() -> int:
    """Print each part's time, and how many calls of torch.add it is."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = CudaClock(device, 20)
    print(torch.cuda.get_device_name())
    for name, part in parts(device).items():
        us, add = clock.host_us(part, 10.0)
        print(f"{name:<20} {us:6.1f} us  {us / add:5.2f} calls of torch.add (of {add:.1f} us)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
