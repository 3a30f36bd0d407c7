"""Is the fused kernels' three-instruction division (`div_by`) the IEEE division? Every case that could differ.

    python benchmarks/division_hard_cases.py    # some seconds on one core

With y = 1 / b rounded, q = a * y rounded, r = a - q * b rounded and q' = q + r * y rounded, is q' = a / b rounded?
Powers of two scale out as long as nothing leaves the normal range, so a and b are taken in [1, 2), as A and B times
2^-23.

y is off by at most 2^-25, so q is off by at most 2^-23 where a >= b, and by less than 1.5 * 2^-24 where a < b. Then
r, a multiple of 2^-46 or 2^-47, is exact in the first case, and in the second off by at most 2^-47. So what is
rounded to q' is off from a / b by at most 2^-22 * 2^-25 in the first case, and 2^-47 + 1.5 * 2^-23 * 2^-25 in the
second. It can round to another number only if a midpoint between two numbers lies no further from a / b: an M / 2^24
(M / 2^25 where a < b) with M odd and d = A * 2^24 - M * B (A * 2^25) an integer other than 0 with |d| < 7. For each B
and d such A and M are the solutions of M * B = -d modulo a power of two. All of them are tried, and what is right is
known: the number above the midpoint if d > 0, else the one below. Exits with 1 if any comes out wrong.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from csa_gate.oracles.fp32 import fma

LARGEST = 7
CHUNK = 1 << 19


def division(a: Tensor, b: Tensor) -> Tensor:
    """`div_by` with the reciprocal of b, fp32."""
    y = (1.0 / b.double()).float()  # rounds as in one step: 53 >= 2 * 24 + 2 bits
    q = a * y
    return fma(fma(-q, b, a), y, q)


def inverse(odd: Tensor) -> Tensor:
    """The inverse modulo 2^32 of odd integers below 2^24, int64."""
    x = odd.clone()  # right in three bits
    for _ in range(4):
        x = x * (2 - odd * x) & 0xFFFFFFFF
    return x


def hard_cases(significands: Tensor, twos: int, d: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and M of every M * B = -d modulo 2^bits, M odd in [2^24, 2^25), B in `significands`, of `twos` twos."""
    period = bits - twos
    base = (-(d >> twos) * inverse(significands >> twos)) & ((1 << period) - 1)
    parts = []
    for m in range((1 << 24) >> period, (1 << 25) >> period):
        middle = base + (m << period)
        numerator = middle * significands + d
        a = numerator >> bits
        low, high = (significands, 1 << 24) if bits == 24 else (1 << 23, significands)
        keep = (middle % 2 == 1) & (numerator % (1 << bits) == 0) & (a >= low) & (a < high)
        parts.append(torch.stack((a[keep], significands[keep], middle[keep])))
    return tuple(torch.cat(parts, dim=1))  # type: ignore[return-value]


def main(end: int = 1 << 24) -> int:
    """Divisors from 2^23 to `end`."""
    start, tried, wrong = time.perf_counter(), 0, 0
    for first in range(1 << 23, end, CHUNK):
        chunk = torch.arange(first, first + CHUNK)
        for d in (d for d in range(-LARGEST + 1, LARGEST) if d):
            for twos in range((d & -d).bit_length()):
                own = chunk[(chunk >> twos & 1 == 1) & (chunk % (1 << twos) == 0)]
                for bits in (24, 25):
                    a, b, middle = hard_cases(own, twos, d, bits)
                    got = division(a.float() * 2.0**-23, b.float() * 2.0**-23)
                    want = ((middle + (1 if d > 0 else -1)) // 2).float() * 2.0 ** (1 - bits)
                    tried += len(a)
                    wrong += int((got != want).sum())
    print(f"{wrong} of {tried:,} hard cases are wrong, {time.perf_counter() - start:.0f} s")
    return int(wrong > 0 or not tried)


if __name__ == "__main__":
    sys.exit(main())
