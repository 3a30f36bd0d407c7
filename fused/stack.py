"""The sum over the rows that a streamed block takes one after the other.

A run of `LEAF_RUN` rows is added up in registers. Of two runs, the first step of the halving tree, the first one's sum
waits for the other's in the thread's own part of shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .arith import add, apply
from .config import LEAF_RUN, Config
from .shares import own_entries
from .window import fragments


def row_runs(config: Config) -> int:
    """Runs of a block's rows; 1 for a single row."""
    return -(-config.schedule.rows_each // LEAF_RUN)


def enter_stack(config: Config) -> cute.Tensor | None:
    """Slots for the sum of dscore that waits, (own * threads, vec) fp32; None where none ever does."""
    if row_runs(config) == 1:
        return None
    layout = cute.make_layout((own_entries(config) * config.schedule.threads, config.vec), stride=(config.vec, 1))
    stack: cute.Tensor = SmemAllocator().allocate_tensor(Float32, layout, 16)
    return stack


def in_turn(config: Config, i: Int32) -> Int32:
    """Which of the block's rows is the i-th to be taken: those of a run are as many apart as there are runs."""
    return i if row_runs(config) == 1 else i % LEAF_RUN * row_runs(config) + i // LEAF_RUN


def _slot(config: Config, i: int) -> Int32:
    tx, ty, _ = cute.arch.thread_idx()
    return i * config.schedule.threads + ty * config.schedule.threads_x + tx


@cute.jit
def push(config: Constexpr, stack: Any, total: cute.Tensor, i: Int32) -> None:
    """Before the i-th row: put the sum in registers away if the row begins the second run."""
    if cutlass.const_expr(row_runs(config) == 2):
        if i == LEAF_RUN:
            for k in cutlass.range_constexpr(own_entries(config)):
                cute.autovec_copy(total[k, None], stack[_slot(config, k), None])
            total.fill(0.0)


@cute.jit
def pop(config: Constexpr, stack: Any, total: cute.Tensor) -> None:
    """After the last row: add what has waited to the sum in registers."""
    if cutlass.const_expr(row_runs(config) == 2):
        other = fragments(1, config)
        for k in cutlass.range_constexpr(own_entries(config)):
            cute.autovec_copy(stack[_slot(config, k), None], other[0, None])
            apply(add, config, (total, k), (other, 0), (total, k))
