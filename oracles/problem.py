"""The geometry of one compressor problem, in plain Python and NumPy.

A `Problem` says which tokens feed which pooled row and which gradient slots no row consumes. It knows no
tensors and no arithmetic, so every oracle, kernel adapter and suite can lean on it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checks import integer

INT32_MAX = 2**31 - 1


class Slot(enum.IntEnum):
    """What becomes of one (token, column half) of kv and score.

    `CONSUMED` slots feed exactly one row; gradients of all others are exact zeros.
    """

    CONSUMED = 0
    LAST_BLOCK = 1  # coff 2: first-half columns of a segment's last whole block; no next block reads them
    TAIL = 2  # the last `len % ratio` tokens of a segment that has at least one block
    SHORT = 3  # every token of a segment shorter than `ratio`
    PADDING = 4  # tokens at or past cu_seqlens[-1]


class WindowSlot(NamedTuple):
    """One entry of a row's window: `kv[token, column]` and `score[token, column]` with `ape[ape_row, column]`."""

    token: int
    column: int
    ape_row: int


@dataclass(frozen=True)
class Problem:
    """One packed batch and one configuration of the compressor.

    Args:
        lens: tokens of each of the B segments; zeros and segments shorter than `ratio` are allowed, and so is B = 0.
        ratio: tokens a row pools, at least 1.
        coff: 1 (a row pools its own block) or 2 (overlap: the previous block's first-half columns too).
        head_dim: columns of a pooled row; kv and score have `coff * head_dim`.
        row_capacity: rows of out and grad_out; at least the sum of `len // ratio`, which is also the default.
        token_capacity: tokens of kv and score; at least `sum(lens)`, which is also the default.

    Raises:
        ValueError: naming the field, the value and what is needed. Padding rows pool tokens [0, ratio), so a
            problem that has some needs `ratio` tokens.
    """

    lens: tuple[int, ...]
    ratio: int
    coff: int
    head_dim: int
    row_capacity: int | None = None
    token_capacity: int | None = None

    def __post_init__(self) -> None:
        # Bytes are a sequence of integers to Python, and text to whoever passes them.
        if isinstance(self.lens, str | bytes | bytearray | memoryview) or not isinstance(self.lens, Sequence):
            raise ValueError(f"lens: got {self.lens!r}, need a sequence of segment lengths")
        object.__setattr__(self, "lens", tuple(integer(f"lens[{i}]", v, 0) for i, v in enumerate(self.lens)))
        for name, least in (("ratio", 1), ("coff", 1), ("head_dim", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        if self.coff > 2:
            raise ValueError(f"coff: got {self.coff}, need 1 or 2")
        for name, least, what in (
            ("row_capacity", self.rows, "rows"),
            ("token_capacity", self.tokens, "tokens"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            value = integer(name, value, 0)
            if value < least:
                raise ValueError(f"{name}: got {value}, need at least the {least} {what} of lens")
            object.__setattr__(self, name, value)
        for name, size, what in (
            ("token_capacity", self.total_tokens, "tokens"),
            ("row_capacity", self.total_comp, "rows"),
            ("head_dim", self.width, "columns"),
            ("ratio", self.window, "window entries"),
        ):
            if size > INT32_MAX:
                raise ValueError(f"{name}: got {size} {what}, need at most {INT32_MAX} (int32 offsets)")
        if self.total_comp > self.rows and self.total_tokens < self.ratio:
            raise ValueError(
                f"token_capacity: got {self.total_tokens} tokens, need at least ratio = {self.ratio}: "
                f"the {self.total_comp - self.rows} padding rows pool tokens [0, ratio)"
            )

    @cached_property
    def tokens(self) -> int:
        """Tokens of all segments, cu_seqlens[-1]."""
        return sum(self.lens)

    @cached_property
    def rows(self) -> int:
        """Rows of all segments, cu_seqlens_comp[-1]."""
        return sum(n // self.ratio for n in self.lens)

    @property
    def total_tokens(self) -> int:
        """Rows of the kv and score tensors, capacity included."""
        return self.tokens if self.token_capacity is None else self.token_capacity

    @property
    def total_comp(self) -> int:
        """Rows of the out and grad_out tensors, capacity included."""
        return self.rows if self.row_capacity is None else self.row_capacity

    @property
    def width(self) -> int:
        """Columns of kv, score and ape: `coff * head_dim`."""
        return self.coff * self.head_dim

    @property
    def window(self) -> int:
        """Entries of one row's window: `coff * ratio`."""
        return self.coff * self.ratio

    @cached_property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Token offsets of the segments, shape (B+1,), int32."""
        return _offsets(np.asarray(self.lens, dtype=np.int64))

    @cached_property
    def cu_seqlens_comp(self) -> NDArray[np.int32]:
        """Row offsets of the segments, shape (B+1,), int32."""
        return _offsets(np.asarray(self.lens, dtype=np.int64) // self.ratio)

    @cached_property
    def row_segment(self) -> NDArray[np.int64]:
        """Segment of each row, shape (total_comp,), int64; -1 for padding rows."""
        segment = np.full(self.total_comp, -1, dtype=np.int64)
        segment[: self.rows] = np.repeat(np.arange(len(self.lens)), np.diff(self.cu_seqlens_comp))
        return segment

    @cached_property
    def row_token(self) -> NDArray[np.int64]:
        """First own token of each row, shape (total_comp,), int64; 0 for padding rows."""
        token = np.zeros(self.total_comp, dtype=np.int64)
        seg = self.row_segment[: self.rows]
        block = np.arange(self.rows) - self.cu_seqlens_comp[seg]
        token[: self.rows] = self.cu_seqlens[seg] + block * self.ratio
        return token

    @cached_property
    def row_is_first(self) -> NDArray[np.bool_]:
        """Whether a row is its segment's first block, shape (total_comp,), bool; true for padding rows."""
        first = np.ones(self.total_comp, dtype=np.bool_)
        seg = self.row_segment[: self.rows]
        first[: self.rows] = np.arange(self.rows) == self.cu_seqlens_comp[seg]
        return first

    @cached_property
    def slots(self) -> NDArray[np.uint8]:
        """The `Slot` of every (token, column half), shape (total_tokens, coff), uint8."""
        slots = np.full((self.total_tokens, self.coff), Slot.PADDING, dtype=np.uint8)
        lens = np.asarray(self.lens, dtype=np.int64)
        seg = np.repeat(np.arange(len(self.lens)), lens)
        blocks = (lens // self.ratio)[seg]
        block = (np.arange(self.tokens) - self.cu_seqlens[seg]) // self.ratio
        own = np.where(block < blocks, Slot.CONSUMED, Slot.TAIL)
        slots[: self.tokens] = np.where(blocks == 0, Slot.SHORT, own)[:, None]
        if self.coff == 2:
            slots[: self.tokens][(blocks > 0) & (block == blocks - 1), 0] = Slot.LAST_BLOCK
        return slots

    def slot(self, token: int, column: int) -> Slot:
        """The `Slot` of one element of kv or score."""
        return Slot(int(self.slots[token, column // self.head_dim]))

    def row_window(self, row: int, column: int) -> list[WindowSlot | None]:
        """The window of `out[row, column]`, `window` entries; None where it is invalid (first block's overlap)."""
        t0, first = int(self.row_token[row]), bool(self.row_is_first[row])
        entries: list[WindowSlot | None] = []
        if self.coff == 2:
            entries += [None if first else WindowSlot(t0 - self.ratio + k, column, k) for k in range(self.ratio)]
        own = column + (self.coff - 1) * self.head_dim
        return entries + [WindowSlot(t0 + k, own, k) for k in range(self.ratio)]

    def consumer(self, token: int, column: int) -> int | None:
        """The row that consumes kv[token, column], or None where no row does."""
        if self.slot(token, column) is not Slot.CONSUMED:
            return None
        seg = int(np.searchsorted(self.cu_seqlens, token, side="right")) - 1
        block = (token - int(self.cu_seqlens[seg])) // self.ratio
        overlap = self.coff == 2 and column < self.head_dim
        return int(self.cu_seqlens_comp[seg]) + block + int(overlap)

    def __str__(self) -> str:
        fields = [f"lens={_short(self.lens)}", f"ratio={self.ratio}", f"coff={self.coff}", f"head_dim={self.head_dim}"]
        fields += [
            f"{name}={value}"
            for name in ("row_capacity", "token_capacity")
            if (value := getattr(self, name)) is not None
        ]
        return f"Problem({', '.join(fields)})"


def _offsets(lens: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def _short(lens: tuple[int, ...]) -> str:
    """`lens` as an expression, runs of equal lengths folded: `(3,) * 8192 + (4096,)`."""
    parts: list[str] = []
    plain: list[int] = []
    i = 0

    def flush() -> None:
        if plain:
            parts.append(repr(tuple(plain)))
            plain.clear()

    while i < len(lens):
        run = i
        while run < len(lens) and lens[run] == lens[i]:
            run += 1
        if run - i > 3:
            flush()
            parts.append(f"({lens[i]},) * {run - i}")
        else:
            plain.extend(lens[i:run])
        i = run
    flush()
    return " + ".join(parts) if parts else "()"
