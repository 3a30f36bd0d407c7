"""`mp` gives the correctly rounded value of every element, ties and cancellations included."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import inf, nan

import mpmath
import pytest
import torch
from mpmath.libmp import from_man_exp, to_rational

from csa_gate.oracles.bits import classes, same_bits
from csa_gate.oracles.bound import error_bound
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.eager import eager
from csa_gate.oracles.enclosure import BF16, FP32, FP64, Format, Interval, Raw, certify, exp_interval, round_raw
from csa_gate.oracles.fp64 import fp64
from csa_gate.oracles.inputs import Inputs, Result
from csa_gate.oracles.mp import mp
from csa_gate.oracles.problem import Problem
from csa_gate.oracles.windows import logits, scatter, scatter_ape

PACK = Problem((9, 1, 0, 6), ratio=2, coff=2, head_dim=3, row_capacity=9, token_capacity=18)
DENSE = Problem((7,), ratio=3, coff=1, head_dim=2)
LONG = Problem((40,), ratio=16, coff=2, head_dim=1)
FORMATS = {torch.bfloat16: BF16, torch.float32: FP32, torch.float64: FP64}


# The formulas evaluated afresh, slowly, with 2000 bits and Python's exact fractions.


def nearest(x: Fraction, to: Format) -> float:
    """The value of the format nearest to x, ties to even."""
    if x == 0:
        return 0.0
    size = abs(x)
    log2 = size.numerator.bit_length() - size.denominator.bit_length()
    log2 -= size < Fraction(2) ** log2
    unit = Fraction(2) ** (max(log2, 1 - to.top_exponent) - to.digits + 1)
    rounded = round(x / unit) * unit
    if abs(rounded) >= Fraction(2) ** (to.top_exponent + 1):
        return inf if x > 0 else -inf
    return float(rounded)


def truth(inputs: Inputs, dtype: torch.dtype) -> Result:
    """What `mp` has to give, for finite inputs without ties that 2000 bits cannot see."""
    p, ctx = inputs.problem, mpmath.MPContext()
    ctx.prec = 2000
    ape_dtype = torch.promote_types(dtype, torch.float32)

    def value(t: torch.Tensor, row: int, column: int) -> mpmath.mpf:
        return ctx.mpf(t[row, column].item())

    def rounded(v: mpmath.mpf, to: torch.dtype) -> float:
        if abs(v) < ctx.mpf(2) ** -1500:  # below half of every format's least value
            return 0.0
        return nearest(Fraction(*map(int, to_rational(v._mpf_))), FORMATS[to])

    out = torch.zeros((p.total_comp, p.head_dim), dtype=dtype)
    dkv, dscore = (torch.zeros((p.total_tokens, p.width), dtype=dtype) for _ in range(2))
    dape: dict[tuple[int, int], mpmath.mpf] = {}
    for i in range(p.total_comp):
        for j in range(p.head_dim):
            slots = [slot for slot in p.row_window(i, j) if slot is not None]
            x = [value(inputs.score, s.token, s.column) + value(inputs.ape, s.ape_row, s.column) for s in slots]
            v = [value(inputs.kv, s.token, s.column) for s in slots]
            e = [ctx.exp(x_k - max(x)) for x_k in x]
            total = ctx.fsum(e)
            y = ctx.fsum(a * b for a, b in zip(e, v, strict=True)) / total
            out[i, j] = rounded(y, dtype)
            if i >= p.rows:
                continue
            go = value(inputs.grad_out, i, j)
            for s, e_k, v_k in zip(slots, e, v, strict=True):
                dkv[s.token, s.column] = rounded(go * e_k / total, dtype)
                gradient = go * e_k / total * (v_k - y)
                dscore[s.token, s.column] = rounded(gradient, dtype)
                at = (s.ape_row, s.column)
                dape[at] = dape.get(at, ctx.mpf(0)) + gradient
    grad_ape = torch.zeros((p.ratio, p.width), dtype=ape_dtype)
    for at, v in dape.items():
        grad_ape[at] = rounded(v, ape_dtype)
    return Result(out, dkv, dscore, grad_ape)


def assert_same(got: Result, want: Result) -> None:
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert a.dtype == b.dtype, name
        same = torch.equal(a.view(torch.int64), b.view(torch.int64)) if a.dtype == torch.float64 else same_bits(a, b)
        assert same, f"{name}: got {a}, want {b}"


@pytest.mark.parametrize("problem", [PACK, DENSE, LONG], ids=["overlap", "dense", "long"])
@pytest.mark.parametrize("distribution", ["normal", "wide", "peaked"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_element_is_correctly_rounded(problem: Problem, distribution: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(problem, seed=5, distribution=distribution)
    assert_same(mp(inputs, output_dtype=dtype), truth(inputs, dtype))


def test_exact_results_come_out_exactly() -> None:
    """Where every result is representable, rational arithmetic is all there is to round."""
    inputs = make_inputs(Problem((33, 6, 40), 4, 2, 8, row_capacity=21), 3, "exact")
    got, want = mp(inputs), fp64(inputs)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert same_bits(a, b.to(a.dtype)), name
        assert torch.equal(a.double(), b), name
    assert all(bool((t != 0).any()) for _, t in got.items())


# Structure.


def test_unconsumed_slots_and_padding() -> None:
    """What no row consumes and the gradients of padding rows have no effect, NaN included; gradients there are +0."""
    inputs = make_inputs(PACK, 1)
    want = mp(inputs)
    free = torch.from_numpy(PACK.slots != 0).repeat_interleave(PACK.head_dim, dim=1)
    for tensor in (inputs.kv, inputs.score):
        tensor[free] = nan
    inputs.grad_out[PACK.rows :] = nan
    got = mp(inputs)
    assert_same(got, want)
    for gradient in (got.grad_kv, got.grad_score):
        assert not bool(gradient[free].view(torch.int16).any())
    assert same_bits(got.out[PACK.rows :], got.out[:1].expand(2, -1).contiguous())  # row 0 is a first block at token 0


def test_the_ape_of_an_invalid_overlap_has_no_effect() -> None:
    inputs = make_inputs(Problem((2,), 2, 2, 1), 0)
    want = mp(inputs)
    inputs.ape[:, 0] = nan
    assert_same(mp(inputs), want)
    assert not bool(want.grad_ape[:, 0].view(torch.int32).any())


@pytest.mark.parametrize("lens", [(), (3,), (0, 1)])
def test_no_rows(lens: tuple[int, ...]) -> None:
    got = mp(make_inputs(Problem(lens, 4, 2, 2), 0))
    assert got.out.shape == (0, 2)
    assert not bool(torch.cat([got.grad_kv, got.grad_score]).view(torch.int16).any())
    assert not bool(got.grad_ape.view(torch.int32).any())


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output_dtype: got torch.float16, need one of torch.bfloat16"):
        mp(make_inputs(DENSE), output_dtype=torch.float16)


def digest(result: Result) -> str:
    return hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for _, t in result.items())).hexdigest()


def test_mpmath_settings_and_threads_do_not_matter() -> None:
    inputs = make_inputs(PACK, 4, "ties")
    want = digest(mp(inputs))
    before = mpmath.mp.prec, mpmath.iv.prec
    try:
        mpmath.mp.prec, mpmath.iv.prec = 11, 12
        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(lambda: digest(mp(inputs))) for _ in range(8)]
            assert [r.result() for r in results] == [want] * 8
        assert (mpmath.mp.prec, mpmath.iv.prec) == (11, 12)
    finally:
        mpmath.mp.prec, mpmath.iv.prec = before


def test_without_gmpy2() -> None:
    """Mpmath's pure Python integers give the same bits."""
    code = (
        "import sys, torch, mpmath\n"
        "from csa_gate.oracles.mp import mp\n"
        "from csa_gate.oracles.distributions import make_inputs\n"
        "from csa_gate.oracles.problem import Problem\n"
        "assert mpmath.libmp.BACKEND == 'python'\n"
        "result = mp(make_inputs(Problem((9, 6), 2, 2, 3), 4, 'peaked'))\n"
        "sys.stdout.buffer.write(b''.join(t.view(torch.uint8).numpy().tobytes() for _, t in result.items()))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MPMATH_NOGMPY": "1"}, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    here = mp(make_inputs(Problem((9, 6), 2, 2, 3), 4, "peaked"))
    assert hashlib.sha256(run.stdout).hexdigest() == digest(here)


# The other oracles.


@pytest.mark.parametrize("distribution", ["masked", "nonfinite"])
def test_inf_and_nan_stand_where_the_eager_reference_has_them(distribution: str) -> None:
    """Save in windows where score + ape overflows fp32, which is finite here."""
    p = Problem((30, 3, 9), 4, 2, 8, row_capacity=12)
    inputs = make_inputs(p, 2, distribution)
    x = logits(inputs.score, inputs.ape.double(), p)
    lost = (x.isfinite() & x.float().isinf()).any(1)
    in_tokens = [torch.ones(inputs.kv.shape, dtype=torch.bool) for _ in range(2)]
    kept = Result(~lost, in_tokens[0], in_tokens[1], torch.ones(inputs.ape.shape, dtype=torch.bool))
    for mask in (kept.grad_kv, kept.grad_score):
        scatter(~lost[:, None].expand(x.shape), p, mask)
    kept.grad_ape.copy_(scatter_ape(~lost[: p.rows].any(0).expand(p.window, -1), p))
    got, reference = mp(inputs), eager(inputs)
    for (name, a), (_, b), (_, mask) in zip(got.items(), reference.items(), kept.items(), strict=True):
        assert torch.equal(classes(a)[mask], classes(b)[mask]), name
        assert bool((classes(a)[mask] != 0).any()), name


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_fp64_agrees(distribution: str) -> None:
    """To 1e-13 of the scale of the error bound: the fp32 bound over its unit roundoff."""
    inputs = make_inputs(Problem((21, 2, 8), 4, 2, 8, row_capacity=9), 6, distribution)
    got, want, bound = (
        fp64(inputs),
        mp(inputs, output_dtype=torch.float64),
        error_bound(inputs, output_dtype=torch.float32),
    )
    for (name, a), (_, b), (_, limit) in zip(got.items(), want.items(), bound.items(), strict=True):
        assert torch.equal(classes(a), classes(b)), name
        judged = limit.isfinite()
        assert bool(judged.any()), name
        assert bool(((a - b).abs()[judged] <= 1e-13 * 2**24 * limit[judged]).all()), name


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_mp_is_within_the_error_bound(distribution: str) -> None:
    """The correctly rounded result is one that an implementation may give."""
    inputs = make_inputs(Problem((21, 2, 8), 4, 2, 8, row_capacity=9), 7, distribution)
    got, want, bound = mp(inputs), mp(inputs, output_dtype=torch.float64), error_bound(inputs)
    for (name, a), (_, b), (_, limit) in zip(got.items(), want.items(), bound.items(), strict=True):
        judged = limit.isfinite()
        assert bool(((a.double() - b).abs()[judged] <= limit[judged]).all()), name


# The parts.


def test_what_cannot_be_decided_is_an_error() -> None:
    """1 - (1 + e) / (1 + e)^2 (1 + e) is 0, but across denominators; 257/256 is a bf16 tie."""
    one = 1 << 149
    first = ({0: 1}, {0: 1, -one: 1})
    minus_first = ({0: -1, -one: -1}, {0: 1, -one: 2, -2 * one: 1})
    tie = ({0: 257}, {0: 256})
    with pytest.raises(ArithmeticError, match="2 irrational terms is too close to a tie of bf16"):
        certify([first, minus_first, tie], 0, BF16)
    assert certify([first, minus_first, ({0: 256}, {0: 256})], 0, BF16) == 0x3F80  # no tie: nothing to decide


def value_of(raw: Raw) -> Fraction:
    sign, man, exp, _ = raw
    size = int(man) * Fraction(2) ** exp
    return -size if sign else size


@pytest.mark.parametrize("to", [BF16, FP32, FP64], ids=lambda f: f.name)
def test_rounding(to: Format) -> None:
    """Of numbers at, next to and between the values of the format, over all exponents."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        exponent, offset, sign = (int(torch.randint(n, (), generator=generator)) for n in (2300, 5, 2))
        man = int(torch.randint(1 << (to.digits - 1), 1 << to.digits, (), generator=generator))
        man = (man << 3) + offset  # eighths of an ulp: 4 is a tie for a normal number
        exp = exponent - 1150 if to is FP64 else exponent % 300 - 165
        raw = from_man_exp(-man if sign else man, exp - to.digits)
        code = round_raw(raw, 3, to)
        want = nearest(value_of(raw) * 8, to)
        magnitude = abs(code)
        field, fraction = divmod(magnitude, 1 << (to.digits - 1))
        if magnitude == to.infinity:
            value = inf
        else:
            significand = fraction + ((1 << (to.digits - 1)) if field else 0)
            value = float(significand * Fraction(2) ** (max(field, 1) + 1 - to.top_exponent - to.digits))
        assert (-value if code < 0 else value) == want
        up, down = round_raw(raw, 3, to, 1), round_raw(raw, 3, to, -1)
        assert {up, down} >= {code}
        assert up - down in (0, 1)


@pytest.mark.parametrize("bits", [32, 96, 192, 1536])
def test_exp_interval_holds_the_truth(bits: int) -> None:
    """And is narrow; for arguments from 2^-149, where exp is next to 1, to 2^128."""
    ctx = mpmath.MPContext()
    generator = torch.Generator().manual_seed(bits)
    for exponent in [0, 1, 30, 100, *range(130, 160), 170, 200, 277]:
        for _ in range(2):
            x = -(1 << exponent) - int(torch.rand((), generator=generator, dtype=torch.float64) * 2.0**exponent)
            low, high = exp_interval(x, bits)
            ctx.prec = 2 * bits + 700
            exact = ctx.exp(ctx.mpf(x) / 2**149)
            assert ctx.make_mpf(low) <= exact <= ctx.make_mpf(high)
            assert ctx.make_mpf(high) - ctx.make_mpf(low) <= exact * ctx.mpf(2) ** (3 - bits)
    assert exp_interval(0, bits) == exp_interval(0, 2 * bits)


def test_log2_multiples() -> None:
    """Arguments next to multiples of log 2, where the reduced argument is 0 or log 2."""
    ctx = mpmath.MPContext()
    ctx.prec = 800
    for n in (1, 2, 3, 100, 2**40, 2**120):
        for step in (-1, 0, 1):
            x = -int(ctx.floor(n * ctx.ln2 * 2**149)) + step
            interval: Interval = exp_interval(x, 96)
            assert ctx.make_mpf(interval[0]) <= ctx.exp(ctx.mpf(x) / 2**149) <= ctx.make_mpf(interval[1])
