"""Floating-point numbers as integers: bit patterns, their order, ulp distances, classes.

Every comparison of the judge goes through here, because `==` on floats calls -0 equal to +0 and NaN unequal to
itself. The sign of a zero is part of a result; the payload and the sign of a NaN are not, only its place is.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

NAN_DISTANCE = torch.iinfo(torch.int64).max
"""The ulp distance between a NaN and a number: more than between any two numbers."""


class FloatClass(enum.IntEnum):
    """What kind of value an element holds."""

    FINITE = 0
    NAN = 1
    POS_INF = 2
    NEG_INF = 3


def bit_pattern(t: Tensor) -> Tensor:
    """The bits of a bf16 or fp32 tensor, as an int16 or int32 view of the same memory and shape.

    Raises ValueError for any other dtype.
    """
    if t.dtype not in _INTEGERS:
        raise ValueError(f"t: got dtype {t.dtype}, need torch.bfloat16 or torch.float32")
    return t.view(_INTEGERS[t.dtype])


def ordinal(t: Tensor) -> Tensor:
    """Each element's position on the line of all values of its dtype, int64, shape of `t`; +0 is at 0.

    Neighbouring values are one apart: -Inf < ... < -tiny < -0 (at -1) < +0 < +tiny < ... < +Inf < NaN. The two
    zeros are neighbours rather than one point, so equal positions mean equal bits. Every NaN, of whatever sign and
    payload, has the one position that the largest positive bit pattern names.
    """
    bits = bit_pattern(t)
    info = torch.iinfo(bits.dtype)
    line = bits.to(torch.int64)
    line = torch.where(line < 0, info.min - 1 - line, line)
    return torch.where(torch.isnan(t), info.max, line)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Steps from `a` to `b` on the line of `ordinal`, int64 >= 0, shape of `a`.

    0 exactly where the two hold the same bits or are both NaN; -0 to +0 is 1; `NAN_DISTANCE` where only one is NaN.
    Raises ValueError where dtype or shape differ.
    """
    _alike(a, b)
    steps = (ordinal(a) - ordinal(b)).abs()
    return torch.where(torch.isnan(a) != torch.isnan(b), NAN_DISTANCE, steps)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Where `a` and `b` hold different bits and are not both NaN, bool, shape of `a`.

    Raises ValueError where dtype or shape differ.
    """
    _alike(a, b)
    return (bit_pattern(a) != bit_pattern(b)) & ~(torch.isnan(a) & torch.isnan(b))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether every element of `a` and `b` has the same bits, two NaNs counting as the same.

    Raises ValueError where dtype or shape differ.
    """
    _alike(a, b)
    return torch.equal(bit_pattern(a), bit_pattern(b)) or not bool(differs(a, b).any())


def classes(t: Tensor) -> Tensor:
    """The `FloatClass` of each element of a floating-point tensor of any dtype, uint8, shape of `t`."""
    kinds = torch.zeros(t.shape, dtype=torch.uint8, device=t.device)
    kinds[torch.isnan(t)] = FloatClass.NAN
    kinds[torch.isposinf(t)] = FloatClass.POS_INF
    kinds[torch.isneginf(t)] = FloatClass.NEG_INF
    return kinds


def show(t: Tensor) -> str:
    """One element (a tensor of one bf16 or fp32 value) as its value and its bits: `-0.5 (0xBF00)`."""
    size = t.element_size()
    pattern = int(bit_pattern(t).item()) & ((1 << 8 * size) - 1)
    return f"{t.item():.9g} (0x{pattern:0{2 * size}X})"


def _alike(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(
            f"b: got {b.dtype} of shape {tuple(b.shape)}, need {a.dtype} of shape {tuple(a.shape)} as a has"
        )
