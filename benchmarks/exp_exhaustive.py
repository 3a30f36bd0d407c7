"""The error of the portable exp over the fp32 values of [-104, 0].

    python benchmarks/exp_exhaustive.py          # every 997th value, under a second
    python benchmarks/exp_exhaustive.py --all    # all 1,120,927,745 values, about 3 minutes on one core

The truth is exp in fp64, whose own error (below one fp64 ulp) is 2^-29 of an fp32 ulp. An ulp is the spacing of fp32
at the true value, 2^-149 for subnormal results. Exits with status 1 if any error exceeds one ulp.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from csa_gate.oracles.fp32 import exp_portable

FIRST, LAST = 0x80000000, 0xC2D00000  # bit patterns of -0 and -104; all values between lie between
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}


def ulp_error(x: Tensor) -> Tensor:
    """|exp_portable(x) - exp(x)| in ulps of fp32 at exp(x), fp64."""
    truth = x.double().exp()
    exponent = (torch.frexp(truth).exponent - 24).clamp(min=-149)
    return torch.ldexp((exp_portable(x).double() - truth).abs(), -exponent)


def sweep(stride: int, device: str) -> tuple[int, float, int]:
    """Values tried, the largest error in ulps, and the bit pattern of the value where it occurs first."""
    tried, worst, where = 0, 0.0, FIRST
    chunk = CHUNK[device] * stride
    for start in range(FIRST, LAST + 1, chunk):
        bits = torch.arange(start, min(start + chunk, LAST + 1), stride, dtype=torch.int64, device=device)
        errors = ulp_error((bits - (1 << 32)).to(torch.int32).view(torch.float32))
        tried += len(bits)
        value, index = errors.max(dim=0)
        if not value.item() <= worst:  # NaN too
            worst, where = value.item(), int(bits[index])
    return tried, worst, where


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every value instead of every 997th")
    parser.add_argument("--device", choices=sorted(CHUNK), default="cpu")
    args = parser.parse_args()
    begun = time.perf_counter()
    tried, worst, where = sweep(1 if args.all else 997, args.device)
    x = torch.tensor(where - (1 << 32), dtype=torch.int32).view(torch.float32).item()
    seconds = time.perf_counter() - begun
    print(f"{tried:,} values in {seconds:.1f} s on {args.device}:", end=" ")
    print(f"at most {worst:.6f} ulp, at x = {x:.9g} (0x{where:08X})")
    return int(not worst <= 1.0)


if __name__ == "__main__":
    sys.exit(main())
