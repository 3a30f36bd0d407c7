"""The cases at the edges of schedules: they reach all that a call can get, whatever the schedules are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from csa_gate.fixtures import cases, schedules
from csa_gate.fixtures.schedules import SCHEDULES, Scheduled, covering, edge_cases, scheduled, schedules_of
from csa_gate.fused import compiled
from csa_gate.fused.catalogue import Shipped
from csa_gate.fused.config import FEW_LEAF_ROWS, LEAF_ROWS, LEAF_RUN, WARP, Direction, Schedule
from csa_gate.fused.shares import half_of, own_entries, runs
from csa_gate.oracles import Problem

RATIOS = (1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 129, 200, 256)
HEAD_DIMS = (1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 65, 66, 128, 256, 512, 1024, 16384)
ROWS = (1, 2, 8, 31, 33, 64, 500, 1023, 1024, 2048, 6144, 16384, 65536, 1 << 20)


def reachable() -> dict[Scheduled, tuple[int, int, int, int]]:
    """What calls over a grid of shapes get, and a shape of each."""
    grid = itertools.product(RATIOS, (1, 2), HEAD_DIMS, ROWS)
    return {found: shape for shape in grid for found in scheduled(*shape)}


def missing(table: tuple[cases.Case, ...]) -> dict[Scheduled, tuple[int, int, int, int]]:
    """The part of `reachable` that no L1 case of a table reaches."""
    reached = {found for case in table if case.level == "L1" for found in schedules_of(case.problem)}
    return {found: shape for found, shape in reachable().items() if found not in reached}


def unfit(direction: Direction, s: Schedule) -> list[str]:
    """What the kernels take for granted about a schedule and this one lacks; only a GPU would show it otherwise."""
    needs = {
        "a block has 1024 threads at most": s.threads <= 1024,
        "each row has a thread to locate it": s.rows <= s.threads,
    }
    if s.family == "streamed":
        # `block_highest`: the threads of a column group lie a power of two apart, in every warp alike.
        needs["column groups divide a warp"] = WARP % s.threads_x == 0
        needs["warps are whole"] = s.threads % WARP == 0 or WARP % s.threads == 0
    if direction == "backward":
        # A thread of `registers` adds its rows one after the other, a step of the halving tree for two of them alone;
        # a streamed one has a row, or a run, or two runs and room for what waits.
        needs["a thread has one or two rows"] = s.family == "streamed" or s.rows_each in (1, 2)
        several = s.rows_each in (1, LEAF_RUN, 2 * LEAF_RUN)
        needs["a thread has a row, a run or two"] = s.family == "registers" or several
        needs["rows pair up"] = s.rows_each & (s.rows_each - 1) == 0
        needs["parts make up a leaf"] = s.leaf_parts * s.rows == LEAF_ROWS
    elif s.family == "streamed":
        needs["a block has one row"] = s.rows == 1
    return [need for need, met in needs.items() if not met]


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A schedule that someone adds, for a bucket of its own."""
    added = Schedule("registers", 64, 2, 2, 3)
    shipped = compiled.schedule_of

    def schedule_of(direction: Direction, window: int, head_dim: int, vec: int, rows: int) -> Schedule:
        ours = direction == "forward" and 20 <= window <= 24 and 300 <= rows < 700
        return added if ours else shipped(direction, window, head_dim, vec, rows)

    monkeypatch.setattr(compiled, "schedule_of", schedule_of)
    schedules._config.cache_clear()
    yield added
    schedules._config.cache_clear()


def test_every_schedule_is_run_at_l1() -> None:
    assert not missing(SCHEDULES)


def test_the_kernels_can_run_every_schedule() -> None:
    assert not {found: lacks for found in reachable() if (lacks := unfit(*found))}


def test_a_family_follows_the_order_of_its_leaves() -> None:
    """Streamed blocks add rows up in runs, those of registers by a tree; which of them, the window says."""
    for ratio, coff in itertools.product(RATIOS, (1, 2)):
        config = Shipped(ratio, coff, 128, 100, "native", "").config("backward")
        assert (config.schedule.family == "streamed") == (config.leaf_run == LEAF_RUN)


@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize("ratio", [*range(9, 40), 49, 63, 64, 65, 96, 100, 127, 128, 170, 192, 255, 256])
def test_runs_share_a_half(ratio: int, coff: int) -> None:
    """A streamed thread's entries, in order, in runs whose entries exist or not together, whatever the thread.

    Two at most are alone because threads differ: where the halves meet, and where the window ends.
    """
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        config = Shipped(ratio, coff, 128, 100, "native", "").config(direction)
        found = runs(config)
        assert list(itertools.chain(*found)) == list(range(own_entries(config)))
        for run in found:
            starts = [i * config.schedule.threads_y for i in run]
            assert len(run) <= config.schedule.longest_run
            halves = {w // ratio for start in starts for w in (start, start + config.schedule.threads_y - 1)}
            ends = run[-1] * config.schedule.threads_y + config.schedule.threads_y
            assert len(run) == 1 or (len(halves) == 1 and ends <= config.window), run
        assert sum(half_of(config, i) is None for i in range(own_entries(config))) <= 2
        assert len(found) <= 2 + coff * -(-own_entries(config) // config.schedule.longest_run)


@pytest.mark.parametrize(
    ("direction", "schedule", "lacks"),
    [
        ("forward", Schedule("streamed", 9, 32, 1, 2), ["column groups divide a warp"]),
        ("forward", Schedule("streamed", 8, 5, 1, 2), ["warps are whole"]),
        ("forward", Schedule("streamed", 8, 32, 2, 2), ["a block has one row"]),
        ("forward", Schedule("registers", 64, 32, 1, 1), ["a block has 1024 threads at most"]),
        ("forward", Schedule("registers", 2, 4, 4, 1), ["each row has a thread to locate it"]),
        ("backward", Schedule("registers", 8, 33, 1, 1), ["parts make up a leaf"]),
        ("backward", Schedule("streamed", 8, 32, 2, 1), ["a thread has a row, a run or two"]),
        ("backward", Schedule("streamed", 8, 32, 16, 1), ["a thread has a row, a run or two"]),
        (
            "backward",
            Schedule("streamed", 8, 32, 12, 1),
            ["a thread has a row, a run or two", "rows pair up", "parts make up a leaf"],
        ),
        ("backward", Schedule("registers", 16, 8, 4, 1), ["a thread has one or two rows"]),
    ],
)
def test_a_schedule_that_no_kernel_can_run_is_seen(direction: Direction, schedule: Schedule, lacks: list[str]) -> None:
    assert unfit(direction, schedule) == lacks


def test_a_schedule_without_a_case_is_missed(another: Schedule) -> None:
    with_all_registers = replace(another, min_blocks=1)  # as a head_dim that is not compiled in gets it
    assert set(missing(SCHEDULES)) == {("forward", another), ("forward", with_all_registers)}


def test_cases_follow_a_new_schedule(another: Schedule) -> None:
    """They are derived, at its edges along the rows and the window."""
    table = edge_cases()
    assert not missing(table)
    at = {(c.problem.window, c.problem.total_comp) for c in table if ("forward", another) in schedules_of(c.problem)}
    assert {(20, 300), (20, 301), (24, 300)} <= at
    assert (20, 299) in {(c.problem.window, c.problem.total_comp) for c in table}
    assert {19, 25} & {c.problem.window for c in table}


def test_windows_stand_on_both_sides_of_each_change() -> None:
    """At every window that is run, the next shorter or the next longer one gets another schedule, or there is none."""
    windows = sorted({c.problem.window for c in SCHEDULES})
    assert {1, 2, 8, 9, 16, 17, 32, 33, 128, 129, 256, 258, 512} <= set(windows), "258 is the first after 256"


@pytest.mark.parametrize("window", sorted({c.problem.window for c in SCHEDULES}))
def test_rows_and_groups_stand_around_the_sizes_of_blocks(window: int) -> None:
    """One less, equal and one more: rows of a block, of a leaf, of five and of few leaves, column groups of a block."""
    ours = [c.problem for c in SCHEDULES if c.problem.window == window]
    rows = {p.total_comp for p in ours}
    groups = {p.head_dim // vec(p) for p in ours}
    for _, schedule in scheduled(ours[0].ratio, ours[0].coff, 512, 1):
        assert {n for n in around(schedule.rows) if n} <= rows
        assert {n for n in around(schedule.threads_x) if n} <= groups
    assert around(LEAF_ROWS) | around(5 * LEAF_ROWS) | around(FEW_LEAF_ROWS) <= rows


def around(size: int) -> set[int]:
    return {size - 1, size, size + 1}


def vec(problem: Problem) -> int:
    """Columns of a thread."""
    return schedules._config("forward", problem.ratio, problem.coff, problem.head_dim, problem.total_comp).vec


def test_segments_make_the_rows_of_the_name() -> None:
    for case in SCHEDULES:
        p = case.problem
        assert case.id == f"r{p.ratio}c{p.coff}-d{p.head_dim}-n{p.rows}"
        assert p.total_comp == p.rows


def test_covering_keeps_one_case_for_each_schedule() -> None:
    kept = covering(SCHEDULES)
    assert {s for c in kept for s in schedules_of(c.problem)} == {s for c in SCHEDULES for s in schedules_of(c.problem)}
    assert len(kept) < len(SCHEDULES) / 3
    assert covering([*kept, *SCHEDULES]) == kept
    assert not covering([replace(kept[0], problem=Problem((1,), 4, 2, 8))]), "nothing is launched without rows"
