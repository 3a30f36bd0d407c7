"""`error_bound`: how far a result with fp32 intermediates may be from the exact one, element by element."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import integer, one_of, require
from .inputs import Inputs, Result
from .problem import Problem
from .windows import gather, logits, scatter, scatter_ape, valid

C_EXP = 2.0
"""Largest error of an implementation's fp32 exp, in ulp: CUDA's expf has 1 or 2, the portable exp 1."""

_U = 2.0**-24  # unit roundoff of fp32
_ETA = 2.0**-149  # covers what one operation loses to underflow
_SLACK = 1 + 2.0**-16  # covers terms of higher order; see `error_bound`
_LIVE = 16  # fp64 tensors of one chunk alive at a time


@torch.no_grad()
def error_bound(inputs: Inputs, *, output_dtype: torch.dtype = torch.bfloat16, chunk_bytes: int = 1 << 28) -> Result:
    """The largest |got - exact| of each element, for fp32 intermediates in any order of summation.

    Covered are all implementations that compute in fp32 (round to nearest, subnormals kept):

    - x_k = score_k + ape_k; weights exp(x_k - max) over their sum, by division or a rounded reciprocal;
    - out = sum kv_k p_k, products rounded or fused; grad_kv = go p_k;
    - grad_score from h_k = go kv_k and S = sum p_k h_k, as t_k - p_k S with t_k = h_k p_k, as p_k (h_k - S), or as
      go p_k (kv_k - out) if that difference does not overflow; S may be go out; rounded or fused;
    - grad_ape as the sum of the fp32 grad_score over rows, in any order;

    and round once at the end, out, grad_kv and grad_score to bf16, grad_ape not at all.

    Derivation. u = 2^-24; fl(a op b) = (a op b)(1 + d) + e with |d| <= u, and |e| <= eta = 2^-149 in products and
    quotients, 0 in sums. N factors 1 + d, above or below a fraction line, are within exp(+-N u') with
    u' = u (1 + 2^-16), since -log(1 - u) < u (1 + u); g(N) = exp(N u') - 1. n = window, m = max x, d_k = x_k - m.
    A hat marks the computed value.

    1. Exponents. Rounding is monotonic, so the computed maximum is fl(m), and fl(m) - m shifts all exponents alike,
       which softmax does not see. Apart from it, exponent k is off by at most
       a_k = u (|x_k| + |d_k| + u (|x_k| + |m|)): the sum's rounding, the difference's, and their product.
    2. Exponentials. C_EXP ulp are at most 2 C_EXP u relative, or C_EXP eta where exp is subnormal.
    3. Sum. The exact sum times a factor between exp(-A) and exp(A), where A is the larger of log sum p_k exp(a_k) and
       -log sum p_k exp(-a_k), then 2 C_EXP factors from step 2 and n - 1 from adding. It is at least 1 - 4 u.
    4. Weights. Division, or reciprocal and product, adds 2 factors. So p^_k = p_k exp(r), |r| <= alpha_k =
       a_k + A + kappa, kappa = (4 C_EXP + n + 1) u', and underflow adds (C_EXP + 2) eta. Since no addend exceeds the
       computed sum by more than the rounding of that, also p^_k <= exp(kappa) + 2 eta. So |p^_k - p_k| <= w_k:
       p_k (exp(alpha_k) - 1), or where alpha_k >= 1 the smaller of p_k exp(alpha_k) and exp(kappa); plus the underflow.
       As the p^_k add up to 1 but for n + 1 roundings and underflow, w_k need not exceed the sum of the other w plus
       g(n + 1) + n (C_EXP + 2) eta, which is less where x_k towers over all others. q_k = p_k + w_k bounds p^_k.
    5. out. One product and n - 1 sums: sum |kv_k| (w_k + q_k g(n)) + 2 n eta.
    6. grad_kv. |go| (w_k + q_k g(1)) + eta.
    7. S. Two products and n - 1 sums: s = sum |h_k| (w_k + q_k g(n + 1)) + 4 n (1 + |go|) eta.
    8. grad_score. p^ is common to both terms, so its error counts once: w_k |h_k - S| + q_k s. On the way to the result
       h_k and S pass at most 3 roundings: + q_k (|h_k| + |S| + s) g(3) + 4 (1 + |kv_k| + |out|) eta.
    9. grad_ape over r rows: E + (V + E) g(r - 1), with E the sum of step 8 and V that of |grad_score|.
    10. Rounding y^ to bf16 errs by half an ulp of the binade of y^, at most that of |y| + its bound above.

    The factor 1 + 2^-16 on u (in a_k as well) covers products of the above with terms of order eta, and the fp64
    rounding of this function and of an fp64 result to compare with: these have 2^-53 where the bounds have u.

    Where weights may not be finite in fp32 (a NaN, +Inf or overflowing logit, or none above -Inf), where a result or,
    for the score gradients, h_k - S may overflow, and where the exact result is Inf or NaN, the bound is Inf. It is 0
    in slots that no row consumes.

    Args:
        inputs: tensors on any device.
        output_dtype: bf16, or fp32 for results that are not rounded at the end (step 10 left out).
        chunk_bytes: memory for intermediates, about.

    Returns:
        fp64 tensors >= 0 on the device of `inputs`.

    Raises:
        ValueError: `inputs` are none, `output_dtype` is another, or `chunk_bytes` no integer of at least 1.
    """
    require("inputs", inputs, Inputs)
    one_of("output_dtype", output_dtype, (torch.bfloat16, torch.float32))
    chunk_bytes = integer("chunk_bytes", chunk_bytes, 1)
    p, device = inputs.problem, inputs.device
    out = torch.zeros((p.total_comp, p.head_dim), dtype=torch.float64, device=device)
    grad_kv, grad_score = (torch.zeros(inputs.kv.shape, dtype=torch.float64, device=device) for _ in range(2))
    ape = _ApeBound(p, device)
    step = max(1, chunk_bytes // (8 * _LIVE * p.window * p.head_dim))
    for start in range(0, p.total_comp, step):
        rows = slice(start, min(start + step, p.total_comp))
        errors = _row_errors(inputs, rows)
        out[rows] = _rounded(errors.out, output_dtype)
        scatter(_rounded(errors.dkv, output_dtype), p, grad_kv, rows)
        scatter(_rounded(errors.dscore, output_dtype), p, grad_score, rows)
        ape.add(errors.dscore, valid(p, device, rows), p.rows - start)
    return Result(out, grad_kv, grad_score, ape.bound())


class _Errors(NamedTuple):
    """Of one output: the exact value and the fp32 bound around it, Inf or NaN where there is none."""

    value: Tensor
    error: Tensor


class _RowErrors(NamedTuple):
    out: _Errors  # (rows, head_dim)
    dkv: _Errors  # (rows, window, head_dim)
    dscore: _Errors  # as dkv


def _row_errors(inputs: Inputs, rows: slice) -> _RowErrors:
    """Steps 1 to 8 of `error_bound`, in its notation."""
    p, n = inputs.problem, inputs.problem.window
    kv = gather(inputs.kv, p, 0.0, rows).double()
    go = inputs.grad_out[rows].double()[:, None]
    p_k, w = _weights(logits(inputs.score, inputs.ape.double(), p, rows))
    q = p_k + w

    y = (p_k * kv).sum(1)
    spread = (kv.abs() * (w + q * _growth(n))).sum(1) + 2 * n * _ETA
    out = _Errors(y, spread)

    dkv = _Errors(go * p_k, go.abs() * (w + q * _growth(1)) + _ETA)

    h = go * kv
    s = (p_k * h).sum(1, keepdim=True)
    s_error = (h.abs() * (w + q * _growth(n + 1))).sum(1, keepdim=True) + 4 * n * (1 + go.abs()) * _ETA
    error = w * (h - s).abs() + q * s_error + q * (h.abs() + s.abs() + s_error) * _growth(3)
    error += 4 * (1 + kv.abs() + y.abs()[:, None]) * _ETA
    overflows = 2 * h.abs().amax(1, keepdim=True) >= 2.0**128 * (1 - 2.0**-10)
    dscore = _Errors(p_k * (h - s), error.masked_fill(overflows, torch.inf))
    return _RowErrors(out, dkv, dscore)


def _weights(x: Tensor) -> tuple[Tensor, Tensor]:
    """From logits (rows, window, head_dim), p_k and w_k of steps 1 to 4; NaN where fp32 weights may not be finite."""
    n, masked = x.shape[1], torch.isneginf(x)
    x = x.masked_fill(x.abs().ge(_overflow_edge(torch.float32)) & ~masked, torch.nan)
    top = x.amax(1, keepdim=True)
    d = x - top
    log_p = d - d.exp().sum(1, keepdim=True).log()
    p = log_p.exp()
    u = _U * _SLACK
    a = (u * (x.abs() + d.abs() + u * (x.abs() + top.abs()))).masked_fill(masked, 0.0)
    shift = torch.maximum(torch.logsumexp(log_p + a, 1, keepdim=True), -torch.logsumexp(log_p - a, 1, keepdim=True))
    kappa = (4 * C_EXP + n + 1) * u
    alpha = a + shift + kappa
    far = torch.exp(torch.clamp(log_p + alpha, max=kappa))
    eta = (C_EXP + 2) * _ETA
    w = (torch.where(alpha < 1, p * torch.expm1(alpha), far) + eta).masked_fill(masked & ~p.isnan(), 0.0)
    others = (w.sum(1, keepdim=True) - w).clamp(min=0)
    return p, torch.minimum(w, others + _growth(n + 1) + n * eta)


def _growth(roundings: int) -> float:
    """g(N) = exp(N u') - 1."""
    return math.expm1(roundings * _U * _SLACK)


def _overflow_edge(dtype: torch.dtype) -> float:
    """The least magnitude that rounds to Inf: half an ulp past the largest finite value."""
    return 2.0**128 - torch.finfo(dtype).eps * 2.0**126


def _rounded(result: _Errors, dtype: torch.dtype) -> Tensor:
    """The bound with step 10 for results rounded to `dtype`; Inf where they may overflow or have none."""
    most = result.value.abs() + result.error
    bound = result.error
    if dtype == torch.bfloat16:
        exponent = torch.frexp(most.clamp(min=2.0**-126)).exponent  # most is in [2^(exponent-1), 2^exponent)
        bound = bound + torch.ldexp(torch.full_like(most, 2.0**-9), exponent)
    return torch.where(most < _overflow_edge(dtype), bound, torch.inf)


class _ApeBound:
    """Step 9, by chunks of rows."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem = problem
        self._value, self._error, self._rows = (
            torch.zeros((problem.window, width), dtype=torch.float64, device=device)
            for width in (problem.head_dim, problem.head_dim, 1)
        )

    def add(self, dscore: _Errors, valid: Tensor, real: int) -> None:
        """Add a chunk of rows, of which those before `real` are no padding; `valid` as in `windows.valid`."""
        valid = valid & (torch.arange(len(valid), device=valid.device) < real)[:, None, None]
        self._value += dscore.value.abs().where(valid, 0.0).sum(0)
        self._error += dscore.error.where(valid, 0.0).sum(0)
        self._rows += valid.sum(0)

    def bound(self) -> Tensor:
        growth = torch.expm1((self._rows - 1).clamp(min=0) * (_U * _SLACK))
        error = self._error + growth * (self._value + self._error)
        return scatter_ape(_rounded(_Errors(self._value, error), torch.float32), self._problem)
