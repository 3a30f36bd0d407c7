"""Several runs of `bench` as one, from the files that they wrote."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ._bench_measure import Row

SAME = ("machine", "kernel", "versions")
"""What of a run's description must be that of all others."""

_Merge = Callable[[list[float]], float]
_BY_SUBJECT: dict[str, _Merge] = {
    "us": statistics.median, "graph_us": statistics.median, "host_us": statistics.median, "peak_bytes": max,
}  # fmt: skip
_SINGLE: dict[str, _Merge] = {"add_us": statistics.median, "dape_share": statistics.median, "differing": max}


def medians(paths: Sequence[Path]) -> tuple[list[Row], list[float], dict[str, str]]:
    """The rows, copy bandwidths and description of runs that `--json` wrote, each figure the median over them.

    Of differing elements and of memory it is the most. A subject that some runs left out has that of the others.

    Raises:
        ValueError: a file cannot be read or is no run's, or two runs differ in `SAME` or in their rows.
    """
    runs = [_read(path) for path in paths]
    first = runs[0]
    for path, run in zip(paths[1:], runs[1:], strict=True):
        for what in SAME:
            if run["about"][what] != first["about"][what]:
                raise ValueError(
                    f"--medians: {path} has {what} {run['about'][what]!r}, need {first['about'][what]!r} of {paths[0]}"
                )
        if [_place(row) for row in run["rows"]] != [_place(row) for row in first["rows"]]:
            raise ValueError(f"--medians: {path} has other packs, directions or threads than {paths[0]}")
        if len(run["copy_bytes_per_second"]) != len(first["copy_bytes_per_second"]):
            raise ValueError(f"--medians: {path} has another number of copy bandwidths than {paths[0]}")
    rows = [_median(same) for same in zip(*(run["rows"] for run in runs), strict=True)]
    bandwidths = [statistics.median(same) for same in zip(*(run["copy_bytes_per_second"] for run in runs), strict=True)]
    about = {**first["about"], "command": "; ".join(dict.fromkeys(run["about"]["command"] for run in runs))}
    return rows, bandwidths, {**about, "runs": f"medians of {len(runs)}"}


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text())
        for row in run["rows"]:
            Row(**row)
            figures = [row["floor_us"], *(figure for name in _BY_SUBJECT for figure in row[name].values())]
            _check_numbers(*figures, *_there(row[name] for name in _SINGLE))
            list(row["notes"])
        for what in (*SAME, "command"):
            str(run["about"][what])
        _check_numbers(*run["copy_bytes_per_second"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--medians: got {path}, need what `bench --json` wrote ({error})") from error
    return run  # type: ignore[no-any-return]


def _check_numbers(*figures: object) -> None:
    for figure in figures:
        if not isinstance(figure, int | float) or not math.isfinite(figure):
            raise ValueError(f"{figure!r} is no figure")


def _place(row: dict[str, Any]) -> tuple[object, ...]:
    return row["pack"], row["direction"], row["threads"]


def _median(same: Sequence[dict[str, Any]]) -> Row:
    figures = dict(same[0])
    figures["floor_us"] = statistics.median(row["floor_us"] for row in same)
    for name, of in _BY_SUBJECT.items():
        subjects = dict.fromkeys(subject for row in same for subject in row[name])
        figures[name] = {s: of([row[name][s] for row in same if s in row[name]]) for s in subjects}
    for name, of in _SINGLE.items():
        values = _there(row[name] for row in same)
        figures[name] = of(values) if values else None
    figures["notes"] = list(dict.fromkeys(note for row in same for note in row["notes"]))
    return Row(**figures)


def _there(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
