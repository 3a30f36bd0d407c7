"""The picture of a run: times as bars, the floor as a line across each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ._bench_measure import Row

SUBJECTS = {"ours": "tab:blue", "peer": "tab:orange", "peer-deterministic": "tab:red", "eager": "tab:gray"}


def require() -> None:
    """Raises ValueError if the library that draws is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture: needs matplotlib: pip install csa-gate[bench]")


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG: one panel a direction, one group of bars a row."""
    figures = importlib.import_module("matplotlib.figure")
    directions = list(dict.fromkeys(row.direction for row in rows))
    shown = {name: colour for name, colour in SUBJECTS.items() if any(name in row.us for row in rows)}
    figure = figures.Figure(figsize=(14, 4 * len(directions)), layout="constrained")
    for i, direction in enumerate(directions):
        axes = figure.add_subplot(len(directions), 1, i + 1)
        mine = [row for row in rows if row.direction == direction]
        width = 0.8 / max(1, len(shown))
        for j, (name, colour) in enumerate(shown.items()):
            at = [x + (j - (len(shown) - 1) / 2) * width for x, row in enumerate(mine) if name in row.us]
            axes.bar(at, [row.us[name] for row in mine if name in row.us], width, label=name, color=colour)
        for x, row in enumerate(mine):
            axes.hlines(row.floor_us, x - 0.4, x + 0.4, color="black", label="floor" if x == 0 else None)
        axes.set_yscale("log")
        axes.set_ylabel(f"{direction}, µs")
        names = [row.pack if row.threads is None else f"{row.pack} {row.threads}T" for row in mine]
        axes.set_xticks(range(len(mine)), names, rotation=30, ha="right")
        if i == 0:
            axes.legend(ncols=len(shown) + 1)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
