"""How time and memory are measured, on CUDA and on a CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from ._bench_subjects import Call

ROTATION = 300_000_000  # bytes that pass between two uses of a buffer: several times the largest L2
GRAPH_CALLS = 24  # of one graph, at most
SLEEP = 10_000_000  # clock cycles, some milliseconds: time to queue what is measured behind it
REPLAYS = 50  # of a graph of one call, in one go
ROUNDS = 9
ROUND_US = 20_000  # of GPU time, about, in one round of host timing: the queue must not fill up


class Clock(Protocol):
    """Times are microseconds; None where there is no such thing on the device."""

    def sets(self, traffic: int) -> int:
        """Sets of buffers to take turns with, each call moving `traffic` bytes."""

    def kernel_us(self, calls: Sequence[Call]) -> float:
        """One call's work on the device, the median over repeats; the calls use different buffers."""

    def graph_us(self, call: Call) -> float | None:
        """Replaying a CUDA graph of this call alone, over and over."""

    def host_us(self, call: Call, kernel_us: float) -> tuple[float, float] | None:
        """The host's part of a call, and of `torch.add(out=)` in the same rounds."""

    def peak_bytes(self, call: Call) -> int | None:
        """Memory that a call takes at most, what it returns included."""

    def dape_share(self, call: Call) -> float | None:
        """The part of a call's time on the device in which nothing but kernels with `grad_ape` in their names runs."""

    def bandwidth(self) -> float:
        """Bytes a second, read and written, of fp32 `add(x, 1, out=y)`."""


class CudaClock:
    """Replays CUDA graphs, timed by events that are queued before the first of them starts."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        self._small = torch.zeros(1024, device=device)
        gc.collect()
        gc.freeze()  # every capture collects garbage first

    def sets(self, traffic: int) -> int:
        return max(2, -(-ROTATION // traffic))

    def kernel_us(self, calls: Sequence[Call]) -> float:
        count = -(-len(calls) // GRAPH_CALLS)
        graphs = [(_capture(part), len(part)) for part in (calls[i::count] for i in range(count))]
        return statistics.median(self._replays(graphs))

    def _replays(self, graphs: Sequence[tuple[torch.cuda.CUDAGraph, int]]) -> list[float]:
        for graph, _ in graphs:
            graph.replay()
        torch.cuda.synchronize()
        repeats = max(self._repeats, len(graphs))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
        events[0].record()
        for i in range(repeats):
            graphs[i % len(graphs)][0].replay()
            events[i + 1].record()
        torch.cuda.synchronize()
        return [events[i].elapsed_time(events[i + 1]) * 1e3 / graphs[i % len(graphs)][1] for i in range(repeats)]

    def graph_us(self, call: Call) -> float:
        graph = _capture([call])

        def replay() -> None:
            _repeat(graph.replay, REPLAYS)
            torch.cuda.synchronize()

        return statistics.median(_wall_us(replay) for _ in range(3)) / REPLAYS

    def host_us(self, call: Call, kernel_us: float) -> tuple[float, float]:
        calls = min(50, max(4, int(ROUND_US / kernel_us)))
        add = partial(torch.add, self._small, 1, out=self._small)
        measured: list[tuple[Call, list[float]]] = [(call, []), (add, [])]
        for _ in range(ROUNDS):
            for one, times in measured:
                torch.cuda.synchronize()
                times.append(_wall_us(partial(_repeat, one, calls)) / calls)
        torch.cuda.synchronize()
        return statistics.median(measured[0][1]), statistics.median(measured[1][1])

    def peak_bytes(self, call: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self._device) - before

    def dape_share(self, call: Call) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _repeat(call, self._repeats)
            torch.cuda.synchronize()
        on_device = [e for e in profile.events() if e.device_type == torch._C._autograd.DeviceType.CUDA]
        return alone([(e.time_range.start, e.time_range.end, "grad_ape" in e.name) for e in on_device])

    def bandwidth(self) -> float:
        return _bandwidth(self, self._device, 1 << 27)


class CpuClock:
    """Wall time of single calls."""

    def __init__(self, repeats: int, elements: int = 1 << 25) -> None:
        self._repeats, self._elements = repeats, elements

    def sets(self, traffic: int) -> int:
        return 1

    def kernel_us(self, calls: Sequence[Call]) -> float:
        for call in calls:
            call()
        return statistics.median(_wall_us(call) for _ in range(self._repeats) for call in calls)

    def graph_us(self, call: Call) -> None:
        return None

    def host_us(self, call: Call, kernel_us: float) -> None:
        return None

    def peak_bytes(self, call: Call) -> None:
        return None

    def dape_share(self, call: Call) -> None:
        return None

    def bandwidth(self) -> float:
        return _bandwidth(self, torch.device("cpu"), self._elements)


def alone(spans: Sequence[tuple[float, float, bool]]) -> float:
    """Of the time in which a kernel ran, the part in which none but marked ones did.

    spans: (start, end, marked) of kernels of one stream, of which each ends after the one before; a marked one may
        start while that still runs, and waits for it.
    """
    total = marked = until = 0.0
    for start, end, mark in sorted(spans):
        more = max(end - max(start, until), 0.0)
        total, until = total + more, max(until, end)
        marked += more if mark else 0.0
    return marked / total


def _bandwidth(clock: Clock, device: torch.device, elements: int) -> float:
    x, y = (torch.ones(elements, device=device) for _ in range(2))
    return 2 * 4 * elements / clock.kernel_us([partial(torch.add, x, 1, out=y)] * 2) * 1e6


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, each made once before, on a stream of its own as autograd wants it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def _wall_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6
