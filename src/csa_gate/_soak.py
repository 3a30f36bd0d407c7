"""`python -m csa_gate soak`: random problems, one after the other, for as long as one likes."""

from __future__ import annotations

import argparse
import json
import platform
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from csa_gate.fixtures.canary import POISONS
from csa_gate.fixtures.drawn import FAMILIES, Family, draw_case, draw_shape
from csa_gate.fixtures.kernels import Kernel, choose_device, contract_on, load_kernel, refusal
from csa_gate.fixtures.relations import RELATIONS
from csa_gate.oracles import CLAUSES, Contract, Problem, Verdict

from . import __version__
from ._check import SINGLE_RUN, related_runs, single_run
from ._files import require_writable, write_whole

_EACH_SHAPE = 8  # problems of one shape in a row, for a new shape has to be compiled; the first round has one of each
_SHOWN = 10  # failures printed in full; the JSON file has all of them
_RAISED = "raised"
_BY_CHANCE = "dape_accuracy"  # a test of significance: among thousands of problems some fail it by chance alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--minutes", type=float, required=True, help="how long; 0.5 is thirty seconds")
    parser.add_argument("--kernel", default="fused", help="fused, eager, package.module:attr or file.py:attr")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--seed", type=int, help="of the problems drawn (default: a new one, which is printed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts and all failures here")


def run(args: argparse.Namespace) -> int:
    """Draw problems until the time is over, hold the kernel to each, and print what was kept.

    Returns 0 if every clause was kept, 1 if one was broken or none was judged, 130 after Ctrl-C. Raises ValueError if
    an option makes no sense.
    """
    if not 0 < args.minutes < float("inf"):
        raise ValueError(f"--minutes: got {args.minutes}, need a number above 0")
    seed = secrets.randbits(32) if args.seed is None else args.seed
    if not 0 <= seed < 2**64:
        raise ValueError(f"--seed: got {seed}, need an integer in [0, 2**64)")
    require_writable("--json", args.json)
    kernel = load_kernel(args.kernel)
    device = choose_device(args.device, kernel)
    soak = Soak(kernel, args.kernel, device, seed)
    print(f"kernel {args.kernel}, device {device}, seed {seed}, {args.minutes:g} minutes", flush=True)
    end, stopped = monotonic() + 60 * args.minutes, False
    try:
        while monotonic() < end:
            soak.step()
    except KeyboardInterrupt:
        stopped = True
    print("\n".join([*soak.table(), *soak.reach()]))
    if args.json is not None:
        write_whole(args.json, json.dumps(soak.report(args.minutes, stopped), indent=1) + "\n")
    if stopped:
        print("stopped before its end")
        return 130
    if soak.failures:
        print(f"soak failed: {len(soak.failures)} failures in {soak.cases} problems")
        return 1
    if not soak.counts:
        print(f"soak failed: nothing was judged in {soak.cases} problems{soak.why}")
        return 1
    missing = soak.not_reached()
    print(f"soak passed: {soak.cases} problems" + (f"; not reached: windows {', '.join(missing)}" if missing else ""))
    return 0


class Soak:
    """One kernel under random problems, and what came of it.

    cases: problems run. reached: the same, by (family, ratio). counts: how often a clause was judged, by (clause,
    family, kept). failures: each as its family, its broken clauses and its message.
    """

    def __init__(self, kernel: Kernel, spec: str, device: torch.device, seed: int) -> None:
        contract = contract_on(kernel, device)
        assert contract is not None, "choose_device returns a device that the kernel runs on"
        self.kernel, self.spec, self.device, self.seed = kernel, spec, device, seed
        self.contract: Contract = contract
        self.cases, self.why = 0, ""
        self.reached: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[tuple[str, str, bool]] = Counter()
        self.failures: list[dict[str, Any]] = []
        self._rng = np.random.default_rng(seed)
        self._shapes = self._left = 0  # drawn so far; problems to come of the last

    def step(self) -> None:
        """Draw one problem and run it alone, then in one of the relations."""
        if self._left == 0:
            self._family = FAMILIES[self._shapes % len(FAMILIES)]
            self._shape = draw_shape(self._pick, self._family)
            self._left = 1 if self._shapes < len(FAMILIES) else _EACH_SHAPE
            self._shapes += 1
        self._left -= 1
        family = self._family
        case = draw_case(self._pick, self._shape)
        relation = RELATIONS[self._pick(0, len(RELATIONS) - 1)]
        poison = POISONS[self._pick(0, len(POISONS) - 1)]
        reason = refusal(self.kernel, case.problem)
        if reason is not None:
            self.why = f"; the last refused: {reason}"
            return
        self.cases += 1
        self.reached[family.name, case.problem.ratio] += 1
        inputs = case.inputs(self.device)
        clauses = [c for c in SINGLE_RUN if c not in self._left_out(case.problem) and self.contract.claims(c)]
        verdicts = single_run(self.kernel, self.spec, self.contract, inputs, clauses, poison)
        self._note(family, verdicts)
        if not isinstance(verdicts, str):  # else the inputs may be spoilt
            verdicts = related_runs(self.kernel, self.spec, self.contract, inputs, relation.clauses, relation)
            self._note(family, verdicts)

    def table(self) -> list[str]:
        """How often each clause was judged in each family of windows, and how often it was broken."""
        names = [f"{family.name} {_span(family.windows)}" for family in FAMILIES]
        lines = [f"{'clause':<20}" + "".join(f"{name:>16}" for name in names) + f"{'broken':>10}"]
        for clause in (*CLAUSES, _RAISED):
            row = [sum(self.counts[clause, family.name, kept] for kept in (True, False)) for family in FAMILIES]
            broken = sum(self.counts[clause, family.name, False] for family in FAMILIES)
            if any(row):
                lines.append(f"{clause:<20}" + "".join(f"{count:>16}" for count in row) + f"{broken:>10}")
            elif clause != _RAISED and self.contract.claims(clause):
                lines.append(f"{clause:<20}{'claimed, but not judged here':>48}")
        return lines

    def reach(self) -> list[str]:
        """Which ratios had their turn in each family: a short run gets to few of them, perhaps to none."""
        lines = []
        for family in FAMILIES:
            ratios = self._ratios(family)
            what = f"{sum(ratios.values())} problems, ratios {_runs(ratios)}" if ratios else "not reached"
            lines.append(f"{family.name} windows, {_span(family.windows)}: {what}")
        return lines

    def not_reached(self) -> list[str]:
        """The families of which no problem was run, as their windows."""
        return [_span(family.windows) for family in FAMILIES if not self._ratios(family)]

    def report(self, minutes: float, stopped: bool) -> dict[str, Any]:
        """All of it, for a file."""
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for (clause, family, kept), count in sorted(self.counts.items()):
            entry = counts.setdefault(clause, {}).setdefault(family, {"kept": 0, "broken": 0})
            entry["kept" if kept else "broken"] = count
        return {
            "schema": 1,
            "kernel": self.spec,
            "device": str(self.device),
            "seed": self.seed,
            "minutes": minutes,
            "stopped": stopped,
            "versions": {"csa-gate": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "problems": self.cases,
            "ratios": {family.name: self._ratios(family) for family in FAMILIES},
            "counts": counts,
            "failures": self.failures,
        }

    def _ratios(self, family: Family) -> dict[int, int]:
        """The family's problems run, by ratio."""
        return {ratio: count for (name, ratio), count in sorted(self.reached.items()) if name == family.name}

    def _left_out(self, problem: Problem) -> tuple[str, ...]:
        """Clauses that a single run of this problem does not decide."""
        if problem.head_dim == 1 and self.device.type == "cuda" and self.contract.forward_bits == "eager":
            return (_BY_CHANCE, "forward_bits", "gradient_bits", "row_padding")  # torch's order is not specified there
        return (_BY_CHANCE,)

    def _pick(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high, endpoint=True))

    def _note(self, family: Family, verdicts: list[Verdict] | str) -> None:
        if isinstance(verdicts, str):
            clause = "memory" if verdicts.startswith("contract broken: memory") else _RAISED
            self.counts[clause, family.name, False] += 1
            self._fail(family, (clause,), verdicts)
            return
        for verdict in verdicts:
            for clause in verdict.checked:
                self.counts[clause, family.name, clause not in verdict.broken] += 1
            if not verdict:
                self._fail(family, verdict.broken, verdict.message)

    def _fail(self, family: Family, clauses: tuple[str, ...], message: str) -> None:
        self.failures.append({"family": family.name, "clauses": list(clauses), "message": message})
        if len(self.failures) <= _SHOWN:
            print(f"{message}\n", flush=True)
        elif len(self.failures) == _SHOWN + 1:
            print("more failures are counted, not shown\n", flush=True)


def _span(windows: tuple[int, int]) -> str:
    return f"{windows[0]}-{windows[1]}"


def _runs(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours as a span: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else _span((run[0], run[-1])) for run in runs)
