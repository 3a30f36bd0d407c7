"""Rows on their way from memory while a thread works on the one before, in its own part of shared memory.

A thread reads back only what it has copied itself, so that waiting for its own copies is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .config import Config
from .window import Place, entry


class Ring(NamedTuple):
    """Windows of kv and score, (stages * window * threads, vec) bf16 each, and the thread's number in its block."""

    kv: cute.Tensor
    score: cute.Tensor
    thread: Int32


def enter_ring(config: Config) -> Ring:
    """Allocates the ring of a block."""
    tx, ty, _ = cute.arch.thread_idx()
    shape = config.schedule
    slots = shape.stages * config.window * shape.threads
    layout = cute.make_layout((slots, config.vec), stride=(config.vec, 1))
    smem = SmemAllocator()
    kv, score = (smem.allocate_tensor(BFloat16, layout, 16) for _ in range(2))
    return Ring(kv, score, ty * shape.threads_x + tx)


def ring_entry(ring: Ring, i: Int32) -> Callable[..., Int32]:
    """As `entry`, for the thread's i-th row."""

    def index(config: Config, place: Place, half: int, k: int) -> Int32:
        slot = i % config.schedule.stages * config.window + half * config.ratio + k
        return slot * config.schedule.threads + ring.thread

    return index


@cute.jit
def fetch(config: Constexpr, kv: cute.Tensor, score: cute.Tensor, ring: Ring, place: Place, i: Int32) -> None:
    """Start copying the window of the thread's i-th row."""
    if cutlass.const_expr(config.coff == 2):
        if place.first == Boolean(False):
            _fetch_half(config, kv, score, ring, place, 0, i)
    _fetch_half(config, kv, score, ring, place, config.coff - 1, i)


def _fetch_half(
    config: Config, kv: cute.Tensor, score: cute.Tensor, ring: Ring, place: Place, half: int, i: Int32
) -> None:
    index = ring_entry(ring, i)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), BFloat16, num_bits_per_copy=BFloat16.width * config.vec)
    for memory, to in ((score, ring.score), (kv, ring.kv)):
        for k in range(config.ratio):
            cute.copy(atom, memory[entry(config, place, half, k), None], to[index(config, place, half, k), None])


def wait(config: Config) -> None:
    """Until the oldest of `stages` groups of copies has come."""
    cute.arch.cp_async_wait_group(config.schedule.stages - 1)
