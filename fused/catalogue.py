"""What is shipped, as data, and its compilation for another architecture on a machine without a GPU."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from . import compiled
from .checks import Shape
from .config import (
    IN_REGISTERS,
    MANY_IN_REGISTERS,
    MANY_STREAMED,
    MAX_RATIO,
    ROWS_STREAMED,
    STATIC_HEAD_DIMS,
    STREAMED,
    Config,
    Direction,
    Exp,
    Family,
)

Cap = tuple[Direction, Family, tuple[int, int, int] | None]

REGISTERS = 65536
"""Of one multiprocessor."""

KEEP = "ptx,cubin,ir"
"""What `CUTE_DSL_KEEP` must name before the DSL is imported, in a process whose `CUTE_DSL_ARCH` is the architecture."""


@dataclass(frozen=True)
class Shipped:
    """One shape that stands for a schedule; it is compiled in both directions.

    rows: rows of the call, on which the schedule and the order of the pooling sum depend.
    """

    ratio: int
    coff: int
    head_dim: int
    rows: int
    exp: Exp
    why: str

    @property
    def name(self) -> str:
        return f"r{self.ratio}c{self.coff}-d{self.head_dim}-n{self.rows}-{self.exp}"

    def config(self, direction: Direction) -> Config:
        """The configuration of a call on a GPU whose tensors are aligned as allocations are."""
        shape = Shape(1, self.rows * self.ratio, self.rows, self.head_dim)
        return compiled.configure(direction, self.ratio, self.coff, shape, self.exp, torch.device("cuda"), [])


def _short() -> Iterator[Shipped]:
    """For each cut of a short window whose backward threads take four columns, a shape of each kind."""
    for longest, least in IN_REGISTERS:
        if least > 2:
            coff = 2 if longest > 1 else 1
            for head_dim in (*STATIC_HEAD_DIMS, 520):
                rows = math.ceil(max(MANY_IN_REGISTERS.values()) / head_dim)
                why = f"a window of {longest}, {least} columns a thread backward"
                yield Shipped(longest // coff, coff, head_dim, rows, "native", why)


def _uneven() -> Iterator[Shipped]:
    """For each cut of a long window nearly the longest that threads do not share evenly, of many rows and of few."""
    for longest, _ in STREAMED["backward"]:
        for coff in (1, 2) if longest <= MAX_RATIO else (2,):
            why = f"a window below {longest}, not shared evenly"
            for head_dim, rows in ((512, MANY_STREAMED // longest), (128, 16)):
                yield Shipped((longest - 1) // coff, coff, head_dim, rows, "native", why)


def _streamed() -> Iterator[Shipped]:
    """For each cut of a long window a shape of each kind: with head_dim compiled in and not, of many columns and few.

    Backward, each number of rows that a block takes; the forward's cuts of two columns are among these. Then those of
    four, and those of two without overlap.
    """
    for longest, _ in STREAMED["backward"]:
        _, _, min_blocks, _ = STREAMED["backward"][longest, 1]
        for head_dim in (128, 66, 65):
            fewest = [math.ceil(least * min_blocks / math.ceil(head_dim / 32)) for least in ROWS_STREAMED]
            for rows in (16, *fewest):
                yield Shipped(longest // 2, 2, head_dim, rows, "native", f"a window of {longest}")
    for longest, least in STREAMED["forward"]:
        if least > 2:
            for coff, head_dim in itertools.product((1, 2), (*STATIC_HEAD_DIMS, 520)):
                why = f"a window of {longest}, {least} columns a thread"
                yield Shipped(longest // coff, coff, head_dim, MANY_STREAMED // longest, "native", why)
        elif longest <= MAX_RATIO:
            yield Shipped(longest, 1, 128, 16, "native", f"a window of {longest} without overlap, few rows")


CATALOGUE: tuple[Shipped, ...] = (
    Shipped(4, 2, 128, 2048, "native", "production pair, one short pack"),
    Shipped(4, 2, 128, 6144, "native", "production pair, a batch"),
    Shipped(4, 2, 128, 16384, "native", "production pair, a large batch"),
    Shipped(4, 2, 512, 6144, "portable", "production pair, wide"),
    Shipped(4, 2, 65, 512, "native", "one column a thread, few rows"),
    Shipped(4, 2, 65, 12288, "native", "one column a thread, many rows"),
    Shipped(4, 2, 65, 16384, "native", "the same, more"),
    Shipped(4, 2, 65, 65536, "native", "the same, very many"),
    Shipped(4, 2, 66, 512, "native", "two columns a thread, their number not compiled in, few rows"),
    Shipped(4, 2, 66, 12288, "native", "the same, many rows"),
    Shipped(4, 2, 66, 16384, "native", "the same, more"),
    Shipped(4, 2, 66, 65536, "native", "the same, very many"),
    Shipped(4, 2, 520, 1536, "native", "four columns a thread, their number not compiled in, many rows"),
    Shipped(4, 2, 520, 2048, "native", "the same, more"),
    Shipped(4, 2, 520, 6144, "native", "the same, very many"),
    Shipped(4, 2, 128, 2048, "portable", "production pair, one short pack"),
    Shipped(4, 1, 128, 16384, "native", "a window of one block"),
    Shipped(4, 1, 128, 2048, "native", "a window of one block, few rows"),
    Shipped(1, 1, 128, 8192, "native", "the shortest window"),
    Shipped(4, 1, 65, 2048, "native", "a window of one block, one column a thread"),
    Shipped(4, 1, 65, 8192, "native", "the same, many rows"),
    Shipped(2, 1, 66, 512, "native", "the same, two columns a thread"),
    Shipped(2, 1, 66, 8192, "native", "the same, many rows"),
    Shipped(2, 2, 64, 2048, "portable", "the shortest overlap"),
    Shipped(3, 2, 66, 4096, "native", "a window of no power of two"),
    Shipped(8, 2, 512, 8192, "portable", "production pair of a window of 16, wide"),
    Shipped(32, 1, 65, 2048, "portable", "a window of 32 without overlap, odd"),
    Shipped(5, 2, 66, 4096, "native", "a window that threads do not share evenly"),
    Shipped(9, 1, 66, 100, "native", "an odd window, whose few leaves have two threads each"),
    Shipped(64, 1, 16, 1024, "native", "both sums have lanes, a narrow block"),
    Shipped(128, 1, 128, 512, "native", "production pair"),
    Shipped(128, 1, 512, 512, "native", "production pair, wide"),
    Shipped(128, 2, 128, 512, "native", "production pair with overlap"),
    Shipped(128, 2, 512, 512, "native", "production pair with overlap, wide"),
    Shipped(128, 2, 512, 512, "portable", "production pair with overlap, wide"),
    Shipped(128, 2, 64, 64, "native", "both sums have lanes"),
    Shipped(256, 1, 128, 256, "native", "the longest window without overlap"),
    *_short(),
    *_streamed(),
    *_uneven(),
    Shipped(116, 2, 128, 16, "native", "halves that shares straddle, few rows"),
    Shipped(256, 2, 2, 256, "portable", "both sums have lanes, the narrowest block"),
)
"""A shape for every schedule, and for what else changes the code: both powers, both widths, lanes in the sums."""


def representatives() -> set[tuple[Shipped, Direction]]:
    """Of each `cap` the entry that takes most registers: the most of a window in a thread, then rows, then leaves."""
    heaviest: dict[Cap, tuple[tuple[int, ...], Shipped]] = {}
    for shipped, direction in _everything():
        config = shipped.config(direction)
        key, weight = cap(direction, config), burden(config)
        if key not in heaviest or weight > heaviest[key][0]:
            heaviest[key] = weight, shipped
    return {(shipped, key[0]) for key, (_, shipped) in heaviest.items()}


def burden(config: Config) -> tuple[int, int, int]:
    """What takes registers, the most first: columns of the window in a thread, rows one after the other, leaves."""
    schedule = config.schedule
    shares = schedule.threads_y if schedule.family == "streamed" else 1
    return -(-config.window // shares) * config.vec, schedule.rows_each, schedule.leaves_ahead


def cap(direction: Direction, config: Config) -> Cap:
    """What may spill in a way of its own: a family's code for so many columns under one limit of registers.

    Without a limit, of one block a multiprocessor, a family counts once.
    """
    schedule = config.schedule
    if schedule.min_blocks == 1:
        return direction, schedule.family, None
    # What the compiler may give a thread: registers come in eights.
    limit = REGISTERS // (schedule.threads * schedule.min_blocks) // 8 * 8
    return direction, schedule.family, (min(limit, 255), config.vec, schedule.stages)


class Module:
    """What one compilation gives: the PTX and the cubin of one or more kernels. Compiles when first asked.

    name: of the catalogue's entry and the direction.
    details: the configuration.
    representative: whether it stands for its like where there is no time for all (see `representatives`).
    """

    threads = None  # the PTX has them

    def __init__(self, shipped: Shipped, direction: Direction, representative: bool = True) -> None:
        self._config, self._direction = shipped.config(direction), direction
        self.name = f"{direction}-{shipped.name}"
        self.details = repr(self._config)
        self.representative = representative

    @cached_property
    def _compiled(self) -> Any:
        return compiled.compile_function(self._direction, self._config)

    @property
    def ptx(self) -> str:
        return str(self._compiled.artifacts.PTX)

    @property
    def cubin(self) -> bytes:
        return bytes(self._compiled.artifacts.CUBIN)

    @property
    def shared_bytes(self) -> Mapping[str, int]:
        """Dynamic shared memory of each kernel's launch."""
        return shared_memory(str(self._compiled.artifacts.MLIR))


def compile_for(arch: str) -> list[Module]:
    """Everything shipped, for `arch`.

    Raises:
        ValueError: this process compiles for another architecture, or keeps none of what it compiles.
    """
    for variable, need in (("CUTE_DSL_ARCH", arch), ("CUTE_DSL_KEEP", KEEP)):
        if os.environ.get(variable) != need:
            raise ValueError(f"{variable}: got {os.environ.get(variable)!r}, need {need!r} before cutlass is imported")
    chosen = representatives()
    return [Module(shipped, direction, (shipped, direction) in chosen) for shipped, direction in _everything()]


def _everything() -> list[tuple[Shipped, Direction]]:
    """Each entry and direction, but for configurations that an entry before has."""
    directions: tuple[Direction, Direction] = ("forward", "backward")
    found: dict[tuple[Direction, Config], Shipped] = {}
    for shipped in CATALOGUE:
        for direction in directions:
            found.setdefault((direction, shipped.config(direction)), shipped)
    return [(shipped, direction) for (direction, _), shipped in found.items()]


def shared_memory(ir: str) -> dict[str, int]:
    """Bytes of shared memory that each kernel of a module in the DSL's intermediate representation allocates.

    Allocations follow one another, each aligned, and are never freed.

    Raises:
        ValueError: an allocation is written in a form not known here.
    """
    aliases = dict(re.findall(r"^(!\w+) = (.*)$", ir, re.MULTILINE))
    sizes = {}
    for kernel in re.split(r"\bcuda\.kernel @", ir)[1:]:
        total = 0
        for name in re.findall(r"\bmemref\.alloca\(.*\).* : (!.*)$", kernel, re.MULTILINE):
            kind = aliases.get(name, name)
            if "smem" in kind:
                found = re.search(r'<i8, smem, align<(\d+)>, "(\d+):1">', kind)
                if found is None:
                    raise ValueError(f"ir: got shared memory of type {kind}, need aligned bytes")
                align, size = map(int, found.groups())
                total = -(-total // align) * align + size
        sizes[kernel[: kernel.index("(")]] = total
    return sizes
