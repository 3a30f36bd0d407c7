"""`make_inputs`: the tensors of a problem from a seed and a named distribution, the same bits everywhere.

The only source of randomness is the raw output of numpy's Philox, a counter-based generator whose stream is fixed by
its key. Raw words become values by integer arithmetic and by fp32 operations that are exact, followed by one
rounding to bf16, done on the bits. No math library, processor or library version has a say in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import one_of, require
from .inputs import Inputs
from .problem import Problem, Slot

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

DISTRIBUTIONS: tuple[str, ...] = ("normal", "wide", "peaked", "ties", "masked", "nonfinite", "exact")

_OPERANDS = ("kv", "score", "ape", "grad_out", "windows")  # "windows": what is drawn per (row, column) of out
_FIELDS = ("value", "exponent", "rare", "special")
_BLOCK = 2**18  # elements drawn at a time; keeps the raw words in cache and the memory flat
_NEG_INF = np.uint16(0xFF80)  # bf16
_EXACT_LOG2 = 3  # `exact`: at most 2^3 entries share the maximum of a window
_EXACT_LOGITS = np.array([0, 1, -1, 2, -2, 4, -4, 8, -8], dtype=np.float32)
_EXACT_ROWS = 2**16  # `exact`: rows whose gradient may be nonzero


def make_inputs(
    problem: Problem, seed: int = 0, distribution: str = "normal", device: torch.device | str = "cpu"
) -> Inputs:
    """Draw the tensors of `problem`; the same arguments give the same bits on every machine.

    Values are drawn token by token and row by row, so a larger `token_capacity` or `row_capacity` leaves those of
    real tokens and rows as they are; padding tokens and the gradients of padding rows carry noise of the same kind.

    - normal: kv, grad_out ~ N(0, 1), score ~ 1.5 N(0, 1), ape ~ 0.25 N(0, 1), as sums of twelve uniforms.
    - wide: kv and grad_out times 2^e, e uniform in -60..60; score and ape times 2^e, e in -60..3, and one score in
      16 with e up to 60. All results are finite in fp32.
    - peaked: score ~ 64 N(0, 1). Softmax is nearly one-hot and most weights underflow to 0 in fp32.
    - ties: few distinct values, -0 among them, and many equal maxima.
    - masked: normal, with 3 scores in 10 at -inf, and in every fourth column of out 1 window in 4 wholly so (its
      results are NaN, and so is that column of grad_ape).
    - nonfinite: normal, but in every fourth column of out Inf, -Inf and NaN are sprinkled over all four operands,
      with scores of the largest bf16 and ape of 2^121 too, whose sum overflows fp32. The other columns are finite.
    - exact: every correct algorithm gives the same bits, one that rounds each step to bf16 included. Per row
      and column 2^m entries of the window, m <= 3, share the logit c and the others are -inf, so each weight is 2^-m
      or 0 without rounding. kv are integers up to 4, grad_out up to 2, ape up to 8, and score = c - ape.
      Then out = K / 2^m with |K| <= 32; grad_kv = go / 2^m; and as a sum over the chosen entries,
      grad_score = go * sum(kv_k - kv_i) / 4^m with the integer at most 2 * 7 * 8 = 112. All of these and every
      partial sum and product have at most 8 significant bits. grad_score is at most 4 in steps of 1/64, so a
      grad_ape over 2^16 rows needs 24 bits and is exact in fp32 in any order of summation: real rows past 2^16 get
      grad_out = 0. c is 0 or a power of two, so that c * log2(e) does not round even where exp is evaluated as
      exp2(fma(x, log2(e), -round(max * log2(e)))). Padding rows are exact too.

    Args:
        problem: the geometry.
        seed: an integer in [0, 2^64).
        distribution: one of `DISTRIBUTIONS`.
        device: where the tensors go; they are made on the CPU.

    Raises:
        ValueError: for what is no Problem, an unknown distribution, a seed that is no such integer, or a device that
            there is not.
    """
    require("problem", problem, Problem)
    _check_device(device)
    one_of("distribution", distribution, DISTRIBUTIONS)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed!r}, need an integer in [0, 2**64)")
    draws = _recipe(distribution, problem)
    per_token = (problem.total_tokens, problem.width)
    streams = {name: _Stream(int(seed), name) for name in _OPERANDS}
    kv = _draw_bf16(streams["kv"], draws["kv"], per_token)
    score = _draw_bf16(streams["score"], draws["score"], per_token)
    ape = draws["ape"](streams["ape"], (problem.ratio, problem.width))
    grad_out = _draw_bf16(streams["grad_out"], draws["grad_out"], (problem.total_comp, problem.head_dim))
    if distribution == "masked":
        _mask_windows(problem, score, streams["windows"])
    if distribution == "exact":
        _choose_entries(problem, score, ape, streams["windows"])
        grad_out[_EXACT_ROWS : problem.rows] = 0
    return Inputs(
        problem,
        kv=_as_bf16(kv),
        score=_as_bf16(score),
        ape=torch.from_numpy(ape),
        grad_out=_as_bf16(grad_out),
        cu_seqlens=torch.from_numpy(problem.cu_seqlens.copy()),
        cu_seqlens_comp=torch.from_numpy(problem.cu_seqlens_comp.copy()),
        seed=int(seed),
        distribution=distribution,
    ).to(device)


class _Stream:
    """The random bits of one operand.

    Each field has a Philox stream of its own and takes a fixed number of words per element, so that an element's value
    depends on its place alone and not on how many are drawn at a time.
    """

    def __init__(self, seed: int, operand: str) -> None:
        number = len(_FIELDS) * _OPERANDS.index(operand)
        keys = {field: np.array([seed, number + i], dtype=np.uint64) for i, field in enumerate(_FIELDS)}
        self._fields = {field: np.random.Philox(key=key) for field, key in keys.items()}

    def words(self, field: str, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        return self._fields[field].random_raw(int(np.prod(shape))).reshape(shape)

    def below(self, field: str, shape: tuple[int, ...], bound: int) -> Ints:
        """Integers in [0, bound), one word each."""
        return _scale(self.words(field, shape) >> np.uint64(32), bound)

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Irwin-Hall normals: twelve 16-bit uniforms less their mean, in units of 2^-16.

        Mean 0, variance 1 - 2^-32, at most 6 in magnitude, 19 significant bits.
        """
        words = self.words("value", (*shape, 3))
        low = np.uint64(0x0000FFFF0000FFFF)
        pairs = (words & low) + ((words >> np.uint64(16)) & low)  # two sums at once, in the halves of a word
        halves = pairs[..., 0] + pairs[..., 1] + pairs[..., 2]
        total = (halves & np.uint64(0xFFFFFFFF)) + (halves >> np.uint64(32))
        centred = total.astype(np.int64) - 12 * 65535 // 2
        return centred.astype(np.float32) * np.float32(2.0**-16)


Draw = Callable[[_Stream, tuple[int, int]], Floats]


def _recipe(distribution: str, problem: Problem) -> dict[str, Draw]:
    """How each operand is drawn, before what `masked` and `exact` do to whole windows."""
    draws: dict[str, Draw] = {
        "kv": partial(_normal, 1.0),
        "score": partial(_normal, 1.5),
        "ape": partial(_normal, 0.25),
        "grad_out": partial(_normal, 1.0),
    }
    if distribution == "wide":
        draws["kv"] = draws["grad_out"] = partial(_scaled, draws["kv"], 60, 60)
        draws["score"] = partial(_scaled, draws["score"], 3, 60)
        draws["ape"] = partial(_scaled, draws["ape"], 3, 3)
    elif distribution == "peaked":
        draws["score"] = partial(_normal, 64.0)
    elif distribution == "ties":
        draws["kv"] = draws["grad_out"] = partial(_pick, [-1.0, -0.5, -0.0, 0.0, 0.5, 1.0])
        draws["score"] = draws["ape"] = partial(_pick, [-0.5, 0.0, 0.5])
    elif distribution == "masked":
        draws["score"] = partial(_masked, draws["score"])
    elif distribution == "nonfinite":
        inf, per_entry = [np.inf, -np.inf, np.nan], 8 * problem.window  # hits 1 window in 8, whatever its length
        big, bias = (2 - 2.0**-7) * 2.0**127, 2.0**121
        sprinkle = partial(_sprinkled, head_dim=problem.head_dim)
        draws["kv"] = partial(sprinkle, draws["kv"], inf, per_entry)
        draws["score"] = partial(sprinkle, draws["score"], [*inf, big, -big, big, -big], per_entry)
        draws["ape"] = partial(sprinkle, draws["ape"], [*inf, bias, -bias, bias, -bias], per_entry // 4)
        draws["grad_out"] = partial(sprinkle, draws["grad_out"], inf, 8)
    elif distribution == "exact":
        draws["kv"] = partial(_pick, np.arange(-4, 5))
        draws["score"] = draws["ape"] = partial(_pick, np.arange(-8, 9))
        draws["grad_out"] = partial(_pick, np.arange(-2, 3))
    return draws


def _normal(scale: float, stream: _Stream, shape: tuple[int, int]) -> Floats:
    return stream.normal(shape) * np.float32(scale)


def _scaled(draw: Draw, top: int, rare_top: int, stream: _Stream, shape: tuple[int, int]) -> Floats:
    """Times 2^e, e uniform in -60..top, but in -60..rare_top for one element in 16."""
    exponent = stream.words("exponent", shape) >> np.uint64(32)
    rare = stream.below("rare", shape, 16) == 0
    biased = np.where(rare, _scale(exponent, 61 + rare_top), _scale(exponent, 61 + top)) + (127 - 60)
    return draw(stream, shape) * (biased << 23).astype(np.uint32).view(np.float32)


def _pick(values: list[float] | Ints, stream: _Stream, shape: tuple[int, int]) -> Floats:
    return np.asarray(values, dtype=np.float32)[stream.below("value", shape, len(values))]


def _masked(draw: Draw, stream: _Stream, shape: tuple[int, int]) -> Floats:
    return np.where(stream.below("rare", shape, 10) < 3, np.float32(-np.inf), draw(stream, shape))


def _sprinkled(
    draw: Draw, specials: list[float], rarity: int, stream: _Stream, shape: tuple[int, int], *, head_dim: int
) -> Floats:
    """One element in `rarity` replaced by a special, in the columns that feed every fourth one of out."""
    hit = (stream.below("rare", shape, rarity) == 0) & _every_fourth(shape[1], head_dim)
    special = np.asarray(specials, dtype=np.float32)[stream.below("special", shape, len(specials))]
    return np.where(hit, special, draw(stream, shape))


def _every_fourth(width: int, head_dim: int) -> NDArray[np.bool_]:
    """Which of `width` columns feed every fourth column of out, column 0 among them."""
    return np.equal(np.arange(width) % head_dim % 4, 0)


def _mask_windows(problem: Problem, score: NDArray[np.uint16], stream: _Stream) -> None:
    """Set one window in 4 of every fourth column wholly to -inf, in place."""
    for start, shape in _blocks((problem.rows, problem.head_dim)):
        row, column = np.nonzero((stream.below("rare", shape, 4) == 0) & _every_fourth(shape[1], problem.head_dim))
        row += start
        for entry in range(problem.window):
            valid = ~problem.row_is_first[row] if entry < problem.window - problem.ratio else slice(None)
            token, at = _slot(problem, problem.row_token[row], column, np.full_like(row, entry))
            score[token[valid], at[valid]] = _NEG_INF


def _choose_entries(problem: Problem, score: NDArray[np.uint16], ape: Floats, stream: _Stream) -> None:
    """Give 2^m valid entries of each window the same logit and all others -inf, in place (`exact` in `make_inputs`).

    The chosen entries are an arithmetic progression, cyclic in the window, from a random start with a random step.
    """
    first_token, low, count = _candidates(problem)
    halves = score.reshape(problem.total_tokens, problem.coff, problem.head_dim)
    halves[problem.slots == Slot.CONSUMED] = _NEG_INF
    if count[0]:
        halves[: problem.ratio, -1] = _NEG_INF
    powers = 2 ** np.arange(1, _EXACT_LOG2 + 1)
    for begin, shape in _blocks((len(count), problem.head_dim)):
        rows = slice(begin, begin + shape[0])
        words = stream.words("value", shape)
        pick, stride, share, level = ((words >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
        n = count[rows, None]
        log2 = _scale(share, 1 + (n >= powers).sum(axis=1, keepdims=True), 16)
        start, step = _scale(pick, n, 16), 1 + _scale(stride, n >> log2, 16)
        logit = _EXACT_LOGITS[_scale(level, len(_EXACT_LOGITS), 16)]
        for i in range(2**_EXACT_LOG2):
            row, column = np.nonzero((i < 1 << log2) & (n > 0))
            entry = low[rows][row] + (start[row, column] + i * step[row, column]) % n[row, 0]
            token, at = _slot(problem, first_token[rows][row], column, entry)
            score[token, at] = _bf16_bits(logit[row, column] - ape[entry % problem.ratio, at])


def _candidates(problem: Problem) -> tuple[Ints, Ints, Ints]:
    """First own token, first entry and number of entries that `exact` chooses from, for 1 + rows windows.

    Window 0 is that of the padding rows, tokens [0, ratio) as a first block. Where the pack starts with a whole block
    it is row 0's and nothing is left to choose. Else it may straddle short segments and row 0's block: it then
    chooses among the short segments' tokens, which no row consumes, and row 0 among its tokens at or past `ratio`.
    """
    ratio, rows = problem.ratio, problem.rows
    overlap = problem.window - ratio
    first = problem.row_is_first[:rows]
    first_token = np.concatenate([[0], problem.row_token[:rows]])
    low = np.concatenate([[overlap], np.where(first, overlap, 0)])
    count = np.concatenate([[0], np.where(first, ratio, problem.window)])
    head = int(first_token[1]) if rows else problem.total_tokens  # tokens before the first consumed one
    count[0] = min(head, ratio, problem.tokens or problem.total_tokens)
    if rows and 0 < head < ratio:
        low[1], count[1] = overlap + ratio - head, head
    return first_token, low, count


def _slot(problem: Problem, first_token: Ints, column: Ints, entry: Ints) -> tuple[Ints, Ints]:
    """Token and column of kv that window entries (0 to window - 1) of out[., column] read."""
    overlap = problem.window - problem.ratio
    return first_token + entry - overlap, column + np.where(entry < overlap, 0, problem.width - problem.head_dim)


def _blocks(shape: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
    """(rows, columns) cut into blocks of whole rows: the first row and the shape of each."""
    rows, columns = shape
    size = max(1, _BLOCK // columns)
    return [(start, (min(size, rows - start), columns)) for start in range(0, rows, size)]


def _scale(bits: NDArray[np.uint64], bound: int | Ints, width: int = 32) -> Ints:
    """`width`-bit integers mapped onto [0, bound)."""
    return (bits.astype(np.int64) * bound) >> width


def _draw_bf16(stream: _Stream, draw: Draw, shape: tuple[int, int]) -> NDArray[np.uint16]:
    bits = np.empty(shape, dtype=np.uint16)
    for start, block in _blocks(shape):
        bits[start : start + block[0]] = _bf16_bits(draw(stream, block))
    return bits


def _bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """fp32 rounded to nearest even bf16, as bits. Done here because torch's bits for NaN vary with the processor."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _as_bf16(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _check_device(device: torch.device | str) -> None:
    try:
        there = torch.device(device).type == "cpu" or (
            torch.device(device).type == "cuda" and (torch.device(device).index or 0) < torch.cuda.device_count()
        )
    except (RuntimeError, TypeError):
        there = False
    if not there:
        raise ValueError(
            f"device: got {str(device)!r}, need cpu, or one of this machine's {torch.cuda.device_count()} cuda"
        )
