"""fp32.fma rounds once, fp32.exp_portable is within its error and has the same bits everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from csa_gate.oracles import fp32

Triples = list[tuple[float, float, float]]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NAN, INF, TINY, MAX = float("nan"), float("inf"), 2.0**-149, float(np.finfo(np.float32).max)


def round_to_fp32(exact: Fraction, zero: float = 0.0) -> float:
    """The fp32 value nearest to `exact`, ties to even; `zero` where `exact` is 0."""
    if exact == 0:
        return zero
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    steps = round(exact / ulp)  # Python rounds a Fraction's ties to even
    rounded = steps * ulp
    if abs(rounded) >= 2**128:
        return INF if rounded > 0 else -INF
    return float(rounded) if steps else (0.0 if exact > 0 else -0.0)


def exact_fma(a: float, b: float, c: float) -> float:
    """a * b + c of finite fp32 values in exact arithmetic, rounded once."""
    minus = np.signbit(a) != np.signbit(b) and np.signbit(c) and a * b == 0 and c == 0
    return round_to_fp32(Fraction(a) * Fraction(b) + Fraction(c), -0.0 if minus else 0.0)


def bits(values: Tensor | list[float]) -> list[int]:
    """fp32 bit patterns, every NaN as the same one."""
    t = torch.as_tensor(values, dtype=torch.float32).cpu().flatten()
    return t.masked_fill(torch.isnan(t), NAN).view(torch.int32).tolist()


def fma_on(device: str, triples: Triples) -> Tensor:
    return fp32.fma(*torch.tensor(triples, dtype=torch.float32, device=device).unbind(1))


def near_ties(rng: np.random.Generator, count: int) -> Triples:
    """c plus or minus almost half its ulp, short of the tie by a 2^-46th part: fp64 rounds the sum onto the tie."""
    triples = []
    for _ in range(count):
        exponent = int(rng.integers(-100, 100))
        c = float(rng.integers(2**23, 2**24)) * 2.0 ** (exponent - 23) * rng.choice([-1.0, 1.0])
        j = float(rng.integers(1, 1000))
        a = 2.0 ** (exponent - 24) * (1 + j * 2.0**-23) * rng.choice([-1.0, 1.0])
        triples.append((a, 1 - j * 2.0**-23, float(c)))
    return triples


def tiny_results(rng: np.random.Generator, count: int) -> Triples:
    """Products and addends around the subnormals."""

    def number(low: int, high: int) -> float:
        return float(np.float32(rng.uniform(-2, 2) * 2.0 ** int(rng.integers(low, high))))

    return [(number(-80, -68), number(-80, -68), float(rng.integers(-9, 9)) * TINY) for _ in range(count)]


def cancellations(rng: np.random.Generator, count: int) -> Triples:
    """c is the rounded product's negative, so the result is the product's rounding error."""
    pairs = rng.standard_normal((count, 2), dtype=np.float32)
    return [(float(a), float(b), -float(a * b)) for a, b in pairs]


def any_bits(rng: np.random.Generator, count: int) -> Triples:
    """Finite values of every magnitude; with the exponents spread out most sums are lopsided, many overflow."""
    values = rng.integers(0, 2**32, size=(2 * count, 3), dtype=np.uint32).view(np.float32)
    return [(float(a), float(b), float(c)) for a, b, c in values[np.isfinite(values).all(axis=1)][:count]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [near_ties, tiny_results, cancellations, any_bits])
def test_fma_is_the_exact_sum_rounded_once(make: Callable[[np.random.Generator, int], Triples], device: str) -> None:
    triples = make(np.random.default_rng(7), 2000)
    assert bits(fma_on(device, triples)) == bits([exact_fma(*t) for t in triples])


def test_near_ties_break_a_sum_that_rounds_twice() -> None:
    """The cases above are hard: rounding the fp64 sum of the exact product to fp32 fails about every fourth."""
    triples = near_ties(np.random.default_rng(7), 2000)
    a, b, c = torch.tensor(triples, dtype=torch.float64).unbind(1)
    wrong = np.array(bits((a * b + c).float())) != np.array(bits([exact_fma(*t) for t in triples]))
    assert wrong.mean() > 0.2


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(finite, finite, finite)
def test_fma_of_any_finite_values(a: float, b: float, c: float) -> None:
    assert bits(fma_on("cpu", [(a, b, c)])) == bits([exact_fma(a, b, c)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("a", "b", "c", "result"),
    [
        (INF, 0.0, 1.0, NAN),
        (INF, 1.0, -INF, NAN),
        (INF, 1.0, 1.0, INF),
        (2.0, -INF, 1.0, -INF),
        (3.0, 5.0, -INF, -INF),
        (MAX, MAX, -INF, -INF),
        (MAX, MAX, -MAX, INF),
        (NAN, 0.0, 0.0, NAN),
        (1.0, 1.0, NAN, NAN),
        (0.0, -1.0, 0.0, 0.0),
        (0.0, -1.0, -0.0, -0.0),
        (-0.0, -1.0, -0.0, 0.0),
        (1.0, 1.0, -1.0, 0.0),
        (MAX, 1.0, 2.0**103 - 2.0**79, MAX),  # just below half an ulp above the largest value
        (MAX, 1.0, 2.0**103, INF),  # the tie goes to even, which is 2^128
        (TINY, 0.5, 0.0, 0.0),
        (TINY, -0.5, 0.0, -0.0),
        (TINY, 0.5, TINY, 2 * TINY),
        (TINY, 0.5, -TINY, -0.0),
        (2.0**-100, 2.0**-50, TINY, 2 * TINY),
        (2.0**-100, 2.0**-51, TINY, TINY),
    ],
)
def test_fma_at_the_edges(a: float, b: float, c: float, result: float, device: str) -> None:
    assert bits(fma_on(device, [(a, b, c)])) == bits([result])


@pytest.mark.parametrize("device", DEVICES)
def test_fma_broadcasts_and_takes_views_and_numbers(device: str) -> None:
    a = torch.randn(6, 5, device=device).t()
    b = torch.randn(5, 1, device=device)
    by_element = [(x.item(), y.item(), 0.75) for x, y in zip(a.flatten(), b.expand(5, 6).flatten(), strict=True)]
    assert bits(fp32.fma(a, b, 0.75)) == bits([exact_fma(*t) for t in by_element])


@given(finite, finite)
def test_two_sum_is_exact(a: float, b: float) -> None:
    total, error = fp32.two_sum(torch.tensor(a), torch.tensor(b))
    if torch.isfinite(total):
        assert total.item() == round_to_fp32(Fraction(a) + Fraction(b))
        assert Fraction(total.item()) + Fraction(error.item()) == Fraction(a) + Fraction(b)


def every(stride: int, device: str) -> Tensor:
    """Every stride-th fp32 value from -0 to -105."""
    pattern = torch.arange(0x80000000, 0xC2D20001, stride, dtype=torch.int64, device=device)
    return (pattern - 2**32).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_exp_is_within_its_error(device: str) -> None:
    """0.8822 ulp, the largest error over every value of [-104, 0], which is attained at -26.6856499."""
    x = torch.cat([every(499, device), torch.tensor([-26.6856499], device=device)])
    truth = x.double().exp()
    ulp = torch.ldexp(torch.ones_like(truth), (torch.frexp(truth).exponent - 24).clamp(min=-149))
    error = (fp32.exp_portable(x).double() - truth).abs() / ulp
    assert error[-1] > 0.8821
    assert error.max() < 0.8822


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("x", "result"),
    [
        (0.0, 1.0),
        (-0.0, 1.0),
        (-TINY, 1.0),
        (-(2.0**-26), 1.0),
        (-INF, 0.0),
        (-MAX, 0.0),
        (-105.0, 0.0),
        (float(np.nextafter(np.float32(-105), np.float32(-200))), 0.0),
        (-104.0, 0.0),
        (-103.97208, TINY),  # exp is 0.50000002 of the least subnormal
        (-103.97209, 0.0),  # 0.49999...
        (NAN, NAN),
    ],
)
def test_exp_at_the_edges(x: float, result: float, device: str) -> None:
    assert bits(fp32.exp_portable(torch.tensor([x], device=device))) == bits([result])


def test_exp_follows_its_recipe() -> None:
    """Step by step in exact arithmetic: reduction, Horner's rule in fma steps, two scalings."""
    pinned = ("0x1.6a241ap-10", "0x1.1239f2p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "0x1p+0", "0x1p+0")
    coefficients = [float.fromhex(c) for c in pinned]
    assert list(fp32.EXP_COEFFICIENTS) == bits(coefficients)

    def recipe(x: float) -> float:
        x = max(x, -105.0)
        shifted = exact_fma(x, 1.4426950216293335, 12582912.0)
        n = shifted - 12582912.0
        r = exact_fma(n, -0.693145751953125, x)
        r = exact_fma(n, float.fromhex("-0x1.7f7d1cp-20"), r)
        p = coefficients[0]
        for coefficient in coefficients[1:]:
            p = exact_fma(p, r, coefficient)
        return round_to_fp32(Fraction(p) * Fraction(2) ** int(n))

    x = every(2_000_003, "cpu")
    assert len(x) > 500
    assert bits(fp32.exp_portable(x)) == bits([recipe(v) for v in x.tolist()])


@pytest.mark.parametrize("device", DEVICES)
def test_exp_has_the_same_bits_on_every_machine(device: str) -> None:
    y = fp32.exp_portable(every(997, device)).cpu()
    assert hashlib.sha256(y.numpy().tobytes()).hexdigest() == EXP_DIGEST


def test_exp_takes_any_shape_and_stride() -> None:
    x = -torch.rand(7, 12) * 20
    whole = fp32.exp_portable(x)
    assert bits(fp32.exp_portable(x.t()[::2])) == bits(whole.t()[::2])
    assert fp32.exp_portable(x[:, :0]).shape == (7, 0)


EXP_DIGEST = "000a8249cfb4fcfb36fbc5d1de9de7246fffb95be82e492939fefd86cda83c2c"
