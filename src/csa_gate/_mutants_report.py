"""What became of planted faults: as lines, as a table of faults and clauses, as JSON and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from csa_gate.fixtures.mutants import Fault
from csa_gate.oracles import CLAUSES

from ._mutants_session import End

_KILLER, _INTENDED, _NOTHING = "#", "o", "."
_STYLE = (
    "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{padding:2px 6px;border:1px solid #ddd}"
    "th.v{writing-mode:vertical-rl}.killed{background:#d7f0d7}.survived,.error{background:#f6c9c9}"
    ".elsewhere{color:#999}"
)


@dataclass(frozen=True)
class Fate:
    """What became of one fault: the session that ended its run, and the level that it was of.

    A crash or a hang kills a fault of which the catalogue says so; of any other, it is an error.
    """

    fault: Fault
    level: str
    end: End

    @classmethod
    def of(cls, fault: Fault, level: str, end: End) -> Fate:
        """The fate that a session's end comes to."""
        if end.kind in ("crash", "hang") and end.kind not in fault.ends:
            end = End(
                "error", "", end.case, f"{end.kind}, which the catalogue does not expect: {end.what}", end.seconds
            )
        return cls(fault, level, end)

    @property
    def survived(self) -> bool:
        """Whether every test passed."""
        return self.end.kind == "passed"

    @property
    def killed(self) -> bool:
        """Whether the suites saw the fault."""
        return self.end.kind in ("broken", "crash", "hang")

    @property
    def as_meant(self) -> bool:
        """Whether the clause that must see the fault was the one that did."""
        return self.killed and self.end.clause == self.fault.clause

    @property
    def word(self) -> str:
        """The fate in a word."""
        return "killed" if self.killed else "survived" if self.survived else "error"


def line(fate: Fate) -> str:
    """One fault's fate, with the clause and the test that killed it."""
    end = fate.end
    if fate.survived:
        return f"{fate.fault.id}: survived {fate.level}; meant for {fate.fault.clause}"
    if not fate.killed:
        return f"{fate.fault.id}: error at {fate.level} in {end.case or 'no test'}: {end.what}"
    other = "" if fate.as_meant else f" (meant for {fate.fault.clause})"
    return (
        f"{fate.fault.id}: killed at {fate.level} by {end.clause}{other}: {end.case or end.what}, {end.seconds:.1f} s"
    )


def table(fates: Sequence[Fate], elsewhere: Sequence[Fault]) -> list[str]:
    """Faults against clauses, a letter each, and the test that killed the fault."""
    letters = {clause: chr(ord("a") + i) for i, clause in enumerate(CLAUSES)}
    legend = [f"  {letter} {clause}" for clause, letter in letters.items()]
    legend += [f"  {_KILLER} killed the fault, {_INTENDED} should have but was not first"]
    width = max(len(fault.id) for fault in [*(f.fault for f in fates), *elsewhere])
    lines = [f"{'':<{width}}  {''.join(letters.values())}"]
    for fate in fates:
        marks = "".join(_mark(fate, clause) for clause in CLAUSES)
        case = f"{fate.level} {fate.end.case or fate.end.what}" if not fate.survived else ""
        lines.append(f"{fate.fault.id:<{width}}  {marks}  {fate.word} {case}".rstrip())
    lines += [f"{fault.id:<{width}}  {_NOTHING * len(CLAUSES)}  not run here" for fault in elsewhere]
    return ["", *legend, "", *lines]


def verdict(fates: Sequence[Fate], elsewhere: Sequence[Fault], device: str) -> list[str]:
    """The rate, by level, and what is wrong."""
    levels = Counter(fate.level for fate in fates if fate.killed)
    killed = sum(levels.values())
    words = ", ".join(f"{count} at {level}" for level, count in sorted(levels.items()))
    lines = [line(fate) for fate in fates if not fate.killed]
    lines.append(f"{killed} of {len(fates)} faults killed on {device}" + (f": {words}" if words else ""))
    meant = sum(fate.as_meant for fate in fates)
    lines.append(f"{meant} of them by the clause they were meant for")
    if elsewhere:
        lines.append(f"{len(elsewhere)} not run here: what they change does not run on {device}")
    return lines


def as_json(fates: Sequence[Fate]) -> dict[str, Any]:
    """The fates of the faults that ran."""
    return {
        "total": len(fates),
        "killed": sum(fate.killed for fate in fates),
        "survivors": [fate.fault.id for fate in fates if fate.survived],
        "faults": [
            {
                "id": fate.fault.id,
                "killed": fate.killed,
                "level": fate.level if fate.killed else None,
                "clause": fate.end.clause if fate.killed else None,
                "case": (fate.end.case or None) if fate.killed else None,
                "meant_for": fate.fault.clause,
                "file": fate.fault.file,
                "effect": fate.fault.effect,
                "error": fate.end.what if fate.word == "error" else None,
            }
            for fate in fates
        ],
    }


def html(fates: Sequence[Fate], elsewhere: Sequence[Fault], device: str) -> str:
    """A page with the table, the effect of each fault and the verdict."""
    head = "".join(f'<th class="v">{escape(clause)}</th>' for clause in CLAUSES)
    rows = [
        _row(f.fault, f.word, [_mark(f, clause) for clause in CLAUSES], f"{f.word} {f.level}", f.end.case or f.end.what)
        for f in fates
    ]
    rows += [_row(fault, "elsewhere", [""] * len(CLAUSES), "not run here", "") for fault in elsewhere]
    words = "".join(f"<p>{escape(text)}</p>" for text in verdict(fates, elsewhere, device))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Planted faults</title><style>{_STYLE}</style>'
        f"<h1>Planted faults</h1>{words}<p>{_KILLER} killed the fault, {_INTENDED} should have but was not first</p>"
        f"<table><tr><th>fault<th>file{head}<th>effect<th>end<th>case</tr>{''.join(rows)}</table></html>\n"
    )


def _row(fault: Fault, style: str, marks: Sequence[str], end: str, case: str) -> str:
    cells = [fault.id, fault.file, *marks, fault.effect, end, case]
    return f'<tr class="{style}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _mark(fate: Fate, clause: str) -> str:
    if fate.killed and fate.end.clause == clause:
        return _KILLER
    return _INTENDED if clause == fate.fault.clause else _NOTHING
