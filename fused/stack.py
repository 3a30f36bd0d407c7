"""The halving tree over the rows that a streamed block takes one after the other.

In the order of their reversed numbers, rows form pairs as they come, pairs form fours, and so on: at most one sum a
level waits for its other half. The last is in registers, the others in the thread's own part of shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from .arith import add, apply
from .config import Config
from .shares import own_entries
from .window import fragments


def stacks(config: Config) -> bool:
    """Whether a sum ever waits: one or two rows need no more than the registers."""
    return config.schedule.rows_each > 2


def enter_stack(config: Config) -> cute.Tensor | None:
    """Slots for the sums of dscore that wait, (levels * own * threads, vec) fp32; None where none ever does."""
    if not stacks(config):
        return None
    levels = config.schedule.rows_each.bit_length() - 2
    slots = levels * own_entries(config) * config.schedule.threads
    layout = cute.make_layout((slots, config.vec), stride=(config.vec, 1))
    stack: cute.Tensor = SmemAllocator().allocate_tensor(Float32, layout, 16)
    return stack


def reversed_bits(i: Int32, count: int) -> Int32:
    """The bits of `i` in reverse order; `count` is a power of two, and above `i`."""
    steps = count.bit_length() - 1
    found = Int32(0)
    for b in range(steps):
        found = found | ((i >> b) & 1) << (steps - 1 - b)
    return found


def _slot(config: Config, level: Int32, i: int) -> Int32:
    tx, ty, _ = cute.arch.thread_idx()
    thread = ty * config.schedule.threads_x + tx
    return (level * own_entries(config) + i) * config.schedule.threads + thread


@cute.jit
def push(config: Constexpr, stack: Any, total: cute.Tensor, i: Int32) -> None:
    """Before the i-th row: put the sum in registers away if the row begins another one."""
    if cutlass.const_expr(stacks(config)):
        if i > 0 and i % 2 == 0:
            # There is a sum for every bit set in the number of pairs, and all but the last wait already.
            level = cute.arch.popc(i // 2) - 1
            for k in cutlass.range_constexpr(own_entries(config)):
                cute.autovec_copy(total[k, None], stack[_slot(config, level, k), None])
            total.fill(0.0)


@cute.jit
def pop(config: Constexpr, stack: Any, total: cute.Tensor, i: Int32) -> None:
    """After the i-th row: add what has waited for the sum in registers."""
    if cutlass.const_expr(stacks(config)):
        if i % 2 == 1:
            carry = i // 2
            while carry % 2 == 1:
                carry = carry // 2
                level = cute.arch.popc(carry)
                other = fragments(1, config)
                for k in cutlass.range_constexpr(own_entries(config)):
                    cute.autovec_copy(stack[_slot(config, level, k), None], other[0, None])
                    apply(add, config, (total, k), (other, 0), (total, k))
