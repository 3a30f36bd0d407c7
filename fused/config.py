"""`Config`: everything that a compiled kernel depends on, and the summation orders that a shape gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Direction = Literal["forward", "backward"]
Exp = Literal["native", "portable"]
Family = Literal["loop", "registers", "streamed"]
Cut = tuple[int, int, int, int]

LEAF_ROWS = 32  # consecutive rows that one leaf of the dape tree sums
LEAF_LANES = 32  # running sums that the leaves are dealt to
# Rows of a leaf that are added one after the other, in registers, before its halving tree, and the longest window whose
# leaves have a tree alone. Not a schedule: bits depend on both.
LEAF_RUN, LEAF_TREE_WINDOW = 4, 8
MAX_RATIO = 256
# Longest window and least columns of a thread, the most first: column groups and shares of a block, blocks that a
# multiprocessor should hold, and entries of a run (see `Schedule`). The best of those tried on an H200 (65,536 tokens)
# that spill nowhere where shares are even: others took up to twice as long.
STREAMED: dict[Direction, dict[tuple[int, int], Cut]] = {
    "forward": {
        (16, 4): (32, 2, 8, 16),
        (32, 4): (16, 2, 16, 4),
        (32, 1): (32, 2, 8, 16),
        (64, 4): (32, 4, 4, 16),
        (64, 1): (16, 4, 8, 16),
        (128, 4): (16, 8, 4, 16),
        (128, 1): (16, 8, 5, 16),
        (256, 4): (8, 16, 4, 16),
        (256, 1): (16, 16, 3, 16),
        (2 * MAX_RATIO, 1): (8, 32, 3, 16),
    },
    "backward": {
        (16, 1): (16, 2, 24, 8),
        (32, 1): (16, 2, 16, 8),
        (64, 1): (16, 4, 8, 8),
        (128, 1): (16, 8, 4, 8),
        (256, 1): (16, 16, 2, 8),
        (2 * MAX_RATIO, 1): (8, 32, 2, 8),
    },
}
# Likewise of short windows, backward: column groups and rows side by side of a block, rows that a thread takes one
# after the other, and blocks that a multiprocessor should hold.
IN_REGISTERS: dict[tuple[int, int], Cut] = {
    (2, 4): (32, 8, 2, 4),
    (4, 4): (16, 16, 1, 4),
    (4, 1): (32, 16, 2, 2),
    (6, 4): (16, 16, 1, 3),
    (8, 4): (16, 16, 1, 2),
    (8, 1): (32, 16, 1, 2),
}
# Window entries of all rows, times a row's 32s of columns, from which on a streamed thread takes more than two columns,
# where `STREAMED` has them and a row has enough for a block; elements of out likewise, backward, by the window, where
# `IN_REGISTERS` has them.
MANY_STREAMED = 1 << 18
MANY_IN_REGISTERS = {4: 1 << 21, 8: 3 << 20}
# Rows, times the same 32s, for each block that a multiprocessor holds, from which on a backward block takes several
# rows, and how many, the most first: fewer write more of the dape workspace, more leave multiprocessors idle.
ROWS_STREAMED = {5 << 7: 8, 1 << 8: 4}
WARP = 32
LONG_WINDOW = 8  # longer ones are streamed
STATIC_HEAD_DIMS = (128, 512)  # of production: compiled in on the GPU; all others share a function
# Elements of out from which on a forward thread takes several rows of a short window, and how many, the most first:
# enough for a block's start to be forgotten, and few enough to leave each of 132 multiprocessors two blocks or three.
ROWS_AHEAD = {3 << 20: 16, 1 << 20: 8, 3 << 18: 4}
# Rows from which on a short window's leaves are many for the threads that sum them, and how many of these each has on
# their way then: 5 to 7 % of the backward at 16,384 rows, 1 to 2 at 6,144.
MANY_LEAF_ROWS, LEAVES_AHEAD = 1 << 12, 4
# Rows up to which leaves are so few that several threads share each, where it comes in single rows: 23 and 9 % of
# the backward at 64 and 128 rows of long windows; at 1024 rows it took longer.
FEW_LEAF_ROWS = LEAF_ROWS * 8
STAGES = 2  # the row in work and the next one; a third took up to a fifth longer


@dataclass(frozen=True)
class Schedule:
    """How the work is cut; no bit depends on it.

    family: `loop` is the CPU's. On the GPU `registers` keeps a row's window in the registers of one thread, `streamed`
        deals it to `threads_y` threads of a block.
    threads_x: column groups of a block.
    threads_y: rows (registers) or shares of a window (streamed) that run side by side.
    rows_each: rows that a thread takes one after the other.
    min_blocks: blocks that a multiprocessor should hold at a time, which caps the registers.
    stages: rows of a thread that are fetched or in work at a time; 0 where each is loaded as the thread comes to it.
    leaves_ahead: leaves of the dape tree that a thread which sums them has on their way at a time (backward).
    past_l1: whether kv and score are loaded past the L1 cache, which is left to the position bias (streamed).
    longest_run: entries of a thread that have one address and one condition, at most (streamed).
    """

    family: Family
    threads_x: int
    threads_y: int
    rows_each: int
    min_blocks: int
    stages: int = 0
    past_l1: bool = False
    leaves_ahead: int = 1
    longest_run: int = 1

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.threads_x * self.threads_y

    @property
    def rows(self) -> int:
        """Rows of one block."""
        return self.rows_each * (self.threads_y if self.family == "registers" else 1)

    @property
    def leaf_parts(self) -> int:
        """Parts in which a leaf of the dape tree comes, one a block; the CPU has it whole."""
        return 1 if self.family == "loop" else LEAF_ROWS // self.rows


LOOP = Schedule("loop", threads_x=1, threads_y=1, rows_each=1, min_blocks=1)


@dataclass(frozen=True)
class Config:
    """The key of one compiled function; shapes beyond it are dynamic.

    ratio, coff: as in the problem.
    vec: columns that one thread or loop step handles, a power of two that divides head_dim.
    softmax_lanes, pool_lanes: the summation orders (see `orders`).
    exp: `native` (CUDA's expf) or `portable` (the same bits on every machine).
    schedule: how the work is cut, and so where it runs: `LOOP` is the CPU's.
    head_dim: compiled in, for addresses that cost no instructions, or None to take any.
    """

    ratio: int
    coff: int
    vec: int
    softmax_lanes: int
    pool_lanes: int
    exp: Exp
    schedule: Schedule
    head_dim: int | None
    column: int | None = None  # of a group, the one that arithmetic is about; None: all

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of a group that GPU arithmetic is about."""
        return tuple(range(self.vec)) if self.column is None else (self.column,)

    @property
    def fast(self) -> bool:
        """Whether powers and quotients have a fast path, which CUDA's own exp has on the GPU."""
        return self.on_gpu and self.exp == "native"

    def each_column(self) -> list[Config]:
        """For each column of a group in turn, so that fewer registers are live; the host's vector has all at once."""
        return [replace(self, column=c) for c in range(self.vec)] if self.on_gpu else [self]

    @property
    def window(self) -> int:
        """Entries of one row's window."""
        return self.coff * self.ratio

    @property
    def leaf_run(self) -> int:
        """Rows of a leaf of the dape tree that are added one after the other, before its halving tree."""
        return LEAF_RUN if self.window > LEAF_TREE_WINDOW else 1

    @property
    def on_gpu(self) -> bool:
        """Whether lanes are scalars with pinned rounding, and loops over a window unrolled to keep it in registers."""
        return self.schedule.family != "loop"


def schedule_of(direction: Direction, window: int, head_dim: int, vec: int, rows: int) -> Schedule:
    """The GPU schedule of a call of `rows` rows, of which a thread takes `vec` columns.

    A backward block takes a part of a leaf of the dape tree: its rows divide `LEAF_ROWS`. Of a long window it takes
    whole runs of `LEAF_RUN` rows, or one row.
    """
    if window > LONG_WINDOW:
        width, shares, min_blocks, run = _cut(STREAMED[direction], window, vec)
        groups = head_dim // vec
        threads_x = min(width, 1 << (groups - 1).bit_length())
        if direction == "forward":
            return Schedule("streamed", threads_x, shares, 1, min_blocks, past_l1=True, longest_run=run)
        work = _streamed_work(head_dim, rows) / min_blocks
        several = (count for least, count in ROWS_STREAMED.items() if work >= least and groups >= width)
        rows_each = next(several, 1)
        return Schedule("streamed", threads_x, shares, rows_each, min_blocks, leaves_ahead=2, longest_run=run)
    if direction == "backward":
        ahead = LEAVES_AHEAD if rows >= MANY_LEAF_ROWS else 1
        return Schedule("registers", *_cut(IN_REGISTERS, window, vec), leaves_ahead=ahead)
    rows_each = next((count for least, count in ROWS_AHEAD.items() if rows * head_dim >= least), 1)
    if rows_each == 1:
        return Schedule("registers", 32, 8, 1, 4)
    # Copies past the registers are of 4 bytes at least, and so of two columns.
    return Schedule("registers", 32, 4, rows_each, 3, STAGES if vec > 1 else 0)


def widest_on_gpu(direction: Direction, window: int, head_dim: int, rows: int) -> int:
    """Columns of a group on a GPU, at most."""
    # The fewer instructions and requests of four pay where there is work enough for as many threads.
    if window > LONG_WINDOW:
        cuts, many = STREAMED[direction], window * _streamed_work(head_dim, rows) >= MANY_STREAMED
    elif direction == "backward":
        least = next(least for longest, least in MANY_IN_REGISTERS.items() if window <= longest)
        cuts, many = IN_REGISTERS, rows * head_dim >= least
    else:
        return 4 if rows * head_dim >= min(ROWS_AHEAD) else 2
    most, width = next((most, width) for (longest, most), (width, *_) in cuts.items() if window <= longest)
    return max(most, 2) if many and head_dim >= width * most else 2


def _cut(cuts: dict[tuple[int, int], Cut], window: int, vec: int) -> Cut:
    """The first of `STREAMED` or `IN_REGISTERS` for a window whose threads have `vec` columns."""
    return next(cut for (longest, least), cut in cuts.items() if window <= longest and vec >= least)


def _streamed_work(head_dim: int, rows: int) -> int:
    """Rows times a row's 32s of columns."""
    return rows * -(-head_dim // 32)


def orders(window: int, head_dim: int, rows: int | None) -> tuple[int, int]:
    """The lanes of the softmax sums and of the pooling sum that PyTorch's CUDA kernels use for this shape.

    Args:
        window: entries of a row's window.
        head_dim: columns of a row.
        rows: rows in the call, padding included; None for the portable orders, which take any number as many.

    Returns:
        (softmax_lanes, pool_lanes). Lane x of the softmax sums adds entries x, x + lanes, ...; a pooling lane deals
        its entries to four accumulators. Lanes combine by a halving tree.
    """
    softmax = 1
    if head_dim <= 64 and window >= 64:
        softmax = min(_power_of_two(1024 // head_dim), _power_of_two(window))
    vec = next(v for v in (4, 2, 1) if head_dim % v == 0)
    threads = 512 // vec
    width = min(threads, 32) if rows is None else min(_power_of_two(rows * head_dim // vec), threads, 32)
    height = min(_power_of_two(window), threads, threads // width)
    return softmax, height if window >= min(16 * height, 256) else 1


def _power_of_two(n: int) -> int:
    """The largest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)
