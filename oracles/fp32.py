"""fp32 arithmetic with one rounding an operation, the same bits on every machine: fma, two_sum and exp.

PyTorch rounds fp32 `+ - * /` to nearest even with subnormals kept, on the CPU and on CUDA alike, but offers no fused
multiply-add; here it is built exactly from fp64.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.62e4p-1")  # 15 bits: its product with any exponent of fp32 is exact
LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2^23: after adding it, one ulp is 1
ROUND_TO_INTEGER_BITS = 0x4B400000
EXP_UNDERFLOW = -105.0  # exp rounds to +0 from -103.98 on down

EXP_COEFFICIENTS: tuple[int, ...] = (0x3AB5120D, 0x3C091CF9, 0x3D2AAC79, 0x3E2AAA49, 0x3EFFFFFE, 0x3F800000, 0x3F800000)
"""fp32 bit patterns of exp_portable's polynomial, degree 6 first.

The minimax fit of exp(r) in relative error on |r| <= log(2)/2 with both last coefficients held at 1 (Remez exchange,
relative error 3.1e-9), each coefficient rounded to fp32.
"""
_COEFFICIENTS = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in EXP_COEFFICIENTS]


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c rounded once to fp32, to nearest even; overflow, subnormals, signed zeros, Inf and NaN as in IEEE 754.

    Args:
        a, b: fp32 tensors that broadcast together.
        c: an fp32 tensor, or a number that fp32 represents.
    """
    return _fma64(a.double(), b.double(), c.double() if isinstance(c, Tensor) else c)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum of two tensors of one floating-point dtype, and its exact error (Knuth, TAOCP 2, 4.2.2)."""
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def exp_portable(x: Tensor) -> Tensor:
    """exp of an fp32 tensor of values <= 0, -Inf or NaN, the same bits on every machine.

    Cody and Waite's reduction x = n log 2 + r, a polynomial in r, and a scaling by 2^n in two factors so that it
    rounds once where the result is subnormal. At most 0.8822 ulp from the true value (all fp32 values of [-104, 0]
    were tried: `benchmarks/exp_exhaustive.py`); exactly 1 at 0, +0 below -103.98 and at -Inf, NaN at NaN.
    """
    x = x.masked_fill(x < EXP_UNDERFLOW, EXP_UNDERFLOW)
    wide = x.double()
    shifted = _fma64(wide, LOG2_E, ROUND_TO_INTEGER)
    n = (shifted - ROUND_TO_INTEGER).double()
    r = _fma64(n, -LN2_HIGH, wide).double()
    r = _fma64(n, -LN2_LOW, r).double()
    p = torch.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:-1]:
        p = _fma64(p, r, coefficient).double()
    exponent = shifted.view(torch.int32) - ROUND_TO_INTEGER_BITS
    half = exponent >> 1
    return _fma64(p, r, _COEFFICIENTS[-1]) * _power_of_two(half) * _power_of_two(exponent - half)


def _fma64(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """`fma` on fp32 values held in fp64.

    The product is exact in fp64 (48 bits). Rounding the sum to nearest and then to fp32 would round twice, so it is
    rounded to odd first: an inexact sum keeps its last bit set, which no rounding to 24 bits can mistake for a tie
    (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008).
    """
    product = a * b
    total = product + c
    product_part = total - c
    error = (product - product_part) + (c - (total - product_part))
    # The bits of the sum rounded toward zero: one down where nearest went away from zero. NaN errors (an Inf or NaN
    # sum) compare false and leave the sum alone. `total * error` is far from underflow and from overflow: both
    # factors are multiples of 2^-298 and below 2^257.
    bits = total.view(torch.int64) - (total * error < 0).to(torch.int64)
    return (bits | (error.abs() > 0).to(torch.int64)).view(torch.float64).float()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, for int32 exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)
