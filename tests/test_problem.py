"""The geometry: `Problem` against a walk over the tokens one by one, and `parse_problem` as the inverse of `str`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa_gate.oracles import Problem, Slot
from csa_gate.oracles.parse import parse_problem
from csa_gate.oracles.problem import INT32_MAX

PROBLEMS = [
    Problem((), 4, 2, 2),
    Problem((0, 0), 4, 1, 1),
    Problem((3,), 4, 2, 1),
    Problem((4,), 4, 2, 3),
    Problem((12, 11), 4, 2, 2),
    Problem((0, 9, 0, 3, 4, 0), 3, 2, 2, row_capacity=8, token_capacity=20),
    Problem((5, 1, 2), 1, 2, 1, row_capacity=9),
    Problem((1, 2, 7), 5, 1, 2, row_capacity=3, token_capacity=11),
    Problem((2,), 4, 1, 1, row_capacity=2, token_capacity=4),
    Problem((64, 31, 65), 32, 2, 1),
]


class Row(NamedTuple):
    segment: int
    token: int
    first: bool


class Walk(NamedTuple):
    rows: list[Row]
    slots: list[list[Slot]]
    consumer: dict[tuple[int, int], int]


def walk(p: Problem) -> Walk:
    """Every row, every slot's class and its consumer, by going through the tokens one at a time."""
    rows: list[Row] = []
    slots: list[list[Slot]] = []
    consumer: dict[tuple[int, int], int] = {}
    for segment, length in enumerate(p.lens):
        blocks = length // p.ratio
        for at in range(length):
            token, block = len(slots), at // p.ratio
            if block < blocks and at % p.ratio == 0:
                rows.append(Row(segment, token, block == 0))
            classes = []
            for half in range(p.coff):
                overlap = p.coff == 2 and half == 0
                if blocks == 0:
                    classes.append(Slot.SHORT)
                elif block == blocks:
                    classes.append(Slot.TAIL)
                elif overlap and block == blocks - 1:
                    classes.append(Slot.LAST_BLOCK)
                else:
                    classes.append(Slot.CONSUMED)
                    consumer[token, half] = len(rows) - 1 + (1 if overlap else 0)
            slots.append(classes)
    slots += [[Slot.PADDING] * p.coff for _ in range(p.total_tokens - len(slots))]
    rows += [Row(-1, 0, True)] * (p.total_comp - len(rows))
    return Walk(rows, slots, consumer)


def check(p: Problem) -> None:
    """Everything that `p` says about rows and slots equals the walk, and windows and consumers invert each other."""
    want = walk(p)
    assert p.row_segment.tolist() == [row.segment for row in want.rows]
    assert p.row_token.tolist() == [row.token for row in want.rows]
    assert p.row_is_first.tolist() == [row.first for row in want.rows]
    assert p.slots.shape == (p.total_tokens, p.coff)
    assert p.slots.tolist() == want.slots
    columns = sorted({0, p.head_dim - 1, p.head_dim % p.width, p.width - 1})
    for token in range(p.total_tokens):
        for column in columns:
            half = column // p.head_dim
            assert p.slot(token, column) is want.slots[token][half]
            assert p.consumer(token, column) == want.consumer.get((token, half))
    for row, (segment, t0, first) in enumerate(want.rows):
        for column in {0, p.head_dim - 1}:
            window = p.row_window(row, column)
            assert len(window) == p.window
            own = p.width - p.head_dim + column
            expected: list[tuple[int, int, int] | None] = [(t0 + k, own, k) for k in range(p.ratio)]
            if p.coff == 2:
                overlap = [None if first else (t0 - p.ratio + k, column, k) for k in range(p.ratio)]
                expected = [*overlap, *expected]
            assert window == expected
            if segment >= 0:
                assert all(p.consumer(entry.token, entry.column) == row for entry in window if entry)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_geometry_equals_a_walk_over_the_tokens(problem: Problem) -> None:
    check(problem)


def test_kinds_of_slots_are_told_apart() -> None:
    """Two of one number would be one member, which equals itself in every comparison above."""
    assert len(Slot) == len(Slot.__members__)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ratio = draw(st.integers(1, 5))
    lens = tuple(draw(st.lists(st.integers(0, 3 * ratio + 1), max_size=6)))
    rows, tokens = sum(n // ratio for n in lens), sum(lens)
    token_capacity = draw(st.none() | st.integers(tokens, tokens + 2 * ratio))
    most = rows + 3 if (token_capacity or tokens) >= ratio else rows
    row_capacity = draw(st.none() | st.integers(rows, most))
    return Problem(lens, ratio, draw(st.integers(1, 2)), draw(st.integers(1, 3)), row_capacity, token_capacity)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_geometry_and_names_of_drawn_problems(problem: Problem) -> None:
    """The walk again; `parse_problem` inverts both `str` and `repr`."""
    check(problem)
    assert parse_problem(str(problem)) == problem
    assert parse_problem(repr(problem)) == problem


def test_offsets_and_sizes() -> None:
    """Offsets are int32 running sums; capacities change the totals, not the offsets."""
    lens: Any = [np.int64(9), 0, 3, 4]
    p = Problem(lens, 4, 2, 8, row_capacity=5, token_capacity=20)
    assert p.cu_seqlens.dtype == p.cu_seqlens_comp.dtype == np.int32
    assert p.cu_seqlens.tolist() == [0, 9, 9, 12, 16]
    assert p.cu_seqlens_comp.tolist() == [0, 2, 2, 2, 3]
    assert (p.tokens, p.rows, p.total_tokens, p.total_comp, p.width, p.window) == (16, 3, 20, 5, 16, 8)
    assert p.lens == (9, 0, 3, 4)
    assert Problem((), 4, 2, 8).cu_seqlens.tolist() == [0]
    assert hash(p) == hash(Problem((9, 0, 3, 4), 4, 2, 8, 5, 20))


GOOD: dict[str, Any] = {"lens": (8, 3), "ratio": 4, "coff": 2, "head_dim": 8}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"lens": "88"}, r"lens: got '88', need a sequence"),
    ({"lens": 8}, r"lens: got 8, need a sequence"),
    ({"lens": (8, -1)}, r"lens\[1\]: got -1, need an integer >= 0"),
    ({"lens": (8.0,)}, r"lens\[0\]: got 8.0, need an integer"),
    ({"lens": (True,)}, r"lens\[0\]: got True, need an integer"),
    ({"ratio": 0}, r"ratio: got 0, need an integer >= 1"),
    ({"ratio": 2.0}, r"ratio: got 2.0, need an integer"),
    ({"ratio": None}, r"ratio: got None, need an integer"),
    ({"coff": 0}, r"coff: got 0, need an integer >= 1"),
    ({"coff": 3}, r"coff: got 3, need 1 or 2"),
    ({"head_dim": 0}, r"head_dim: got 0, need an integer >= 1"),
    ({"row_capacity": 1}, r"row_capacity: got 1, need at least the 2 rows"),
    ({"row_capacity": -1}, r"row_capacity: got -1, need an integer >= 0"),
    ({"token_capacity": 10}, r"token_capacity: got 10, need at least the 11 tokens"),
    ({"token_capacity": "11"}, r"token_capacity: got '11', need an integer"),
    ({"token_capacity": INT32_MAX + 1}, rf"token_capacity: got {INT32_MAX + 1} tokens, need at most {INT32_MAX}"),
    ({"row_capacity": 2**40}, rf"row_capacity: got {2**40} rows, need at most {INT32_MAX}"),
    ({"head_dim": 2**40}, rf"head_dim: got {2**41} columns, need at most {INT32_MAX}"),
    ({"lens": (INT32_MAX, 1)}, rf"got {INT32_MAX + 1} tokens, need at most {INT32_MAX}"),
    ({"lens": (3,), "row_capacity": 2}, r"token_capacity: got 3 tokens, need at least ratio = 4: the 2 padding rows"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(change) for change, _ in BAD])
def test_invalid_geometry_names_the_field_and_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(**{**GOOD, **change})


NAMES = [
    (Problem((3,) * 8192 + (4096,), 4, 2, 512), "Problem(lens=(3,) * 8192 + (4096,), ratio=4, coff=2, head_dim=512)"),
    (Problem((), 1, 1, 1), "Problem(lens=(), ratio=1, coff=1, head_dim=1)"),
    (
        Problem((7, 7, 7, 1, 0, 0, 0, 0, 9), 4, 2, 8, 9, 99),
        "Problem(lens=(7, 7, 7, 1) + (0,) * 4 + (9,), ratio=4, coff=2, head_dim=8, row_capacity=9, token_capacity=99)",
    ),
]


@pytest.mark.parametrize(("problem", "text"), NAMES, ids=["runs", "empty", "capacities"])
def test_a_problem_prints_as_an_expression_that_parses_back(problem: Problem, text: str) -> None:
    assert str(problem) == text
    assert parse_problem(f"  {text}\n") == problem


def test_many_runs_parse() -> None:
    """Sums of some thousand runs are within reach of the parser."""
    problem = Problem((1, 1, 1, 1, 2, 2, 2, 2) * 400, 4, 1, 8)
    assert parse_problem(str(problem)) == problem


REST = "ratio=4, coff=2, head_dim=8"
UNREADABLE = [
    ("", "problem: got ''"),
    ("Problem(lens=(1,)", "problem: got 'Problem"),
    ("(" * 5000, "problem: got"),
    ("Problem", "need Problem"),
    ("Other(lens=(1,))", "need Problem"),
    ("a.Problem(lens=(1,))", "need Problem"),
    ("Problem((1,), 4, 2, 8)", "need Problem"),
    ("Problem(lens=(1,))", "need ratio, coff, head_dim too"),
    (f"Problem(lens=(1,), {REST}, size=1)", "got the argument 'size'"),
    (f"Problem(**x, {REST})", "got the argument None"),
    (f"Problem(lens=[1], {REST})", r"lens: got \[1\], need a tuple"),
    (f"Problem(lens=(1,) + x, {REST})", "lens: got x, need a tuple"),
    (f"Problem(lens=(f(),), {REST})", r"lens: got f\(\), need a non-negative integer"),
    (f"Problem(lens=(1,) * -2, {REST})", "lens: got -2, need a non-negative integer"),
    (f"Problem(lens=(1.0,), {REST})", "lens: got 1.0, need"),
    (f"Problem(lens=(0,) * {10**12}, {REST})", "lens: got more than 16777216 segments"),
    ("Problem(lens=(1,), ratio=True, coff=2, head_dim=8)", "ratio: got True, need"),
    ("Problem(lens=(1,), ratio=None, coff=2, head_dim=8)", "ratio: got None, need"),
    ("Problem(lens=(1,), ratio=4, coff=3, head_dim=8)", "coff: got 3, need 1 or 2"),
]


@pytest.mark.parametrize(("text", "message"), UNREADABLE, ids=[text[:60] for text, _ in UNREADABLE])
def test_text_that_is_no_problem_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_problem(text)
