"""`Config`: everything that a compiled kernel depends on, and the summation orders that a shape gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]
Exp = Literal["native", "portable"]
Target = Literal["cpu", "gpu"]

LEAF_ROWS = 32  # consecutive rows that one leaf of the dape tree sums
LEAF_LANES = 32  # running sums that the leaves are dealt to
MAX_RATIO = 32  # of the register family: a window lives in registers
SCALAR_WINDOW = 16  # longer windows take one column a thread on the GPU, for their registers
MANY_THREADS = 1 << 18  # rows times column groups that fill a large device with four rows a thread, or with two


@dataclass(frozen=True)
class Schedule:
    """How a GPU block is cut: `threads_x` column groups by `threads_y` rows, `rows_each` rows a thread. No bit changes.

    min_blocks: blocks that a multiprocessor should hold at a time, which caps the registers.
    """

    threads_x: int
    threads_y: int
    rows_each: int
    min_blocks: int

    @property
    def rows(self) -> int:
        """Rows of one block."""
        return self.threads_y * self.rows_each


@dataclass(frozen=True)
class Config:
    """The key of one compiled function; shapes beyond it are dynamic.

    ratio, coff: as in the problem.
    vec: columns that one thread or loop step handles, a power of two that divides head_dim.
    softmax_lanes, pool_lanes: the summation orders (see `orders`).
    exp: `native` (CUDA's expf) or `portable` (the same bits on every machine).
    target: `cpu` computes on vectors of `vec` columns, `gpu` on scalars with pinned rounding.
    schedule: how the GPU's blocks are cut, None for the CPU.
    """

    ratio: int
    coff: int
    vec: int
    softmax_lanes: int
    pool_lanes: int
    exp: Exp
    target: Target
    schedule: Schedule | None  # of the GPU

    @property
    def window(self) -> int:
        """Entries of one row's window."""
        return self.coff * self.ratio

    @property
    def unroll(self) -> bool:
        """Whether loops over a window are unrolled, which keeps it in registers on the GPU."""
        return self.target == "gpu"


def schedule_of(direction: Direction, window: int, groups: int, rows: int) -> Schedule:
    """The GPU schedule of a call of `rows` rows of `groups` column groups.

    A backward block is one leaf of the dape tree, so that its row lanes times the rows of a thread, one or two, are
    `LEAF_ROWS`.
    """
    if window > SCALAR_WINDOW:
        return Schedule(32, 4, 1, 1) if direction == "forward" else Schedule(8, 32, 1, 1)
    many = rows * groups >= MANY_THREADS
    if direction == "forward":
        return Schedule(32, 4, 4, 6) if many and window <= 8 else Schedule(32, 8, 1, 1)
    return Schedule(16, 16, 2, 2)


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
