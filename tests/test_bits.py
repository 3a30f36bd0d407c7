"""`oracles.bits`: bit patterns, their order, distances and classes."""

import math

import pytest
import torch

from csa_gate.oracles.bits import (
    NAN_DISTANCE,
    FloatClass,
    bit_pattern,
    classes,
    differs,
    ordinal,
    same_bits,
    show,
    ulp_distance,
)

DTYPES = [torch.bfloat16, torch.float32]
INF, NAN = math.inf, math.nan


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def from_bits(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    """One element with these (unsigned) bits."""
    width = 8 * dtype.itemsize
    signed = pattern - (1 << width) if pattern >> (width - 1) else pattern
    return torch.tensor([signed], dtype=torch.int16 if width == 16 else torch.int32).view(dtype)


def test_ordinal_agrees_with_the_order_of_all_bf16_values():
    """Sorted by ordinal, all bf16 numbers ascend by value, -0 before +0, one step from each to the next."""
    numbers = every_bf16()[~torch.isnan(every_bf16())]
    line, order = ordinal(numbers).sort()
    assert torch.equal(line.diff(), torch.ones(len(numbers) - 1, dtype=torch.int64))
    ascending = numbers[order].double()
    steps = ascending.diff()
    zero = steps == 0
    assert bool((steps[~zero & ~torch.isnan(steps)] > 0).all())
    assert int(zero.sum()) == 1
    at = int(zero.nonzero())
    assert bit_pattern(numbers[order])[at : at + 2].tolist() == [-(2**15), 0]
    assert ordinal(torch.zeros(1)).item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (0.0, 0.0, 0),
        (-0.0, 0.0, 1),
        (-0.0, -0.0, 0),
        (1.0, 1.0, 0),
        (INF, INF, 0),
        (NAN, NAN, 0),
        (NAN, 1.0, NAN_DISTANCE),
        (-INF, NAN, NAN_DISTANCE),
    ],
)
def test_ulp_distance_of_special_values(dtype, a, b, steps):
    """Same bits are 0 apart, the two zeros 1, NaN and a number further than any two numbers; the order is no matter."""
    left, right = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
    assert ulp_distance(left, right).tolist() == [steps]
    assert ulp_distance(right, left).tolist() == [steps]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_distance_counts_representable_steps(dtype):
    """`nextafter` is one step anywhere: across a binade, out of the subnormals, over the top into infinity."""
    info = torch.finfo(dtype)
    for value in (1.0, -1.0, 2.0, -0.5, info.smallest_normal, -info.smallest_normal, info.max, 1e-30, -1e30):
        a = torch.tensor([value], dtype=dtype)
        away = bit_pattern(a) + 1
        assert ulp_distance(a, away.view(dtype)).tolist() == [1]
    largest, infinity = torch.tensor([info.max], dtype=dtype), torch.tensor([INF], dtype=dtype)
    assert ulp_distance(largest, infinity).tolist() == [1]
    assert ulp_distance(-infinity, infinity).item() == 2 * ordinal(infinity).item() + 1
    assert ulp_distance(-infinity, infinity).item() < NAN_DISTANCE


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.bfloat16, [0x7FC0, 0x7F81, 0xFFC0, 0xFFFF, 0x7FFF]),
        (torch.float32, [0x7FC00000, 0x7F800001, 0xFFC00000, 0xFFFFFFFF, 0x7FFFFFFF]),
    ],
)
def test_nan_payloads_do_not_matter(dtype, patterns):
    """Every NaN, whatever its sign and payload, has one ordinal, is 0 from any other and the same to the judge."""
    nans = torch.cat([from_bits(pattern, dtype) for pattern in patterns])
    assert bool(torch.isnan(nans).all())
    assert len(ordinal(nans).unique()) == 1
    assert bool((ordinal(nans) > ordinal(torch.tensor([INF], dtype=dtype))).all())
    other = nans.flip(0)
    assert same_bits(nans, other)
    assert not bool(differs(nans, other).any())
    assert ulp_distance(nans, other).tolist() == [0] * len(patterns)


def test_differs_is_about_bits_not_values():
    """What torch.equal passes (-0 against +0) differs, and what it fails (NaN against NaN) does not."""
    a = torch.tensor([0.0, NAN, 1.0, NAN, 2.0])
    b = torch.tensor([-0.0, NAN, 1.0, 3.0, 2.0000002])
    assert differs(a, b).tolist() == [True, False, False, True, True]
    assert not same_bits(a, b)
    assert same_bits(a[1:3], b[1:3])
    assert torch.equal(differs(a, b), ulp_distance(a, b) > 0)


def test_bit_pattern_is_a_view_with_the_bits():
    """The pattern shares memory, strides included, and holds the IEEE encoding."""
    t = torch.tensor([[1.0, -2.0], [0.5, INF]], dtype=torch.bfloat16).t()
    assert bit_pattern(t).tolist() == [[0x3F80, 0x3F00], [0xC000 - 2**16, 0x7F80]]
    assert bit_pattern(t).data_ptr() == t.data_ptr()
    assert bit_pattern(torch.tensor([1.0])).tolist() == [0x3F800000]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_classes(dtype):
    """Finite values (zeros and subnormals too), NaN and the two infinities each have their class."""
    tiny = torch.finfo(dtype).smallest_normal / 2
    t = torch.tensor([0.0, -0.0, tiny, torch.finfo(dtype).max, NAN, -NAN, INF, -INF], dtype=dtype)
    c = FloatClass
    assert classes(t).tolist() == [c.FINITE] * 4 + [c.NAN] * 2 + [c.POS_INF, c.NEG_INF]


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (-0.0, torch.bfloat16, "-0 (0x8000)"),
        (-0.5, torch.bfloat16, "-0.5 (0xBF00)"),
        (1.0, torch.float32, "1 (0x3F800000)"),
        (NAN, torch.bfloat16, "nan (0x7FC0)"),
    ],
)
def test_show(value, dtype, text):
    """A value is shown with its unsigned bits."""
    assert show(torch.tensor(value, dtype=dtype)) == text


def test_wrong_dtypes_and_shapes_are_refused():
    """Other dtypes, mixed dtypes and shapes that would broadcast raise ValueError with both sides."""
    with pytest.raises(ValueError, match=r"t: got dtype torch.float64, need torch.bfloat16 or torch.float32"):
        bit_pattern(torch.zeros(1, dtype=torch.float64))
    for b in (torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16)):
        for function in (ulp_distance, differs, same_bits):
            with pytest.raises(ValueError, match=r"b: got torch.* need torch.float32 of shape \(2,\)"):
                function(torch.zeros(2), b)


def test_empty_tensors():
    """Nothing differs from nothing."""
    empty = torch.zeros((0, 4), dtype=torch.bfloat16)
    assert same_bits(empty, empty.clone())
    assert ulp_distance(empty, empty).shape == (0, 4)
