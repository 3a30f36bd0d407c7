"""Enclosures of real numbers and their correct rounding: what the `mp` oracle certifies its results with.

An interval is a pair of raw mpmath numbers, lower end first, as `mpmath.libmp.libmpi` has them. Its additions,
multiplications and divisions are exact operations followed by one directed rounding, provided that no operand has more
bits than the working precision (a far smaller addend is otherwise replaced by one that may be too small); every
interval made here keeps to that. mpmath's `exp` is rounded to the asked direction without a proof and shares a mutable
cache of log 2 between threads, so `exp_interval` is derived here.

A result is a *code*: the bit pattern of its magnitude with the sign of the value, so that codes are ordered as the
values are, neighbouring values differ by one, and there is one zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import isinf, isnan, isqrt
from typing import Any, NamedTuple

from mpmath.libmp import (
    fone,
    from_int,
    from_man_exp,
    fzero,
    mpf_div,
    mpf_sign,
    mpi_add,
    mpi_div,
    mpi_mul,
    round_ceiling,
    round_floor,
)

Raw = tuple[int, Any, int, int]  # sign, mantissa, exponent, bits of the mantissa
Interval = tuple[Raw, Raw]
ExpSum = Mapping[int, int | Fraction]  # {x: c} is the sum of c * exp(x * 2^LOGIT_SCALE)
Ratio = tuple[ExpSum, ExpSum]

LOGIT_SCALE = -149  # bf16 and fp32 values are integers times 2^-149
START_BITS = 96  # the working precision that settles all but ties and unusual cancellations
MAX_BITS = START_BITS << 8

ZERO: Interval = (fzero, fzero)
ONE: Interval = (fone, fone)


class Format(NamedTuple):
    """An IEEE-like binary format: `digits` significant bits, the leading one included, below 2^(top_exponent + 1)."""

    name: str
    digits: int
    top_exponent: int

    @property
    def infinity(self) -> int:
        return (2 * self.top_exponent + 1) << (self.digits - 1)

    @property
    def nan(self) -> int:
        return self.infinity | 1 << (self.digits - 2)


BF16 = Format("bf16", 8, 127)
FP32 = Format("fp32", 24, 127)
FP64 = Format("fp64", 53, 1023)


def round_raw(value: Raw, scale: int, to: Format, tie: int = 0) -> int:
    """The code of value * 2^scale rounded to nearest.

    Ties go to even, or up for tie = 1 and down for tie = -1: so the end of an interval is rounded that the enclosed
    value is known not to reach.
    """
    sign, man, exp, bits = value
    if not man:
        return 0
    top = exp + bits - 1 + scale
    if top > to.top_exponent:
        return -to.infinity if sign else to.infinity
    least = 2 - to.top_exponent - to.digits  # the exponent of the least subnormal
    unit = max(top - to.digits + 1, least)
    drop = unit - exp - scale
    if drop > bits:  # less than half the least subnormal
        return 0
    if drop <= 0:
        kept = man << -drop
    else:
        kept, rest, half = man >> drop, man & ((1 << drop) - 1), 1 << (drop - 1)
        kept += rest > half or (rest == half and (kept & 1 if not tie else (tie > 0) != sign))
    code = int(((unit - least) << (to.digits - 1)) + kept)  # the leading bit of a normal number adds 1 to its exponent
    return -code if sign else code


def round_interval(value: Interval, scale: int, to: Format, ties: tuple[int, int] = (0, 0)) -> int | None:
    """The code of every number in value * 2^scale, or None where there are several. `ties` as in `round_raw`."""
    low = round_raw(value[0], scale, to, ties[0])
    return low if low == round_raw(value[1], scale, to, ties[1]) else None


def round_fraction(value: Fraction, scale: int, to: Format) -> int:
    """The code of value * 2^scale, ties to even."""
    shift = max(0, 64 + value.denominator.bit_length() - value.numerator.bit_length())
    quotient, rest = divmod(abs(value.numerator) << shift, value.denominator)
    man = quotient << 1 | bool(rest)  # a sticky bit far below the last digit decides as the whole remainder would
    return round_raw((int(value < 0), man, -shift - 1, man.bit_length()), scale, to)


def round_float(value: float, to: Format) -> int:
    """The code of an Inf or a NaN."""
    if isnan(value):
        return to.nan
    if not isinf(value):
        raise ValueError(f"value: got {value}, need Inf or NaN")
    return to.infinity if value > 0 else -to.infinity


def enclose(value: int | Fraction, bits: int) -> Interval:
    """`value` to `bits` bits, outward."""
    if isinstance(value, int):
        return from_man_exp(value, 0, bits, round_floor), from_man_exp(value, 0, bits, round_ceiling)
    top, bottom = from_int(value.numerator), from_int(value.denominator)
    return mpf_div(top, bottom, bits, round_floor), mpf_div(top, bottom, bits, round_ceiling)


def exp_interval(x: int, bits: int) -> Interval:
    """exp(x * 2^LOGIT_SCALE) for x <= 0, relative width below 2^(3-bits).

    In fixed point, in units of 2^-work; every step is on nonnegative numbers and rounded down, so that each result is a
    lower bound and only its distance to the true value is left to bound.

    1. x = r + n log 2 with n <= 0. `guard` exceeds the integer bits of x by 3, so |n| * 2 + 1 < 2^guard: at `guard`
       more bits, neither x (rounded down by less than 1) nor a log 2 too small by less than 2 moves r by one unit.
       So t = r / 2^halvings is too small by less than 2 units, and t < 1/64.
    2. y = sum of t^i / i!, down to a term of 0. A term is too small by less than 2 (product and division cost less
       than 1 + 1/i, and what the term before lacks shrinks 64 times), all after the last by less than 1, and what t
       lacks costs less than 3: together less than 2 * terms + 4.
    3. Squaring doubles the relative error and adds less than one unit's. At the end y < 2.01, so y lacks less than
       2^halvings * (2 * terms + 5) * 2.01, which is below 2^(work-bits), as terms <= work / 6 + 1 < bits / 3 + 1.
    """
    if x == 0:
        return ONE
    halvings = 6 + isqrt(bits) // 2
    work = bits + halvings + (2 * bits).bit_length()
    guard = max(0, x.bit_length() + LOGIT_SCALE) + 3
    fine = work + guard
    n, rest = divmod(_shift(x, fine + LOGIT_SCALE), _log2(fine))
    t = rest >> (guard + halvings)
    y = term = 1 << work
    i = 1
    while term:
        term = (term * t >> work) // i
        y += term
        i += 1
    for _ in range(halvings):
        y = y * y >> work
    high = y + (1 << (work - bits))
    return from_man_exp(y, n - work, bits, round_floor), from_man_exp(high, n - work, bits, round_ceiling)


@lru_cache(maxsize=64)
def _log2(bits: int) -> int:
    """log(2) in units of 2^-bits, too small by less than 2, for bits <= 2^17.

    log 2 = 18 artanh(1/26) - 2 artanh(1/4801) + 8 artanh(1/8749). Each term of a series is rounded down by less than 2
    units; with the factors, that is less than 5 * (bits + 24) + 100 < 2^20. So at 24 more bits, with 2^20 taken off,
    the sum is below log 2 by less than 1/8 of the units returned.
    """

    def artanh(q: int) -> int:
        power = (1 << (bits + 24)) // q
        total, i = 0, 1
        while power:
            total += power // i
            power //= q * q
            i += 2
        return total

    low = 18 * artanh(26) - 2 * artanh(4801) + 8 * artanh(8749) - (1 << 20)
    return low >> 24


def _shift(x: int, by: int) -> int:
    return x << by if by >= 0 else x >> -by


def certify(ratios: Sequence[Ratio], scale: int, to: Format) -> int:
    """The code of 2^scale times the sum of num / den over `ratios`; slow, and exact on ties.

    `den` has positive coefficients, and no exponent of `num` is above its largest. Exponentials of distinct rationals
    are linearly independent over the rationals (Lindemann-Weierstrass). Hence num / den is a rational q exactly when
    num and q * den agree in every coefficient, and q can only be `lead`, the ratio at the largest exponent of den. So
    each ratio is lead + rest / den, and

    - where every rest is empty, the sum is rational and rounded exactly;
    - where one is not, the sum is irrational: no tie, so that some precision shows on which side of the next tie it is,
      an end of the enclosure that falls on the sum of the leads being rounded as what the rest moves away from;
    - where several are not, the same is tried, but the sum may still be rational, and a tie.

    The precision doubles until both ends have one code.

    Raises:
        ArithmeticError: where MAX_BITS do not suffice.
    """
    exact = Fraction(0)
    rests: list[tuple[ExpSum, ExpSum, int]] = []
    for num, den in ratios:
        top = max(den)
        lead = Fraction(num.get(top, 0), den[top])
        rest = {x: c for x in num.keys() | den.keys() if (c := num.get(x, 0) - lead * den.get(x, 0))}
        exact += lead
        if rest:
            rests.append((rest, den, top))
    if not rests:
        return round_fraction(exact, scale, to)
    bits = START_BITS
    while bits <= MAX_BITS:
        moved = ZERO
        for num, den, top in rests:
            moved = mpi_add(moved, mpi_div(_sum(num, top, bits), _sum(den, top, bits), bits), bits)
        low, high = base = enclose(exact, bits)
        value = mpi_add(base, moved, bits)
        above = value[0] == low == high and mpf_sign(moved[0]) > 0
        below = value[1] == low == high and mpf_sign(moved[1]) < 0
        code = round_interval(value, scale, to, (int(above), -int(below)))
        if code is not None:
            return code
        bits *= 2
    raise ArithmeticError(
        f"a sum of {len(rests)} irrational terms is too close to a tie of {to.name} for {MAX_BITS} bits"
    )


def _sum(terms: ExpSum, top: int, bits: int) -> Interval:
    """exp(-top) times an exponential sum."""
    total = ZERO
    for x, c in terms.items():
        total = mpi_add(total, mpi_mul(enclose(c, bits), exp_interval(x - top, bits), bits), bits)
    return total
