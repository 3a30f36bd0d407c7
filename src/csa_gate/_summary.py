"""What the gate tests of one session came to, kernel by kernel and clause by clause. Strings in, strings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

CLAUSE = "csa_clause"
KERNEL = "csa_kernel"
DEVICE = "csa_device"
MACHINE = "csa_machine"
CLAIMS = "csa_claims"
"""Properties of a gate test, which travel in its reports: the clause it tests, the kernel under test, the device's
type and model, and the clauses that the kernel claims there, separated by spaces. Only the first is always there."""

MAX_REASONS = 5
"""Distinct reasons shown for one clause: enough to see why, few enough to leave the table readable."""

_WEIGHT = {"skipped": 0, "passed": 1, "failed": 2}


@dataclass(frozen=True)
class Subject:
    """A kernel on a device, one block of the summary. Two kernels of one name are told apart by what they claim.

    All is empty where no test got as far as having a kernel.
    """

    kernel: str = ""
    device: str = ""
    claims: tuple[str, ...] = ()

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Subject:
        """The subject that the properties of a test name."""
        return cls(properties[KERNEL], properties[DEVICE], tuple(properties[CLAIMS].split()))

    def __str__(self) -> str:
        return f"{self.kernel} on {self.device}" if self.kernel else "tests without a kernel"


@dataclass
class _Case:
    subject: Subject
    clause: str
    outcome: str
    reason: str = ""


class Tally:
    """Counts gate tests. One test has up to three reports, of which the worst counts."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._subjects: dict[Subject, None] = {}  # as a set that keeps its order
        self.machines: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._cases)

    def add(self, nodeid: str, properties: Mapping[str, str], outcome: str, reason: str = "") -> None:
        """Count one report of a gate test. `outcome` is passed, failed or skipped; `reason` says why it was skipped."""
        subject = Subject()
        if KERNEL in properties:
            subject = Subject.of(properties)
            self._subjects[subject] = None
            self.machines[subject.device] = properties[MACHINE]
        case = _Case(subject, properties[CLAUSE], outcome, reason)
        before = self._cases.get(nodeid)
        if before is None or _WEIGHT[before.outcome] <= _WEIGHT[outcome]:
            self._cases[nodeid] = case

    @property
    def failed(self) -> int:
        """Gate tests that failed."""
        return sum(case.outcome == "failed" for case in self._cases.values())

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels under test."""
        return list(dict.fromkeys(subject.kernel for subject in self._subjects))

    @property
    def kept(self) -> str:
        """The kernels, and how many clauses of each were put to the test."""
        return ", ".join(f"{subject} ({len(subject.claims)} clauses)" for subject in self._subjects)

    def faults(self, *, whole: bool) -> list[str]:
        """Why the run proves nothing, or not all that it should; one line a kernel.

        Args:
            whole: whole levels were selected, so that every kernel and every claim needs a test that ran.
        """
        if all(case.outcome == "skipped" for case in self._cases.values()):
            return ["no gate test passed, all were skipped"]
        if not whole:
            return []
        faults = []
        for subject in self._subjects:
            missing = self._missing(subject)
            if not self._ran(subject):
                faults.append(f"{subject}: no test passed, all were skipped")
            elif missing:
                why = {case.reason: None for clause in missing for case in self._of(subject, clause) if case.reason}
                because = f": {'; '.join([*why][:MAX_REASONS])}" if why else ""
                faults.append(f"{subject} claims {', '.join(missing)}, but no test of that ran{because}")
        return faults

    def unproved(self) -> dict[Subject, list[str]]:
        """The kernels that claim a clause of which no test ran, and those clauses."""
        return {subject: missing for subject in self._subjects if (missing := self._missing(subject))}

    def _missing(self, subject: Subject) -> list[str]:
        ran = self._ran(subject)
        return [clause for clause in subject.claims if clause not in ran]

    def _ran(self, subject: Subject) -> set[str]:
        return {c.clause for c in self._cases.values() if c.subject == subject and c.outcome != "skipped"}

    def table(self) -> list[str]:
        """Every kernel's clauses: how many cases ran, passed, failed, were skipped and why."""
        lines = []
        subjects = sorted({case.subject for case in self._cases.values()}, key=str)
        for subject in subjects:
            lines += [str(subject), f"  {'clause':<20}{'ran':>7}{'passed':>8}{'failed':>8}{'skipped':>9}"]
            for clause in self._clauses(subject):
                cases = self._of(subject, clause)
                count = Counter(c.outcome for c in cases)
                ran = count["passed"] + count["failed"]
                unclaimed = bool(subject.kernel) and clause not in subject.claims
                lines.append(
                    f"  {clause:<20}{ran:>7}{count['passed']:>8}{count['failed']:>8}{count['skipped']:>9}"
                    + ("  not claimed" if unclaimed else "")
                )
                lines += _reasons(Counter(c.reason for c in cases if c.outcome == "skipped"))
        return lines

    def _of(self, subject: Subject, clause: str) -> list[_Case]:
        return [case for case in self._cases.values() if case.subject == subject and case.clause == clause]

    def _clauses(self, subject: Subject) -> list[str]:
        """The clauses claimed, in the contract's order, then the others that have tests."""
        tested = {case.clause for case in self._cases.values() if case.subject == subject}
        return [*subject.claims, *sorted(tested.difference(subject.claims))]


def _reasons(reasons: Counter[str]) -> list[str]:
    shown = [f"      {count} x {reason}" for reason, count in reasons.most_common(MAX_REASONS)]
    if len(reasons) > MAX_REASONS:
        shown.append(f"      and {len(reasons) - MAX_REASONS} more reasons")
    return shown
