"""From a mask of wrong elements to a `Failure`: coordinates, windows, and what the wrong ones have in common.

Runs only once a clause has failed, so it may be slow, but a failure of every element must not exhaust memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .bits import bit_pattern, show, ulp_distance
from .inputs import Inputs
from .problem import Problem, Slot, WindowSlot
from .verdict import Element, Failure, Place, WindowValue

Mask = NDArray[np.bool_]

_SHOWN = 8  # entries of a window that a message shows


@dataclass(frozen=True)
class Difference:
    """What a clause found wrong in one output.

    got, want, wrong: (rows, columns) each; want has the dtype of got, or fp64 in a clause of bounds. judged: (rows,
    halves) bool, the column groups that the clause looks at, halves dividing the columns. against: what want is,
    as words that follow the output's name.
    error, bound: (rows, columns) fp64, in a clause of bounds: |got - want| and the most it may be.
    start: the row of the output that row 0 of these tensors is. note: a figure of the whole output.
    """

    clause: str
    output: str
    got: Tensor
    want: Tensor
    wrong: Tensor
    judged: Tensor
    against: str
    error: Tensor | None = None
    bound: Tensor | None = None
    start: int = 0
    note: str = ""


def diagnose(inputs: Inputs, found: Difference) -> Failure:
    """The `Failure` that describes `found`, whose `wrong` must hold at least one true element."""
    flat = found.wrong.reshape(-1).nonzero().squeeze(1)
    got, want = found.got.reshape(-1)[flat], found.want.reshape(-1)[flat]
    ulp = ulp_distance(got, want) if want.dtype == got.dtype else None
    error = bound = None
    if found.bound is not None:
        assert found.error is not None
        error, bound = found.error.reshape(-1)[flat], found.bound.reshape(-1)[flat]
        # A NaN error is as bad as it gets; 0/0 does not occur, since a zero error is within any bound.
        severity = torch.nan_to_num(error / bound, nan=float("inf"), posinf=float("inf"))
    else:
        assert ulp is not None
        severity = ulp

    def element(i: int) -> Element:
        row, column = divmod(int(flat[i]), found.got.shape[1])
        row += found.start
        return Element(
            coordinate=(row, column),
            got=show(got[i]),
            want=_show_want(want[i], got.dtype),
            ulp=None if ulp is None else int(ulp[i]),
            error=None if error is None else float(error[i]),
            bound=None if bound is None else float(bound[i]),
            place=place(inputs, found.output, row, column),
        )

    return Failure(
        clause=found.clause,
        output=found.output,
        wrong=len(flat),
        total=int(found.judged.sum()) * (found.got.shape[1] // max(found.judged.shape[1], 1)),
        first=element(0),
        worst=element(int(severity.argmax())),
        against=found.against,
        hints=(*_value_hints(got, want, ulp), *_place_hints(inputs.problem, found)),
        note=found.note,
    )


def place(inputs: Inputs, output: str, row: int, column: int) -> Place:
    """The `Place` of element [row, column] of `output`."""
    p = inputs.problem
    if output == "grad_ape":
        overlap = p.coff == 2 and column < p.head_dim
        return Place(ape_rows=p.rows - int(p.row_is_first[: p.rows].sum()) if overlap else p.rows)
    if output == "out":
        return _row_place(inputs, row, column, None, None)
    slot = p.slot(row, column)
    consumer = p.consumer(row, column)
    if consumer is not None:
        return _row_place(inputs, consumer, column % p.head_dim, slot, row)
    inside = row < p.tokens
    return Place(slot=slot, segment=int(np.searchsorted(p.cu_seqlens, row, side="right")) - 1 if inside else None)


def _row_place(inputs: Inputs, row: int, column: int, slot: Slot | None, token: int | None) -> Place:
    p = inputs.problem
    segment = int(p.row_segment[row])
    return Place(
        slot=slot,
        row=row,
        segment=segment,
        block=row - int(p.cu_seqlens_comp[segment]) if segment >= 0 else 0,
        first=bool(p.row_is_first[row]),
        window=_window(inputs, row, column, token),
        window_size=p.window,
    )


def _window(inputs: Inputs, row: int, column: int, token: int | None) -> tuple[WindowValue, ...]:
    """The window of out[row, column]; of a long one both ends, the largest logit and the entry at `token`."""
    values = [_value(inputs, k, at) for k, at in enumerate(inputs.problem.row_window(row, column))]
    if len(values) <= _SHOWN:
        return tuple(values)
    ends = (_SHOWN - 2) // 2
    kept = {*range(ends), *range(len(values) - ends, len(values))}
    kept.add(max(range(len(values)), key=lambda k: values[k].score + values[k].ape))
    kept.update(v.k for v in values if v.at is not None and v.at.token == token)
    return tuple(values[k] for k in sorted(kept))


def _value(inputs: Inputs, k: int, at: WindowSlot | None) -> WindowValue:
    if at is None:
        return WindowValue(k, None)
    score, kv = inputs.score[at.token, at.column], inputs.kv[at.token, at.column]
    return WindowValue(k, at, score.item(), inputs.ape[at.ape_row, at.column].item(), kv.item())


def _show_want(want: Tensor, dtype: torch.dtype) -> str:
    if want.dtype == dtype:
        return show(want)
    return f"{want.item():.17g}, nearest {show(want.to(dtype))}"


def _value_hints(got: Tensor, want: Tensor, ulp: Tensor | None) -> list[str]:
    """What the values of all wrong elements have in common."""
    hints = []
    if bool(((got == 0) & (want == 0)).all()):
        hints.append("all differ by the sign of zero only")
    elif ulp is not None and bool((ulp == 1).all()):
        hints.append("all differ by one ulp")
    elif ulp is not None and bool((got == -want).all()):
        hints.append("all have the wrong sign")
    if len(got) > 1 and bool((bit_pattern(got) == bit_pattern(got[0])).all()):
        hints.append(f"all wrong elements hold the same bits: {show(got[0])}")
    elif bool(torch.isnan(got).all()):
        hints.append("all wrong elements are NaN")
    return hints


def _place_hints(p: Problem, found: Difference) -> list[str]:
    """Properties of place that every wrong element has and some judged element has not."""
    rows, halves = found.judged.shape
    wrong = found.wrong.reshape(rows, halves, -1)
    if bool((wrong == found.judged[:, :, None]).all()):
        return ["every judged element is wrong"]
    judged_groups = found.judged.cpu().numpy()
    judged_columns = np.repeat(judged_groups.any(0), wrong.shape[2])
    wrong_groups, wrong_columns = wrong.any(2).cpu().numpy(), wrong.any(0).reshape(-1).cpu().numpy()
    groups = _group_properties(p, found, wrong_groups)
    columns = _column_properties(p, found.output, wrong_columns)
    hints = [text for text, has in groups if has[wrong_groups].all() and not has[judged_groups].all()]
    hints += [text for text, has in columns if has[wrong_columns].all() and not has[judged_columns].all()]
    return [f"all wrong elements are {text}" for text in hints]


def _group_properties(p: Problem, found: Difference, wrong: Mask) -> list[tuple[str, Mask]]:
    """Named properties of the (row, half) groups of the difference, each a bool array of the shape of `wrong`."""
    index = np.arange(found.start, found.start + len(wrong))
    at = index[wrong.any(1)]
    noun = {"out": "row", "grad_ape": "ape row"}.get(found.output, "token")
    by_row, by_group = _span(noun, index, at), []
    if found.output == "out":
        segment, first = p.row_segment[index], p.row_is_first[index]
        last = np.append(p.row_segment[1:] != p.row_segment[:-1], True)[index]
        by_row += [
            ("in capacity padding rows", segment == -1),
            ("in first blocks", first),
            ("in blocks that are not a first one", ~first),
            ("in the last blocks of segments", last & (segment >= 0)),
        ]
    elif found.output != "grad_ape":
        slots = p.slots[index]
        segment = np.searchsorted(p.cu_seqlens, index, side="right") - 1
        segment[index >= p.tokens] = -1
        by_group = [(f"in {slot.name} slots", slots == slot) for slot in Slot]
        by_group += [("in slots that no row consumes", slots != Slot.CONSUMED)]
    else:
        segment = np.full(len(index), -1)
    mine = segment[at[0] - found.start]
    by_row += [(f"in segment {mine}", segment == mine)] if mine >= 0 else []
    return [(text, np.broadcast_to(has[:, None], wrong.shape)) for text, has in by_row] + by_group


def _column_properties(p: Problem, output: str, wrong: Mask) -> list[tuple[str, Mask]]:
    """Named properties of the columns of the difference, each a bool array (columns,)."""
    column = np.arange(len(wrong))
    named = _span("column", column, column[wrong])
    named += [("in even columns", column % 2 == 0), ("in odd columns", column % 2 == 1)]
    if p.coff == 2 and output != "out":
        named += [
            ("in columns < head_dim (overlap)", column < p.head_dim),
            ("in columns >= head_dim (own block)", column >= p.head_dim),
        ]
    return named


def _span(noun: str, index: NDArray[np.int64], at: NDArray[np.int64]) -> list[tuple[str, Mask]]:
    """The one property of lying where `at` does, if that is a single place or a run without gaps."""
    if len(at) != at[-1] - at[0] + 1:
        return []
    name = f"in {noun} {at[0]}" if len(at) == 1 else f"in {noun}s {at[0]} to {at[-1]}"
    return [(name, (index >= at[0]) & (index <= at[-1]))]
