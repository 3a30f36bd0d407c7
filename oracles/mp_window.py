"""One row and column for the `mp` oracle: its results as enclosures, and as ratios of exponential sums."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction
from math import copysign, gcd, inf, isfinite, isnan, ldexp, nan
from typing import NamedTuple

from mpmath.libmp import mpi_add, mpi_div, mpi_mul, mpi_sub

from .enclosure import (
    FP32,
    LOGIT_SCALE,
    START_BITS,
    ZERO,
    Interval,
    Ratio,
    certify,
    enclose,
    exp_interval,
)

SCALE = -133  # bf16 values are integers times 2^-133

Value = Interval | float  # a float is an Inf or a NaN


class Values(NamedTuple):
    """Results of a window: out and dkv in units of 2^SCALE, dscore in units of 2^(2 * SCALE), by valid entry."""

    out: Value
    dkv: list[Value]
    dscore: list[Value]


class Window:
    """The valid entries of one row and column.

    Args:
        entries: their positions in the window.
        kv, score, ape: the values there, exact as Python floats.
        go: the incoming gradient.
    """

    def __init__(self, entries: list[int], kv: list[float], score: list[float], ape: list[float], go: float) -> None:
        logits = [s + b for s, b in zip(score, ape, strict=True)]  # maybe rounded: only the class is used
        self.entries = entries
        self._undefined = any(isnan(x) or x == inf for x in logits) or all(x == -inf for x in logits)
        self._special = None if isfinite(go) and all(map(isfinite, kv)) else (kv, go)
        self._kv = [_integer(v, SCALE) for v in kv]
        self._go = _integer(go, SCALE)
        self._x = [  # in units of 2^LOGIT_SCALE, None for -Inf
            _integer(s, LOGIT_SCALE) + _integer(b, LOGIT_SCALE) if isfinite(x) else None
            for s, b, x in zip(score, ape, logits, strict=True)
        ]

    def values(self) -> Values:
        """The results, as `mp` defines them."""
        if self._undefined:
            lost: list[Value] = [nan] * len(self.entries)
            return Values(nan, lost, lost)
        finite = self._enclosures(START_BITS)
        return finite if self._special is None else self._specials(finite, *self._special)

    def _enclosures(self, bits: int) -> Values:
        """By way of the mean of the entries at the maximum, so that nothing cancels where these take all the weight.

        With n such entries of sum v, c_k = n kv_k - v and moved = sum p_k c_k: out = (v + moved) / n and
        dscore_k = go p_k (c_k - moved) / n.
        """
        top = max(x for x in self._x if x is not None)
        at_top = [v for x, v in zip(self._x, self._kv, strict=True) if x == top]
        n, v = len(at_top), sum(at_top)
        exps = {x: ZERO if x is None else exp_interval(x - top, bits) for x in set(self._x)}
        e = [exps[x] for x in self._x]
        c = [enclose(n * value - v, bits) for value in self._kv]
        den, moved = ZERO, ZERO
        for e_k, c_k in zip(e, c, strict=True):
            den = mpi_add(den, e_k, bits)
            moved = mpi_add(moved, mpi_mul(e_k, c_k, bits), bits)
        moved = mpi_div(moved, den, bits)
        share = mpi_div(enclose(self._go, bits), den, bits)
        dkv = [mpi_mul(e_k, share, bits) for e_k in e]
        dscore = [mpi_mul(g, mpi_sub(c_k, moved, bits), bits) for g, c_k in zip(dkv, c, strict=True)]
        out = mpi_add(enclose(v, bits), moved, bits)
        if n > 1:
            by = enclose(n, bits)
            out, dscore = mpi_div(out, by, bits), [mpi_div(d, by, bits) for d in dscore]
        return Values(out, list(dkv), list(dscore))

    def _specials(self, finite: Values, kv: list[float], go: float) -> Values:
        """`finite`, but for what an Inf or NaN among kv and go reaches; there only the signs of other values count."""
        den = self._counts()
        p = [float(x is not None and certify([({x: 1}, den)], 0, FP32) > 0) for x in self._x]
        v, g = [_sign(value) for value in kv], _sign(go)
        t = [g * v_k * p_k for v_k, p_k in zip(v, p, strict=True)]
        s = sum(t)
        return Values(
            finite.out if all(map(isfinite, v)) else sum(v_k * p_k for v_k, p_k in zip(v, p, strict=True)),
            finite.dkv if isfinite(g) else [g * p_k for p_k in p],
            [t_k - p_k * s for t_k, p_k in zip(t, p, strict=True)],
        )

    def out_ratio(self) -> list[Ratio]:
        """That of sum e_k kv_k to sum e_k, with e = exp(x)."""
        return [(self._sums(), self._counts())]

    def dkv_ratio(self, n: int) -> list[Ratio]:
        """That of go e_n to sum e_k, for the n-th valid entry."""
        x = self._x[n]
        return [({} if x is None else {x: self._go}, self._counts())]

    def dscore_ratio(self, n: int) -> list[Ratio]:
        """That of go e_n sum_k e_k (kv_n - kv_k) to (sum e_k)^2, for the n-th valid entry."""
        return [(self._dscore_numerator(n), _square(self._counts()))]

    def _dscore_numerator(self, n: int) -> dict[int, int]:
        x, kv, sums = self._x[n], self._kv[n], self._sums()
        if x is None:
            return {}
        return {x + y: self._go * (count * kv - sums[y]) for y, count in self._counts().items()}

    def _counts(self) -> dict[int, int]:
        """How many entries have each logit: the sum of e_k."""
        return Counter(x for x in self._x if x is not None)

    def _sums(self) -> dict[int, int]:
        """The sum of kv over the entries of each logit: the sum of e_k kv_k."""
        sums: dict[int, int] = defaultdict(int)
        for x, v in zip(self._x, self._kv, strict=True):
            if x is not None:
                sums[x] += v
        return sums


def dape_ratios(windows: Iterable[Window], entry: int) -> list[Ratio]:
    """The dscore of one window position, summed over the windows: one ratio for each denominator up to a factor."""
    merged: dict[tuple[tuple[int, int], ...], dict[int, Fraction]] = {}
    for window in windows:
        if entry not in window.entries:
            continue
        counts = window._counts()
        top, common = max(counts), gcd(*counts.values())
        key = tuple(sorted((x - top, count // common) for x, count in counts.items()))
        total = merged.setdefault(key, defaultdict(Fraction))
        for x, c in window._dscore_numerator(window.entries.index(entry)).items():
            total[x - 2 * top] += Fraction(c, common**2)
    return [(num, _square(dict(key))) for key, num in merged.items() if any(num.values())]


def add(a: Value, b: Value) -> Value:
    """The sum of two results, as IEEE has it where one is Inf or NaN."""
    if isinstance(a, float) or isinstance(b, float):
        return (a if isinstance(a, float) else 0.0) + (b if isinstance(b, float) else 0.0)
    total: Interval = mpi_add(a, b, START_BITS)
    return total


def _square(terms: dict[int, int]) -> dict[int, int]:
    squared: dict[int, int] = defaultdict(int)
    for x, a in terms.items():
        for y, b in terms.items():
            squared[x + y] += a * b
    return squared


def _integer(value: float, scale: int) -> int:
    """The integer value / 2^scale, or 0 for Inf and NaN."""
    return int(ldexp(value, -scale)) if isfinite(value) else 0


def _sign(value: float) -> float:
    """-1, 0 or 1 for a finite value, else the value."""
    return (copysign(1.0, value) if value else 0.0) if isfinite(value) else value
