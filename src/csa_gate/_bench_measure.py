"""One pack's figures: every subject in every direction that it has, beside the floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from ._bench_clock import Clock
from ._bench_packs import DIRECTIONS, Direction, Pack, floor_us
from ._bench_subjects import Buffers, Call, EagerSubject, KernelSubject, Subject

Figure = TypeVar("Figure")


@dataclass
class Row:
    """The figures of one pack in one direction; what is not there could not be measured, and `notes` say why.

    threads: torch's threads, where the device is a CPU.
    us: time on the device, by subject (`ours`, `eager`, `peer`, `peer-deterministic`).
    graph_us, host_us, peak_bytes: by subject as well; `add_us` is the host time of `torch.add(out=)` in the rounds of
        `ours`.
    differing: elements of the outputs whose bits are not the eager region's.
    dape_share: of ours, the part that sums grad_ape over the rows.
    """

    pack: str
    group: str
    direction: Direction
    traffic_bytes: int
    floor_us: float
    threads: int | None = None
    us: dict[str, float] = field(default_factory=dict)
    graph_us: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    add_us: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    differing: int | None = None
    dape_share: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def peer_us(self) -> float | None:
        """The faster of the peer's forms."""
        return min((us for name, us in self.us.items() if name.startswith("peer")), default=None)


def measure(pack: Pack, subjects: Sequence[Subject], clock: Clock, bandwidth: float, device: torch.device) -> list[Row]:
    """A row for each direction. A subject that fails leaves a note, not an error."""
    cpu = device.type == "cpu"
    rows = {
        d: Row(pack.id, pack.group, d, pack.traffic(d), floor_us(pack.traffic(d), bandwidth),
               threads=torch.get_num_threads() if cpu else None)
        for d in DIRECTIONS
    }  # fmt: skip
    counts = {d: clock.sets(pack.traffic(d)) for d in DIRECTIONS}
    buffers = [Buffers.make(pack.problem, device, seed) for seed in range(max(counts.values()))]
    for subject in subjects:
        refusal = subject.refuses(pack.problem) or _too_large(subject, pack, device)
        if refusal is not None:
            for row in rows.values():
                row.notes.append(f"{subject.name}: {refusal}")
            continue
        made = _try(list(rows.values()), subject.name, partial(_calls, subject, buffers))
        for direction, row in rows.items():
            if made is None or direction not in made[0]:
                continue
            # The eager region's intermediates sweep the L2 by themselves.
            count = min(2, counts[direction]) if isinstance(subject, EagerSubject) else counts[direction]
            calls = [calls[direction] for calls in made[:count]]
            _time(row, subject, clock, calls, buffers[0])
    ours, reference = (next((s for s in subjects if isinstance(s, c)), None) for c in (KernelSubject, EagerSubject))
    if not cpu and ours is not None and reference is not None and "eager" in rows["both"].us:
        found = _try(list(rows.values()), "bits", lambda: differing(ours, reference, buffers[0]))
        rows["forward"].differing, rows["backward"].differing = found or (None, None)
    return list(rows.values())


def _calls(subject: Subject, buffers: Sequence[Buffers]) -> list[Mapping[Direction, Call]]:
    return [subject.calls(each) for each in buffers]


def differing(ours: Subject, reference: Subject, buffers: Buffers) -> tuple[int, int]:
    """Elements of out, and of grad_kv and grad_score, in which the bits are not the reference's."""
    wanted = reference.calls(buffers)["both"]()
    assert isinstance(wanted, tuple)
    ours.calls(buffers)["both"]()
    got = (buffers.out, buffers.grad_kv, buffers.grad_score)
    counts = [int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(got, wanted[:3], strict=True)]
    return counts[0], counts[1] + counts[2]


def _time(row: Row, subject: Subject, clock: Clock, calls: Sequence[Call], buffers: Buffers) -> None:
    name, direction = subject.name, row.direction
    us = _try([row], name, lambda: clock.kernel_us(calls))
    if us is None:
        return
    row.us[name] = us
    if name == "peer-deterministic":
        return
    graph = _try([row], f"{name}, graph", lambda: clock.graph_us(calls[0]))
    if graph is not None:
        row.graph_us[name] = graph
    host = _try([row], f"{name}, host", lambda: clock.host_us(calls[0], us))
    if host is not None:
        row.host_us[name] = host[0]
        row.add_us = host[1] if name == "ours" else row.add_us
    peak = _try([row], f"{name}, memory", lambda: clock.peak_bytes(lambda: _fresh(subject, buffers, direction)))
    if peak is not None:
        row.peak_bytes[name] = peak
    if name == "ours" and direction == "backward":
        row.dape_share = _try([row], "share of dape", lambda: clock.dape_share(calls[0]))


def _fresh(subject: Subject, buffers: Buffers, direction: Direction) -> object:
    fresh = buffers if isinstance(subject, EagerSubject) else buffers.fresh(direction)
    return fresh, subject.calls(fresh)[direction]()


def _too_large(subject: Subject, pack: Pack, device: torch.device) -> str | None:
    if not isinstance(subject, EagerSubject) or device.type == "cpu":
        return None
    need, free = pack.eager_bytes(), torch.cuda.mem_get_info(device)[0]
    return f"needs about {need / 1e9:.0f} GB, of which {free / 1e9:.0f} are free" if need > free else None


def _try(rows: Sequence[Row], what: str, call: Callable[[], Figure]) -> Figure | None:
    try:
        return call()
    except Exception as error:
        for row in rows:
            row.notes.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return None
