"""The oracle whose every bit is specified: elementwise fp32 operations in an explicit order.

With `exp="native"` the order is that of PyTorch's eager region on CUDA, whose bits it equals there. With
`exp="portable"` the exponential is `fp32.exp_portable` and the order depends on (window, head_dim) alone, so every
output has one value on every machine, and a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import windows
from .checks import one_of, require
from .fp32 import exp_portable, fma, two_sum
from .inputs import Inputs, Result
from .orders import MANY_ROWS, leaf_run, pool_lanes, softmax_lanes

Exp = Literal["native", "portable"]

LEAF = 32
"""Consecutive rows whose dscore one leaf of the dape tree adds."""
LANES = 32
"""Lanes over which the leaves of the dape tree are dealt."""

# Window entries worked on at once: on a CPU the intermediates stay in the L2 cache, on a GPU launches stay few.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}


@torch.no_grad()
def ordered(inputs: Inputs, *, exp: Exp = "native", output_dtype: torch.dtype = torch.bfloat16) -> Result:
    """Forward and backward with every operation and its place fixed.

    For a row's window of logits x_k and values v_k (-Inf and 0 where invalid), per column:
    e_k = exp(x_k - max x), den = sum of e_k in softmax order, p_k = e_k / den; out = sum of v_k * p_k in pool order;
    t_k = (go * v_k) * p_k, S = sum of t_k in softmax order, dscore_k = fma(-p_k, S, t_k), dkv_k = go * p_k.
    `orders` has the two orders; `_AxisSum` that of grad_ape. Gradients get +0 added, as in autograd, which accumulates
    them into zeros, so none is -0 before the last rounding (in which a negative subnormal may become one).

    Args:
        inputs: of any device; padding rows are pooled, their incoming gradient is not read.
        exp: "native" takes `torch.exp` of the device, "portable" `fp32.exp_portable`.
        output_dtype: of out, grad_kv and grad_score: bf16 rounds once, at the end; fp32 leaves them unrounded.
            grad_ape is fp32.

    Raises:
        ValueError: `inputs` are none, `exp` is another, or `output_dtype` another than bf16 and fp32.
    """
    require("inputs", inputs, Inputs)
    one_of("exp", exp, ("native", "portable"))
    one_of("output_dtype", output_dtype, (torch.bfloat16, torch.float32))
    problem, device = inputs.problem, inputs.device
    window, head_dim, total = problem.window, problem.head_dim, problem.total_comp
    pool = pool_lanes(window, head_dim, total if exp == "native" and total else MANY_ROWS)
    softmax = softmax_lanes(window, head_dim)

    out = torch.empty((total, head_dim), dtype=output_dtype, device=device)
    grad_kv, grad_score = (torch.zeros(inputs.kv.shape, dtype=output_dtype, device=device) for _ in range(2))
    axis_sum = _AxisSum((window, head_dim), leaf_run(window), device)
    step = max(1, _BLOCK[device.type] // (window * head_dim))
    for start in range(0, total, step):
        rows = slice(start, min(start + step, total))
        values = windows.gather(inputs.kv, problem, 0.0, rows).float()
        weights = _softmax(windows.logits(inputs.score, inputs.ape, problem, rows), softmax, exp)
        out[rows] = _pool_sum(values * weights, pool).to(output_dtype)
        if start < problem.rows:
            rows = slice(start, min(rows.stop, problem.rows))
            real = rows.stop - start
            dkv, dscore = _gradients(inputs.grad_out[rows, None].float(), values[:real], weights[:real], softmax)
            windows.scatter(dkv.to(output_dtype), problem, grad_kv, rows)
            windows.scatter(dscore.to(output_dtype), problem, grad_score, rows)
            axis_sum.add(dscore.masked_fill(~windows.valid(problem, device, rows), 0.0))
    return Result(out, grad_kv, grad_score, windows.scatter_ape(axis_sum.total(), problem))


def _softmax(logits: Tensor, lanes: int, exp: Exp) -> Tensor:
    """Weights (n, window, head_dim) of the logits."""
    shifted = logits - logits.amax(dim=1, keepdim=True)
    e = exp_portable(shifted) if exp == "portable" else torch.exp(shifted)
    return e / _lane_sum(e, lanes)[:, None]


def _gradients(grad_out: Tensor, values: Tensor, weights: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """dkv and dscore (n, window, head_dim), grad_out being (n, 1, head_dim)."""
    t = grad_out * values * weights
    dscore = fma(-weights, _lane_sum(t, lanes)[:, None], t)
    return grad_out * weights + 0.0, dscore + 0.0


def _lane_sum(terms: Tensor, lanes: int) -> Tensor:
    """Sum of terms (n, window, d) over the window in softmax order, (n, d)."""
    acc = torch.zeros_like(terms[:, :lanes])
    for k in range(0, terms.shape[1], lanes):
        dealt = terms[:, k : k + lanes]
        acc[:, : dealt.shape[1]] += dealt
    return _halving_tree(acc, dim=1)


def _pool_sum(terms: Tensor, lanes: int) -> Tensor:
    """Sum of terms (n, window, d) over the window in pool order, (n, d)."""
    acc = [torch.zeros_like(terms[:, :lanes]) for _ in range(4)]
    for turn, k in enumerate(range(0, terms.shape[1], lanes)):
        dealt = terms[:, k : k + lanes]
        acc[turn % 4][:, : dealt.shape[1]] += dealt
    return _halving_tree(acc[0] + acc[1] + acc[2] + acc[3], dim=1)


def _halving_tree(terms: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, of a power-of-two size: position x takes in position x + half, until one is left."""
    while terms.shape[dim] > 1:
        low, high = terms.chunk(2, dim)
        terms = low + high
    return terms.squeeze(dim)


class _AxisSum:
    """Sum over rows in an order that the rows' global indices alone fix, with compensation.

    A leaf has 32 consecutive rows. Its rows i, i + 32/run, i + 2 * 32/run, ... are added one after another, for each i
    below 32/run, and these sums by a halving tree. Lane l runs over leaves l, l + 32, l + 64, ..., keeping its rounded
    sum and, apart, the sum of the exact errors (two_sum); the lanes combine by a halving tree, errors too, and the
    errors are added last.
    """

    def __init__(self, shape: tuple[int, ...], run: int, device: torch.device) -> None:
        self._run = run
        self._high = torch.zeros((LANES, *shape), dtype=torch.float32, device=device)
        self._low = torch.zeros((LANES, *shape), dtype=torch.float32, device=device)
        self._leaves = 0
        self._rest = torch.zeros((0, *shape), dtype=torch.float32, device=device)

    def add(self, rows: Tensor) -> None:
        """Take in the next rows, (n, *shape); what does not fill a leaf waits for more."""
        rows = torch.cat((self._rest, rows))
        whole = len(rows) // LEAF * LEAF
        self._rest = rows[whole:]
        first, *others = rows[:whole].view(-1, LEAF, *rows.shape[1:]).chunk(self._run, dim=1)
        for other in others:
            first = first + other
        leaves = _halving_tree(first, dim=1)
        while len(leaves):
            lane = self._leaves % LANES
            dealt, leaves = leaves[: LANES - lane], leaves[LANES - lane :]
            lanes = slice(lane, lane + len(dealt))
            self._high[lanes], error = two_sum(self._high[lanes], dealt)
            self._low[lanes] += error
            self._leaves += len(dealt)

    def total(self) -> Tensor:
        """Finish, the rows that are missing from the last leaf being +0; the sum, of `shape`."""
        if len(self._rest):
            self.add(self._rest.new_zeros((LEAF - len(self._rest), *self._rest.shape[1:])))
        high, low = self._high, self._low
        while len(high) > 1:
            high, error = two_sum(*high.chunk(2))
            low_a, low_b = low.chunk(2)
            low = (low_a + low_b) + error
        total = (high + low).squeeze(0)
        # The error of a sum that overflowed is NaN; the sum itself then says Inf.
        return torch.where(torch.isnan(total), high.squeeze(0), total)
