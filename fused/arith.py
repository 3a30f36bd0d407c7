"""Arithmetic on lanes, the one place where the CPU and the GPU differ.

A lane is what one step computes on: a `Float32` scalar on the GPU, where products and sums carry an explicit
rounding so that ptxas cannot contract them, or a vector of `vec` columns on the host, whose build contracts nothing.
Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint16, Uint32
from cutlass.cute.math import RoundingMode
from cutlass.cute.tensor import TensorSSA
from cutlass.cutlass_dsl import select_

from .config import Config

Lane: TypeAlias = Float32 | TensorSSA
Lanes: TypeAlias = list[Lane]
Group: TypeAlias = tuple[cute.Tensor, int | Int32]  # column group k of a (count, vec) tensor

NEAREST = RoundingMode.NEAREST_EVEN
NEG_INF = float("-inf")

# exp(x) = 2^n * exp(r): Cody and Waite's two-part log 2, and the polynomial of exp(r) on |r| <= log(2) / 2.
LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.62e4p-1")
LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it leaves the integer in the low bits
ROUND_TO_INTEGER_BITS = 0x4B400000
FAR = 64  # a bit of what `exp_near` returns beside the power
EXP_UNDERFLOW = -105.0  # exp is +0 in fp32 from here on down
EXP_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in ("0x1.6a241ap-10", "0x1.1239f2p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "0x1p0", "0x1p0")
)  # highest degree first; the worst error of exp is 0.882 ulp


def ceil_div(n: int | Int32, by: int) -> int | Int32:
    """n / by rounded up, for any n from 0 to the largest Int32."""
    return n // by + cutlass.min(n % by, 1)


def on_host(lane: Lane) -> bool:
    return isinstance(lane, TensorSSA)


def constant(value: float, like: Lane) -> Lane:
    return cute.full(like.shape, value, Float32) if on_host(like) else Float32(value)


def add(a: Lane, b: Lane) -> Lane:
    return a + b if on_host(a) else cute.math.add(a, b, rounding=NEAREST)


def sub(a: Lane, b: Lane) -> Lane:
    return a - b if on_host(a) else cute.math.add(a, -b, rounding=NEAREST)


def mul(a: Lane, b: Lane) -> Lane:
    return a * b if on_host(a) else cute.math.mul(a, b, rounding=NEAREST)


def fma(a: Lane, b: Lane, c: Lane) -> Lane:
    return cute.math.fma(a, b, c) if on_host(a) else cute.math.fma(a, b, c, rounding=NEAREST)


def div(a: Lane, b: Lane) -> Lane:
    return a / b if on_host(a) else cute.math.div(a, b, rounding=NEAREST)


def reciprocal(a: Float32) -> Float32:
    """1 / a rounded to nearest, of a normal number whose reciprocal is one.

    The steps are those of the IEEE division's own first part, less its care for all other numbers.
    """
    y = cute.arch.rcp_approx(a)
    return fma(y, fma(-a, y, Float32(1.0)), y)


def div_by(a: Float32, b: Float32, r: Float32) -> Float32:
    """a / b rounded to nearest, given r = 1 / b rounded to nearest, if no intermediate leaves the normal range.

    Markstein's correction of a * r by its exact remainder; `benchmarks/division_hard_cases.py` tries every case in
    which it could differ from the IEEE division.
    """
    q = mul(a, r)
    return fma(fma(-q, b, a), r, q)


def quotient(a: Float32, b: Float32, r: Float32) -> Float32:
    """a / b rounded to nearest for 0 <= a <= 1 <= b < 2^100, given r = 1 / b rounded; the result may be subnormal.

    In fp64: a quotient of two fp32 numbers is either a tie of the fp32 grid or farther from every tie than fp64 errs.
    """
    code = (
        "{ .reg .f64 a, b, r, q, t; cvt.f64.f32 a, {$r0}; cvt.f64.f32 b, {$r1}; cvt.f64.f32 r, {$r2}; neg.f64 b, b; "
        + "fma.rn.f64 t, b, r, 0d3FF0000000000000; fma.rn.f64 r, t, r, r; " * 2
        + "mul.rn.f64 q, a, r; fma.rn.f64 t, b, q, a; fma.rn.f64 q, t, r, q; cvt.rn.f32.f64 {$w0}, q; }"
    )
    return _ptx(code, Float32, a, b, r)


# NaN may be dropped: a NaN logit makes its own exp NaN, hence the sum, hence every weight.
def maximum(a: Lane, b: Lane) -> Lane:
    return cute.where(b > a, b, a) if on_host(a) else cute.arch.fmax(a, b)


def unless_nan(a: Lane, b: Lane) -> Lane:
    """`a`, but `b` where `a` is NaN."""
    return cute.where(a == a, a, b) if on_host(a) else Float32(select_(a == a, a, b))


def not_negative_zero(a: Lane) -> Lane:
    """−0 becomes +0, as in a gradient that autograd accumulates into +0."""
    return add(a, constant(0.0, a))


def two_sum(a: Lane, b: Lane) -> tuple[Lane, Lane]:
    """The rounded sum and its exact error (Knuth)."""
    s = add(a, b)
    b_part = sub(s, a)
    return s, add(sub(a, sub(s, b_part)), sub(b, b_part))


def exp_near(x: Float32) -> tuple[Float32, Int32]:
    """CUDA's expf of −43.668 <= x <= 0 in fewer instructions, and a number whose bit `FAR` is set for other x, NaN too.

    expf takes x apart as n * log(2) + r and multiplies exp(r) by 2^n; where the power is no subnormal, adding n to the
    exponent does the same. The low bits of the number are −n.
    """
    t = _ptx("fma.rn.sat.f32 {$w0}, {$r0}, 0f3BBB989D, 0f3F000000;", Float32, x)  # x / (252 * log(2)) + 1/2
    # 126 − 252 * t rounded up, which is −n, in the low bits
    shifted = cute.math.fma(t, Float32(-252.0), Float32(ROUND_TO_INTEGER + 126), rounding=RoundingMode.UP)
    minus_n = sub(shifted, Float32(ROUND_TO_INTEGER))
    r = fma(x, Float32(1.925963033500011079e-08), fma(x, Float32(LOG2_E), minus_n))
    power, bits = _ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, r), shifted.bitcast(Int32)
    scaled = _ptx("mad.lo.s32 {$w0}, {$r0}, -8388608, {$r1};", Int32, bits, power.bitcast(Int32))
    return scaled.bitcast(Float32), bits


def _ptx(instruction: str, kind: type, *operands: Float32 | Int32) -> Float32 | Int32:
    return cute.arch.inline_ptx(instruction, write_only_types=[kind], read_only_args=list(operands))


def exp(x: Lane, config: Config) -> Lane:
    return cute.math.exp(x) if config.exp == "native" else exp_portable(x)


def exp_portable(x: Lane) -> Lane:
    """exp of x <= 0 from fp32 mul, add and fma alone: at most 1 ulp off, exact 1 at 0, +0 from −inf, NaN through."""
    least = constant(EXP_UNDERFLOW, x)
    x = cute.where(x < least, least, x) if on_host(x) else Float32(select_(x < least, least, x))
    shifted = fma(x, constant(LOG2_E, x), constant(ROUND_TO_INTEGER, x))
    n = sub(shifted, constant(ROUND_TO_INTEGER, x))
    r = fma(n, constant(-LN2_HIGH, x), x)
    r = fma(n, constant(-LN2_LOW, x), r)
    p = constant(EXP_COEFFICIENTS[0], x)
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = fma(p, r, constant(coefficient, x))
    exponent = shifted.bitcast(Int32) - ROUND_TO_INTEGER_BITS
    # Two factors: the first product is exact, the second rounds once, into the subnormals if need be.
    half = _shift(exponent, -1)
    return mul(mul(p, _power_of_two(half)), _power_of_two(exponent - half))


def _power_of_two(exponent: Int32 | TensorSSA) -> Lane:
    return _shift(exponent + 127, 23).bitcast(Float32)


def _shift(a: Int32 | TensorSSA, left: int) -> Int32 | TensorSSA:
    shifted = a << left if left > 0 else a >> -left
    return TensorSSA(shifted, a.shape, a.dtype) if on_host(a) else shifted


def storage(config: Config) -> type[BFloat16] | type[Uint16]:
    """How bf16 is moved: the host build has no conversion to bf16, so it handles bit patterns."""
    return Uint16 if not config.on_gpu else BFloat16


def lanes_of(fragment: cute.Tensor, k: int | Int32, config: Config) -> Lanes:
    """The fp32 lanes of column group `k` of a (count, vec) tensor of fp32, or of bf16 in `storage`."""
    if config.on_gpu:
        if fragment.element_type is BFloat16 and config.vec % 2 == 0:
            return _halves(cute.recast_tensor(fragment, Uint32), k, config)
        return [fragment[k, c].to(Float32) for c in config.columns]
    vector = fragment[k, None].load()
    if fragment.element_type is Float32:
        return [vector]
    return [_shift(vector.to(Uint32), 16).bitcast(Float32)]


def _halves(words: cute.Tensor, k: int | Int32, config: Config) -> Lanes:
    """bf16 pairs as fp32, one instruction a lane; the conversion that the compiler makes of `to` takes two."""
    lanes: Lanes = []
    for c in config.columns:
        word = words[k, c // 2]
        half = word & Uint32(0xFFFF0000) if c % 2 else word << 16
        lanes.append(half.bitcast(Float32))
    return lanes


def put_lanes(fragment: cute.Tensor, k: int | Int32, lanes: Lanes, config: Config) -> None:
    """Write lanes to column group `k` of a (count, vec) tensor of fp32, or of bf16 rounded to nearest even."""
    if config.on_gpu:
        for c, lane in zip(config.columns, lanes, strict=True):
            fragment[k, c] = lane.to(fragment.element_type)
    elif fragment.element_type is Float32:
        fragment[k, None].store(lanes[0])
    else:
        fragment[k, None].store(_bf16_bits(lanes[0]))


def apply(operation: Callable[..., Lane], config: Config, to: Group, *operands: Group) -> None:
    """`to = operation(*operands)`, lane by lane."""
    sources = [lanes_of(fragment, k, config) for fragment, k in operands]
    tensor, at = to
    put_lanes(tensor, at, [operation(*lanes) for lanes in zip(*sources, strict=True)], config)


def _bf16_bits(x: TensorSSA) -> TensorSSA:
    bits = x.bitcast(Uint32)
    odd = _shift(bits, -16) & cute.full(x.shape, 1, Uint32)
    rounded = _shift(bits + odd + 0x7FFF, -16)
    quiet = cute.full(x.shape, 0x7FC0, Uint32)
    return cute.where(x == x, rounded, quiet).to(Uint16)
