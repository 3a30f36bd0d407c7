"""`python -m csa_gate check`: one kernel, one problem, every clause that a single run or one relation can show."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace

from csa_gate.fixtures.canary import POISONS, MemoryFault
from csa_gate.fixtures.kernels import Kernel, choose_device, contract_on, load_kernel, refusal
from csa_gate.fixtures.relate import Relation, relate
from csa_gate.fixtures.relations import RELATIONS
from csa_gate.fixtures.run import run as run_kernel
from csa_gate.oracles import CLAUSES, Contract, Inputs, Verdict
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.judge import SINGLE_RESULT, check_command, judge
from csa_gate.oracles.parse import parse_problem

SINGLE_RUN = ("memory", *SINGLE_RESULT)
"""The clauses that one run shows."""

_PROPERTIES = {relation.name: relation for relation in RELATIONS}
_RELATED = {clause for relation in RELATIONS for clause in relation.clauses}
_SHOWN = tuple(c for c in CLAUSES if c in SINGLE_RUN or c in _RELATED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--kernel", required=True, help="eager, fused, fused-portable, package.module:attr, x.py:attr")
    parser.add_argument("--problem", required=True, help='"Problem(lens=(9, 5), ratio=4, coff=2, head_dim=64)"')
    parser.add_argument("--distribution", default="normal", choices=DISTRIBUTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--property", choices=_PROPERTIES, help="judge this relation between runs, in place of a single run"
    )
    parser.add_argument(
        "--clause", action="append", choices=_SHOWN, help="judge this clause only; may be given more than once"
    )
    parser.add_argument("--poison", default="nan", choices=POISONS, help="what the buffers of a single run hold before")


def run(args: argparse.Namespace) -> int:
    """Run the case and print the verdict.

    Returns 0 if every clause was kept, 1 if one was broken. Raises ValueError if an option makes no sense, the kernel
    does not take the problem, or no clause applies.
    """
    kernel = load_kernel(args.kernel)
    problem = parse_problem(args.problem)
    device = choose_device(args.device, kernel)
    contract = contract_on(kernel, device)
    assert contract is not None, "choose_device returns a device that the kernel runs on"
    unsupported = refusal(kernel, problem)
    if unsupported is not None:
        raise ValueError(f"--problem: kernel {kernel.name} does not take it: {unsupported}")
    relation = _PROPERTIES.get(args.property)
    wanted = _wanted(contract, kernel.name, args.clause, relation)
    inputs = make_inputs(problem, args.seed, args.distribution, device)
    if relation is None:
        verdicts = single_run(kernel, args.kernel, contract, inputs, wanted, args.poison, args.clause or ())
    else:
        verdicts = related_runs(kernel, args.kernel, contract, inputs, wanted, relation, args.clause or ())
    if isinstance(verdicts, str):
        print(verdicts)
        return 1
    if not verdicts:
        raise ValueError(f"--problem: {', '.join(wanted)} has nothing to look at in {problem}")
    for verdict in verdicts:
        print(verdict.message)
    return 0 if all(verdicts) else 1


def single_run(
    kernel: Kernel,
    spec: str,
    contract: Contract,
    inputs: Inputs,
    clauses: Collection[str],
    poison: str,
    asked: Collection[str] = (),
) -> list[Verdict] | str:
    """Run once and judge some clauses of `SINGLE_RUN`, all of them claimed.

    asked: of these, what the command line names; the command in the message then does, too.

    Returns a verdict, none if there was nothing to look at, or what the kernel did instead of returning.
    """
    reproduce = f"{check_command(inputs, spec)}{_naming(asked)} --poison {poison}"

    def act() -> list[Verdict]:
        result = run_kernel(kernel, inputs, poison=poison)
        verdict = judge(
            contract, inputs, result, kernel=spec, clauses=[c for c in clauses if c != "memory"], reproduce=reproduce
        )
        if "memory" in clauses:  # whatever broke it was raised above
            verdict = replace(verdict, checked=("memory", *verdict.checked))
        return [verdict] if verdict.checked else []

    return _caught(kernel, reproduce, act)


def related_runs(
    kernel: Kernel,
    spec: str,
    contract: Contract,
    inputs: Inputs,
    clauses: Collection[str],
    relation: Relation,
    asked: Collection[str] = (),
) -> list[Verdict] | str:
    """Judge a relation under some of its clauses; returns a verdict for each, else as `single_run`."""
    reproduce = f"{check_command(inputs, spec)} --property {relation.name}{_naming(asked)}"

    def act() -> list[Verdict]:
        return relate(relation, kernel, contract, inputs, clauses, name=spec, reproduce=reproduce)

    return _caught(kernel, reproduce, act)


def _naming(clauses: Collection[str]) -> str:
    return "".join(f" --clause {clause}" for clause in clauses)


def _caught(kernel: Kernel, reproduce: str, act: Callable[[], list[Verdict]]) -> list[Verdict] | str:
    try:
        return act()
    except MemoryFault as fault:
        return f"{fault}\nreproduce: {reproduce}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a kernel must not end the gate's process as if all were well
        traceback.print_exc()
        return f"kernel {kernel.name} raised {type(error).__name__}: {error}\nreproduce: {reproduce}"


def _wanted(contract: Contract, kernel: str, asked: list[str] | None, relation: Relation | None) -> list[str]:
    """The clauses to look at: those asked for, or all that the kernel claims."""
    shown, by = (SINGLE_RUN, "a single run") if relation is None else (relation.clauses, f"--property {relation.name}")
    for clause in asked or ():
        if clause not in shown:
            raise ValueError(f"--clause: got {clause}, need one that {by} can show: {', '.join(shown)}")
        if not contract.claims(clause):
            raise ValueError(f"--clause: kernel {kernel} does not claim {clause}")
    wanted = asked or [c for c in shown if contract.claims(c)]
    if not wanted:
        raise ValueError(f"--kernel: {kernel} claims no clause that {by} can show")
    return wanted
