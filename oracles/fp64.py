"""The closed form in float64: forward and backward without autograd, a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import integer, require
from .fp32 import two_sum
from .inputs import Inputs, Result
from .windows import gather, logits, scatter, scatter_ape, valid

_LEAF = 32  # rows summed before compensation; a chunk is a whole number of leaves


@torch.no_grad()
def fp64(inputs: Inputs, *, chunk_bytes: int = 2**26) -> Result:
    """All four outputs in float64, from `inputs` taken as exact, on their device.

    With x = score + ape, p = softmax(x) and go = grad_out over each window (invalid entries: x = -inf, kv = 0):

        out = sum p kv        grad_kv = go p        grad_score = p (go kv - S),  S = sum p go kv

    and grad_ape[r, c] sums grad_score over the rows (not over invalid entries), which is the chain rule through
    softmax written out. Every operation is an IEEE operation in float64, so Inf and NaN come out as the formulas give
    them; score + ape that overflows fp32 is finite here. Gradients of slots that no row consumes are +0, and -0
    becomes +0 throughout.

    The result does not depend on `chunk_bytes`: windows are summed entry by entry, grad_ape over fixed leaves of 32
    rows whose sums are added with their rounding errors kept. Its error is a few units of 2^-53 times the sum of
    magnitudes, for any number of rows.

    Args:
        inputs: the tensors of a problem.
        chunk_bytes: size of one float64 tensor over the windows of a chunk, at least that of 32 rows. Some
            seven of these live at once, beside the outputs.

    Raises:
        ValueError: `inputs` are none, or `chunk_bytes` is no integer of at least 1.
    """
    require("inputs", inputs, Inputs)
    chunk_bytes = integer("chunk_bytes", chunk_bytes, 1)
    p, real = inputs.problem, inputs.problem.rows
    out = inputs.kv.new_empty((p.total_comp, p.head_dim), dtype=torch.float64)
    grad_kv = torch.zeros_like(inputs.kv, dtype=torch.float64)
    grad_score = torch.zeros_like(inputs.score, dtype=torch.float64)
    ape = inputs.ape.double()
    dape = _Compensated(ape.new_zeros((p.window, p.head_dim)))
    leaf_bytes = 8 * _LEAF * p.window * p.head_dim
    step = _LEAF * max(1, chunk_bytes // leaf_bytes)
    for start in range(0, p.total_comp, step):
        rows = slice(start, min(start + step, p.total_comp))
        kv = gather(inputs.kv, p, 0.0, rows).double()
        weights = _softmax(logits(inputs.score, ape, p, rows))
        out[rows] = _window_sum(weights * kv)
        if start >= real:
            continue
        rows = slice(start, min(rows.stop, real))
        kv, weights = kv[: rows.stop - start], weights[: rows.stop - start]
        go = inputs.grad_out[rows, None].double()
        scatter((go * weights).add_(0.0), p, grad_kv, rows)
        kv *= go
        kv -= _window_sum(weights * kv)[:, None]
        kv *= weights
        dscore = kv.add_(0.0).masked_fill_(~valid(p, kv.device, rows), 0.0)  # NaN weights fill a whole window
        scatter(dscore, p, grad_score, rows)
        for leaf in _leaves(dscore):
            dape.add(leaf)
    return Result(out, grad_kv, grad_score, scatter_ape(dape.total(), p))


def _softmax(x: Tensor) -> Tensor:
    """Softmax over dim 1, in place."""
    x -= x.amax(dim=1, keepdim=True)
    x.exp_()
    x /= _window_sum(x)[:, None]
    return x


def _window_sum(x: Tensor) -> Tensor:
    """The sum over dim 1, entry by entry from +0; on CUDA the order of torch.sum depends on how many rows there are."""
    total = torch.zeros_like(x[:, 0])
    for k in range(x.shape[1]):
        total += x[:, k]
    return total


def _leaves(x: Tensor) -> Tensor:
    """Sums over each `_LEAF` rows of x (n, window, head_dim), by halving; a last short leaf is filled up with +0."""
    missing = -len(x) % _LEAF
    if missing:
        x = torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))
    x = x.view(-1, _LEAF, *x.shape[1:])
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


class _Compensated:
    """A running sum that keeps its rounding errors, each found exactly."""

    def __init__(self, zero: Tensor) -> None:
        self._high, self._low = zero, zero.clone()

    def add(self, term: Tensor) -> None:
        self._high, error = two_sum(self._high, term)
        self._low += error

    def total(self) -> Tensor:
        """The sum; where it is Inf or NaN the errors are NaN and left out."""
        return torch.where(self._high.isfinite(), self._high + self._low, self._high)
