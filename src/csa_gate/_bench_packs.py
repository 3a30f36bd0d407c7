"""What is measured, as data: packs and their traffic, and what is aimed at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from csa_gate.oracles import Problem

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
"""`both` is a forward and then a backward, as in a training step."""


@dataclass(frozen=True)
class Pack:
    """One packed batch: its name and its problem.

    group: `table` (measured by default), `ragged` (so, too, but kept out of the mean), `single` (the traffic of a
        ragged one in one segment), `ratios`, `cpu` or `smoke`.
    twin: of a ragged pack, the one with the same traffic in one segment.
    """

    id: str
    problem: Problem
    group: str = "table"
    twin: str | None = None

    @cached_property
    def _once(self) -> dict[str, int]:
        p = self.problem
        return {
            "tokens": 2 * p.total_tokens * p.width,  # of kv, of score and of either's gradient: bf16
            "rows": 2 * p.total_comp * p.head_dim,  # of out and of its gradient
            "ape": 4 * p.ratio * p.width,
            "offsets": 2 * 4 * (len(p.lens) + 1),
        }

    def traffic(self, direction: Direction) -> int:
        """Bytes if every tensor is read or written once; `both` is the sum of the two."""
        once = self._once
        forward = 2 * once["tokens"] + once["rows"] + once["ape"] + once["offsets"]
        gradients = 2 * once["tokens"] + once["ape"]
        return {"forward": forward, "backward": forward + gradients, "both": 2 * forward + gradients}[direction]

    def eager_bytes(self) -> int:
        """What the eager region may hold at once: about twelve fp32 tensors of (rows, window, head_dim)."""
        p = self.problem
        return 12 * 4 * p.total_comp * p.window * p.head_dim


def _pack(lens: tuple[int, ...], head_dim: int, ratio: int, coff: int, group: str = "table", twin: str = "") -> Pack:
    runs = [(len(list(same)), length) for length, same in groupby(lens)]
    name = "mixed" if len(runs) > 2 else "+".join(f"{count}x{length}" for count, length in runs)
    problem = Problem(lens, ratio, coff, head_dim)
    return Pack(f"{name}-d{head_dim}-r{ratio}c{coff}", problem, group, twin or None)


PACKS: tuple[Pack, ...] = (
    _pack((8192,), 128, 4, 2),
    _pack((8192,) * 3, 128, 4, 2),
    _pack((8192,), 512, 4, 2),
    _pack((8192,) * 3, 512, 4, 2),
    _pack((8192,) * 8, 128, 4, 1),
    _pack((65536,), 128, 128, 2),
    _pack((8192,), 128, 128, 2),
    _pack((65536,), 512, 128, 2),
    _pack((65536,), 512, 128, 1),
    _pack((255,) * 256, 128, 128, 2),
    _pack((16,) * 4096, 128, 4, 2, "ragged", "1x65536-d128-r4c2"),
    _pack((3,) * 8192 + (4096,), 128, 4, 2, "ragged", "1x28672-d128-r4c2"),
    _pack((65536,), 128, 4, 2, "single"),
    _pack((28672,), 128, 4, 2, "single"),
    *(_pack((65536,), 512, ratio, 2, "ratios") for ratio in (1, 2, 3, 8, 16, 32, 64, 256)),
    _pack((8192,), 128, 4, 2, "cpu"),
    _pack((8192,), 128, 128, 2, "cpu"),
    _pack((37, 0, 3, 64, 4), 16, 4, 2, "smoke"),
    _pack((300, 127, 128), 16, 128, 1, "smoke"),
)

GROUPS = ("table", "ragged", "single", "ratios", "cpu", "smoke")
DEFAULT_GROUPS = {"cuda": ("table", "ragged", "single"), "cpu": ("cpu",), "smoke": ("smoke",)}


def choose(ids: Iterable[str] | None, kind: str) -> list[Pack]:
    """The packs of the given ids or groups, in the order of `PACKS`; by default those of `kind`, a key of the defaults.

    Raises:
        ValueError: an id is neither.
    """
    wanted = list(ids or DEFAULT_GROUPS[kind])
    known = {pack.id for pack in PACKS} | set(GROUPS)
    for name in wanted:
        if name not in known:
            raise ValueError(f"--pack: got {name!r}, need {', '.join([*GROUPS, *dict.fromkeys(p.id for p in PACKS)])}")
    chosen = {pack.id: pack for pack in PACKS if pack.group in wanted or pack.id in wanted}
    return list(chosen.values())


def floor_us(traffic: int, bandwidth: float) -> float:
    """Microseconds that `traffic` bytes take at `bandwidth` bytes a second."""
    return traffic / bandwidth * 1e6


# What is aimed at, each a ratio within one run.
LARGE_TRAFFIC = 100_000_000  # bytes from which on the memory's speed is what counts, not launches and tails
OVER_FLOOR = 1.18  # times the floor, at most: 85 % of the copy's bandwidth
OVER_PEER = 1.0  # times as fast as the peer, at the least
OVER_PEER_MEAN = 1.5  # the same, as the geometric mean of the table
OVER_PEER_RAGGED = 20.0
OVER_TWIN = 2.0  # times the same traffic in one segment, at most
DAPE_SHARE = 0.05  # of the backward, for the deterministic sum
OVER_ADD = 1.5  # host time of a call, in calls of torch.add(out=), at most
OVER_EAGER_CPU = 1.0  # times as fast as the eager region on the same CPU, at the least
