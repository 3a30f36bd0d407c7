"""Figures as text, never better than they are: what speaks for a kernel is cut off, what speaks against it goes up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from . import _bench_packs as packs
from ._bench_measure import Row


def speedup(value: float) -> str:
    """How many times as fast, one decimal, cut off: 10.96 is "10.9x"."""
    return f"{Decimal(str(value)).quantize(Decimal('0.1'), ROUND_FLOOR)}x"


def times(value: float) -> str:
    """How many times as slow, two decimals, rounded up: 1.171 is "1.18x"."""
    return f"{Decimal(str(value)).quantize(Decimal('0.01'), ROUND_CEILING)}x"


def percent(value: float) -> str:
    """A share that is better if it is larger, in whole percents, cut off."""
    return f"{math.floor(value * 100)}%"


def table(rows: Sequence[Row], *, header: bool = True) -> list[str]:
    """One line a row. Speed-ups over a peer are over the faster of its forms."""
    width = max(len(_name(row)) for row in (*rows, *_LONGEST))
    columns = {
        name: figure
        for name, (everywhere, figure) in _COLUMNS.items()
        if everywhere or any(r.threads is None for r in rows)
    }
    lines = [f"{'pack':<{width}} {'direction':<9}" + "".join(f"{name:>10}" for name in columns)] if header else []
    for row in rows:
        figures = "".join(f"{figure(row) or '-':>10}" for figure in columns.values())
        lines.append(f"{_name(row):<{width}} {row.direction:<9}{figures}")
    return lines


def _name(row: Row) -> str:
    return row.pack if row.threads is None else f"{row.pack} {row.threads}T"


def _us(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _mib(value: int | None) -> str | None:
    return None if value is None else f"{value / 2**20:.1f}"


def _over(row: Row, other: float | None) -> str | None:
    return None if other is None or "ours" not in row.us else speedup(other / row.us["ours"])


def _copy_share(row: Row) -> str | None:
    return percent(row.floor_us / row.us["ours"]) if "ours" in row.us else None


def _of_add(row: Row) -> str | None:
    return times(row.host_us["ours"] / row.add_us) if row.add_us and "ours" in row.host_us else None


# Each with whether there is such a figure on a CPU.
_COLUMNS: dict[str, tuple[bool, Callable[[Row], str | None]]] = {
    "us": (True, lambda r: _us(r.us.get("ours"))),
    "floor": (True, lambda r: _us(r.floor_us)),
    "copy%": (True, _copy_share),
    "eager": (True, lambda r: _us(r.us.get("eager"))),
    "x eager": (True, lambda r: _over(r, r.us.get("eager"))),
    "peer": (False, lambda r: _us(r.us.get("peer"))),
    "peer det": (False, lambda r: _us(r.us.get("peer-deterministic"))),
    "x peer": (False, lambda r: _over(r, r.peer_us)),
    "graph": (False, lambda r: _us(r.graph_us.get("ours"))),
    "call": (False, lambda r: _us(r.host_us.get("ours"))),
    "x add": (False, _of_add),
    "MiB": (False, lambda r: _mib(r.peak_bytes.get("ours"))),
    "eager MiB": (False, lambda r: _mib(r.peak_bytes.get("eager"))),
    "bits": (False, lambda r: None if r.differing is None else str(r.differing)),
}
_LONGEST = [Row(max((pack.id for pack in packs.PACKS), key=len), "", "forward", 0, 0.0)]

LEGEND = (
    "us: time on the device, L2 cold. floor: every tensor read or written once, as fast as the copy; copy%: of us.",
    "eager: the PyTorch region. peer, peer det: its atomic, its deterministic form; x peer: over the faster of them.",
    "graph: replay of a graph of one call, L2 warm. call: host time of a call; x add: in calls of torch.add(out=).",
    "MiB: most memory that a call takes, its results included. bits: elements whose bits are not eager's.",
)


@dataclass(frozen=True)
class Target:
    """Something aimed at, the figure that decides, and whether it is met; None if it was not measured."""

    what: str
    need: str
    got: str
    met: bool | None


Figures = list[tuple[float, str]]  # each with the name of its row


def targets(rows: Sequence[Row]) -> list[Target]:
    """Every target, against the worst figure there is. Tiny packs aim at nothing."""
    rows = [row for row in rows if row.group != "smoke"]
    found = []
    if gpu := [r for r in rows if r.threads is None]:
        found += [t for d in ("forward", "backward") for t in _on_gpu([r for r in gpu if r.direction == d], d)]
    for direction in packs.DIRECTIONS:
        figures = [
            (r.us["eager"] / r.us["ours"], f"{r.pack} {r.threads}T")
            for r in rows
            if r.direction == direction and r.threads is not None and {"ours", "eager"} <= r.us.keys()
        ]
        if figures:
            found.append(_at_least(f"{direction} on the CPU, over eager", figures, packs.OVER_EAGER_CPU))
    return found


def _on_gpu(rows: Sequence[Row], direction: str) -> list[Target]:
    """Rows of one direction."""
    ours = {r.pack: r.us["ours"] for r in rows if "ours" in r.us}
    rows = [r for r in rows if r.pack in ours]
    large = [(ours[r.pack] / r.floor_us, r.pack) for r in rows if r.traffic_bytes >= packs.LARGE_TRAFFIC]
    over_peer = {
        g: [(r.peer_us / ours[r.pack], r.pack) for r in rows if r.group == g and r.peer_us] for g in packs.GROUPS
    }
    twins = {p.id: p.twin for p in packs.PACKS if p.twin is not None}
    over_twin = [(ours[p] / ours[twin], p) for p, twin in twins.items() if p in ours and twin in ours]
    host = [(r.host_us["ours"] / r.add_us, r.pack) for r in rows if r.add_us and "ours" in r.host_us]
    found = [
        _at_most(f"{direction} of {packs.LARGE_TRAFFIC // 10**6} MB and more, over the floor", large, packs.OVER_FLOOR),
        _at_least(
            f"{direction} of every pack, over the peer", over_peer["table"] + over_peer["ragged"], packs.OVER_PEER
        ),
        _at_least(f"{direction}, geometric mean over the peer", _mean(over_peer["table"]), packs.OVER_PEER_MEAN),
        _at_least(f"{direction} of ragged packs, over the peer", over_peer["ragged"], packs.OVER_PEER_RAGGED),
        _at_most(f"{direction} of ragged packs, over one segment", over_twin, packs.OVER_TWIN),
        _at_most(f"{direction}, host time over torch.add", host, packs.OVER_ADD),
    ]
    if direction == "backward":
        shares = [(r.dape_share, r.pack) for r in rows if r.dape_share is not None]
        found.append(_at_most("the sum of grad_ape, share of backward", shares, packs.DAPE_SHARE))
    return found


def _mean(figures: Figures) -> Figures:
    if not figures:
        return []
    return [(math.exp(statistics.fmean(math.log(value) for value, _ in figures)), f"{len(figures)} packs")]


def _at_least(what: str, figures: Figures, need: float) -> Target:
    if not figures:
        return Target(what, f">= {need:g}x", "not measured", None)
    value, where = min(figures)
    return Target(what, f">= {need:g}x", f"{speedup(value)} ({where})", value >= need)


def _at_most(what: str, figures: Figures, need: float) -> Target:
    if not figures:
        return Target(what, f"<= {need:g}x", "not measured", None)
    value, where = max(figures)
    return Target(what, f"<= {need:g}x", f"{times(value)} ({where})", value <= need)


def aims(found: Sequence[Target]) -> list[str]:
    """One line a target."""
    words = {True: "met", False: "MISSED", None: "-"}
    return [f"{t.what:<52}{t.need:>9}  {words[t.met]:<7} {t.got}" for t in found]
