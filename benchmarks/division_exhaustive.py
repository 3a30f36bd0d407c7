"""Is the fused kernels' three-instruction division the IEEE division? Every pair of significands, on a GPU.

    python benchmarks/division_exhaustive.py [--divisors N]

`div_by` scales exactly with its operands' exponents as long as nothing leaves the normal range, so significands are
all there is: 2^23 divisors in [1, 2), each against the 2^23 dividends in [0.5, 1) and so against every ratio of
significands. Prints the pairs tried and those that differ, and exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import sys
import time

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack

from csa_gate.fused.arith import div, div_by, reciprocal

SIGNIFICANDS = 1 << 23
ONE, HALF = 0x3F800000, 0x3F000000
THREADS = 256


@cute.kernel
def _count(differing: cute.Tensor, first: Int32) -> None:
    tx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + tx
    b = Int32(ONE + first + index).bitcast(Float32)
    r = reciprocal(b)
    bad = Int32(0)
    for i in cutlass.range(SIGNIFICANDS, unroll=8):
        a = Int32(HALF + i).bitcast(Float32)
        if div_by(a, b, r).bitcast(Int32) != div(a, b).bitcast(Int32):
            bad += 1
    differing[index] = bad


@cute.jit
def count(differing: cute.Tensor, first: Int32, divisors: Int32) -> None:
    """Differing dividends of each of `divisors` divisors from the `first` on."""
    _count(differing, first).launch(grid=(divisors // THREADS, 1, 1), block=(THREADS, 1, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--divisors", type=int, default=SIGNIFICANDS, help="a multiple of 65536 (default: all, 2^23)")
    divisors = parser.parse_args().divisors
    step = 1 << 16
    if divisors % step or not 0 < divisors <= SIGNIFICANDS:
        parser.error(f"--divisors: got {divisors}, need a multiple of {step} up to {SIGNIFICANDS}")
    differing = torch.empty(step, dtype=torch.int32, device="cuda")
    view = from_dlpack(differing).mark_layout_dynamic()
    function = cute.compile(count, view, Int32(0), Int32(step))
    start, bad = time.perf_counter(), 0
    for first in range(0, divisors, step):
        function(view, Int32(first), Int32(step))
        bad += int(differing.sum())
    pairs = divisors * SIGNIFICANDS
    print(f"{torch.cuda.get_device_name()}: {bad} of {pairs} pairs differ, {time.perf_counter() - start:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
