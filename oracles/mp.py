"""`mp`: every output correctly rounded, and proven so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import one_of, require
from .enclosure import BF16, FP32, FP64, ZERO, Format, Ratio, certify, round_float, round_interval
from .inputs import Inputs, Result
from .mp_window import SCALE, Value, Window, add, dape_ratios
from .windows import gather, gather_ape, scatter, scatter_ape, valid

_FORMATS = {torch.bfloat16: BF16, torch.float32: FP32, torch.float64: FP64}
_INTEGERS: dict[torch.dtype, type[np.signedinteger[Any]]] = {
    torch.bfloat16: np.int16,
    torch.float32: np.int32,
    torch.float64: np.int64,
}


def mp(inputs: Inputs, *, output_dtype: torch.dtype = torch.bfloat16) -> Result:
    """The closed formulas in real arithmetic, each element rounded once, to nearest even.

    With x_k = score_k + ape_k (not rounded), p = softmax(x) and go the incoming gradient:
    out = sum p_k kv_k, grad_kv = go p_k, grad_score = go p_k (kv_k - out), grad_ape sums grad_score over the rows.

    What is proven: each value is enclosed by interval arithmetic at 96 bits and accepted where both ends round alike.
    Elsewhere (ties, strong cancellation) `enclosure.certify` decides whether the value is rational, rounds it exactly
    if so, and else raises the precision. The decision is complete for out, grad_kv and grad_score. For grad_ape, rows
    with proportional denominators are first added up exactly, which finds rational rows and equal windows that cancel;
    what it may miss is a tie made up by irrational rows of different denominators. That ends in the error below, as
    does a value that 24576 bits do not tell from a tie; no value is ever guessed.

    Zeros are +0, also where a negative value rounds to zero, which IEEE rounding and `eager` make -0. Overflow is to
    Inf as in IEEE arithmetic, and only of the final value: finite inputs have finite exact results, also where score +
    ape or go * kv overflows fp32 and fp32 arithmetic gives Inf or NaN.

    Inf and NaN among the inputs give what IEEE arithmetic makes of the formulas with t_k = go kv_k p_k, S = sum t_k and
    grad_score = t_k - p_k S, where p_k counts as zero if its fp32 rounding is (so Inf times it is NaN):

    - a NaN or +Inf logit, or all logits -Inf: NaN in out and in all gradients of the window;
    - a -Inf logit among others: weight 0, so +0 gradients, but out is NaN if its kv is Inf or NaN;
    - an Inf or NaN kv or go: Inf or NaN in all that depends on it, and no more.

    Global precision settings of mpmath are neither read nor written, and calls may run in parallel.

    Cost: some 30 us on one core per window entry of one row and column, 40 us without gmpy2, for both gradients and its
    share of out and grad_ape; 256 tokens at ratio 4, coff 2, head_dim 64 take 1 s. An element that needs `certify` adds
    0.5 ms in a window of 8 entries, and at 128 entries 3 ms, but 100 ms for grad_score and for each row of grad_ape.

    Args:
        inputs: tensors on any device.
        output_dtype: the format of out, grad_kv and grad_score: bf16, fp32 or fp64.

    Returns:
        out, grad_kv and grad_score in `output_dtype`, grad_ape in fp32, or fp64 where they are; on the device of
        `inputs`, and +0 in slots that no row consumes.

    Raises:
        ValueError: `inputs` are none, or `output_dtype` is another.
        ArithmeticError: where 24576 bits do not settle a result (see above).
    """
    require("inputs", inputs, Inputs)
    one_of("output_dtype", output_dtype, _FORMATS)
    p, to = inputs.problem, _FORMATS[output_dtype]
    ape_dtype = torch.promote_types(output_dtype, torch.float32)
    out = np.zeros((p.total_comp, p.head_dim), dtype=np.int64)
    dkv = np.zeros((p.rows, p.window, p.head_dim), dtype=np.int64)
    dscore = np.zeros_like(dkv)
    dape = np.zeros((p.window, p.head_dim), dtype=np.int64)
    for j, windows in enumerate(_columns(inputs.to("cpu"))):
        sums: list[Value] = [ZERO] * p.window
        for i, window in enumerate(windows):
            values = window.values()
            out[i, j] = _code(values.out, window.out_ratio, SCALE, to)
            if i == p.rows:
                break
            for n, k in enumerate(window.entries):
                dkv[i, k, j] = _code(values.dkv[n], partial(window.dkv_ratio, n), SCALE, to)
                dscore[i, k, j] = _code(values.dscore[n], partial(window.dscore_ratio, n), 2 * SCALE, to)
                sums[k] = add(sums[k], values.dscore[n])
        for k, total in enumerate(sums):
            dape[k, j] = _code(total, partial(dape_ratios, windows[: p.rows], k), 2 * SCALE, _FORMATS[ape_dtype])
    out[p.rows :] = out[p.rows : p.rows + 1]  # every padding row pools the same tokens
    grads = [torch.zeros(inputs.kv.shape, dtype=output_dtype, device="cpu") for _ in range(2)]
    for codes, grad in zip((dkv, dscore), grads, strict=True):
        scatter(_tensor(codes, output_dtype), p, grad, slice(0, p.rows))
    grad_ape = scatter_ape(_tensor(dape, ape_dtype), p)
    return Result(_tensor(out, output_dtype), grads[0], grads[1], grad_ape).to(inputs.device)


def _columns(inputs: Inputs) -> Iterator[list[Window]]:
    """The windows of one column after the other: of all real rows, then of a padding row if there are any."""
    p = inputs.problem
    rows = slice(0, min(p.rows + 1, p.total_comp))
    kv, score = (gather(t.double(), p, 0.0, rows).permute(2, 0, 1) for t in (inputs.kv, inputs.score))
    ape = gather_ape(inputs.ape.double(), p).T
    go = inputs.grad_out[rows].double().T.contiguous()
    entries = [[k for k, held in enumerate(row) if held] for row in valid(p, "cpu", rows)[..., 0].tolist()]
    for j in range(p.head_dim):
        b = ape[j].tolist()
        columns = zip(entries, kv[j].tolist(), score[j].tolist(), go[j].tolist(), strict=True)
        yield [Window(at, [v[k] for k in at], [s[k] for k in at], [b[k] for k in at], g) for at, v, s, g in columns]


def _code(value: Value, ratios: Callable[[], list[Ratio]], scale: int, to: Format) -> int:
    """The code of a result; `ratios` says exactly what it is, where its enclosure does not settle it."""
    if isinstance(value, float):
        return round_float(value, to)
    code = round_interval(value, scale, to)
    return certify(ratios(), scale, to) if code is None else code


def _tensor(codes: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
    """Codes as the values they stand for: as bits, the sign is the lowest integer of the same size."""
    integer = _INTEGERS[dtype]
    bits = np.where(codes < 0, np.iinfo(integer).min - codes, codes)
    return torch.from_numpy(bits.astype(integer)).view(dtype)
