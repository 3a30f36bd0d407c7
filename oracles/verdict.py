"""`Verdict`, what the judge found, as data and as a message that is enough to start debugging."""

from __future__ import annotations

from dataclasses import dataclass

from .bits import NAN_DISTANCE
from .problem import Slot, WindowSlot


@dataclass(frozen=True)
class WindowValue:
    """Entry `k` of a row's window and what the inputs hold there.

    `at` is None for the invalid entries of a first block, which count as logit -inf and value 0.
    """

    k: int
    at: WindowSlot | None
    score: float = float("-inf")
    ape: float = 0.0
    kv: float = 0.0

    def __str__(self) -> str:
        if self.at is None:
            return f"{self.k:>4}  invalid: first block"
        return (
            f"{self.k:>4} {self.at.token:>9} {self.at.column:>6} {self.at.ape_row:>7}"
            f" {self.score:>15.9g} {self.ape:>15.9g} {self.kv:>15.9g}"
        )


@dataclass(frozen=True)
class Place:
    """Where an element sits in the geometry; what does not apply is None.

    slot: the class of a gradient's slot. row, segment, block, first: the pooled row that the element is or that
    consumes it, its segment (-1 for a padding row), its block in that segment, whether that is the segment's first.
    An unconsumed slot has no row, and its segment is the token's. ape_rows: how many rows an element of grad_ape sums.
    window: the row's window, `window_size` entries, with the middle left out where there are many.
    """

    slot: Slot | None = None
    row: int | None = None
    segment: int | None = None
    block: int | None = None
    first: bool | None = None
    ape_rows: int | None = None
    window: tuple[WindowValue, ...] = ()
    window_size: int = 0

    def lines(self) -> list[str]:
        """The place as text, without indentation."""
        words = []
        if self.slot is not None:
            words.append(f"{self.slot.name} slot")
        if self.row is not None:
            where = "capacity padding" if self.segment == -1 else f"segment {self.segment}, block {self.block}"
            verb = "consumed by row" if self.slot is not None else "row"
            words.append(f"{verb} {self.row} ({where}{', a first block' if self.first else ''})")
        elif self.segment is not None:
            words.append(f"segment {self.segment}, consumed by no row")
        if self.ape_rows is not None:
            words.append(f"a sum over {self.ape_rows} rows")
        text = [", ".join(words)] if words else []
        if self.window:
            title = f"   k {'token':>9} {'column':>6} {'ape row':>7} {'score':>15} {'ape':>15} {'kv':>15}"
            text += [f"window of that row, {self.window_size} entries:", title]
            for before, value in zip((None, *self.window), self.window, strict=False):
                if before is not None and value.k != before.k + 1:
                    text.append("   ...")
                text.append(str(value))
        return text


@dataclass(frozen=True)
class Element:
    """One wrong element: `coordinate` in its output, got and want with their bits, and how far apart they are.

    ulp: steps between got and want, where both have the output's dtype. error, bound: |got - fp64| and how large it
    may be, where the clause is one of bounds.
    """

    coordinate: tuple[int, int]
    got: str
    want: str
    ulp: int | None
    error: float | None
    bound: float | None
    place: Place

    def __str__(self) -> str:
        text = f"{list(self.coordinate)}: got {self.got}, want {self.want}"
        if self.ulp is not None:
            text += ", NaN on one side only" if self.ulp == NAN_DISTANCE else f", {self.ulp} ulp apart"
        if self.bound is not None and self.error is not None:
            ratio = self.error / self.bound if self.bound else float("inf")
            text += f"; error {self.error:.4g}, bound {self.bound:.4g} ({ratio:.4g} times)"
        return text


@dataclass(frozen=True)
class Failure:
    """One clause broken in one output.

    wrong, total: how many of the elements that the clause looks at there are wrong. first, worst: the first in
    memory order, and the one with the most ulp or the largest share of its bound. against: what it was compared
    with, as words that follow the output's name. hints: what all wrong elements have in common, and not all right
    ones. note: a figure of the whole output.
    """

    clause: str
    output: str
    wrong: int
    total: int
    first: Element
    worst: Element
    against: str
    hints: tuple[str, ...] = ()
    note: str = ""

    def lines(self, shown: set[tuple[str, tuple[int, int]]]) -> list[str]:
        """The failure as text; the place of an element that is in `shown` is left out, others join `shown`."""
        lines = [f"{self.clause}: {self.output} {self.against}: {self.wrong} of {self.total} elements wrong"]
        lines += [f"  {text}" for text in (self.note, *self.hints) if text]
        elements = {"first": self.first, "worst": self.worst}
        if self.worst.coordinate == self.first.coordinate:
            del elements["worst"]
        for label, element in elements.items():
            lines.append(f"  {label} {self.output}{element}")
            key = (self.output, element.coordinate)
            lines += ["        place as above"] if key in shown else [f"        {t}" for t in element.place.lines()]
            shown.add(key)
        return lines


@dataclass(frozen=True)
class Verdict:
    """What the judge found: true when every clause of `checked` was kept, and there was one.

    subject: the kernel, problem, seed, distribution and device, as text. reproduce: a command, empty where unknown.
    """

    checked: tuple[str, ...]
    failures: tuple[Failure, ...]
    subject: str
    reproduce: str = ""

    def __bool__(self) -> bool:
        return bool(self.checked) and not self.failures

    @property
    def broken(self) -> tuple[str, ...]:
        """The clauses that failed, in the order of `checked`."""
        return tuple(c for c in self.checked if any(f.clause == c for f in self.failures))

    @property
    def message(self) -> str:
        """The verdict as text of several lines."""
        kept = [c for c in self.checked if c not in self.broken]
        head = f"contract broken: {', '.join(self.broken)}" if self.failures else "contract kept"
        if not self.checked:
            head = "nothing was judged: no clause that is claimed and asked for finds anything to look at"
        shown: set[tuple[str, tuple[int, int]]] = set()
        lines = [head, self.subject, *(line for failure in self.failures for line in failure.lines(shown))]
        lines.append(f"kept: {', '.join(kept) or 'none'}")
        if self.failures and self.reproduce:
            lines.append(f"reproduce: {self.reproduce}")
        return "\n".join(lines)

    def check(self) -> None:
        """Raise AssertionError with the message if a clause was broken, or none was judged."""
        if not self:
            raise AssertionError(self.message)
