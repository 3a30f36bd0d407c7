"""Do the short forms of CUDA's expf and of its reciprocal have the bits of the long ones? Every value, on a GPU.

    python benchmarks/near_exhaustive.py    # a few seconds

Tried are all fp32 values of [-43.668, 0] for `exp_near` (63 log(2) is 43.6683), and all of [1, 2) for `reciprocal`,
which other exponents only scale. Exits with status 1 if a value differs, or if `exp_near` declines one of them.
"""

from __future__ import annotations

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.runtime import from_dlpack

from csa_gate.fused.arith import FAR, NEAREST, exp_near, reciprocal

THREADS, EACH = 256, 256
POWERS = 0x422EAC09  # values from -0 to -43.668, as many as their bit patterns
RECIPROCALS = 1 << 23


@cute.kernel
def compare(counts: cute.Tensor, values: Int32, powers: Constexpr) -> None:
    """counts: values that differ, values that `exp_near` declines."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    differ, declined = Int32(0), Int32(0)
    for i in cutlass.range(EACH):
        at = (block * EACH + i) * THREADS + thread
        if at < values:
            if cutlass.const_expr(powers):
                x = (at ^ Int32(-0x80000000)).bitcast(Float32)
                power, bits = exp_near(x)
                if bits & FAR != 0:
                    declined += 1
                elif power.bitcast(Int32) != cute.math.exp(x).bitcast(Int32):
                    differ += 1
            else:
                x = (at + 0x3F800000).bitcast(Float32)
                if reciprocal(x).bitcast(Int32) != cute.math.rcp(x, rounding=NEAREST).bitcast(Int32):
                    differ += 1
    cute.arch.atomic_add(counts.iterator, differ)
    cute.arch.atomic_add(counts.iterator + 1, declined)


@cute.jit
def sweep(counts: cute.Tensor, values: Int32, powers: Constexpr) -> None:
    blocks = (values + THREADS * EACH - 1) // (THREADS * EACH)
    compare(counts, values, powers).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


def main() -> int:
    """Print the counts of both sweeps."""
    failed = False
    for name, values, powers in (("exp_near", POWERS, True), ("reciprocal", RECIPROCALS, False)):
        counts = torch.zeros(2, dtype=torch.int32, device="cuda")
        sweep(from_dlpack(counts), Int32(values), powers)
        differ, declined = counts.tolist()
        failed |= bool(differ or declined)
        print(f"{name}: {values:,} values, {differ:,} differ, {declined:,} declined")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
