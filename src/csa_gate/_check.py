"""`python -m csa_gate check`: one kernel, one problem, every clause that a single run can show."""

from __future__ import annotations

import argparse
import traceback
from dataclasses import replace

from csa_gate.fixtures.canary import POISONS, MemoryFault
from csa_gate.fixtures.kernels import choose_device, contract_on, load_kernel, refusal
from csa_gate.fixtures.run import run as run_kernel
from csa_gate.oracles import Contract
from csa_gate.oracles.distributions import DISTRIBUTIONS, make_inputs
from csa_gate.oracles.judge import SINGLE_RESULT, check_command, judge
from csa_gate.oracles.parse import parse_problem

CLAUSES = ("memory", *SINGLE_RESULT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--kernel", required=True, help="eager, fused, package.module:attr or file.py:attr")
    parser.add_argument("--problem", required=True, help='"Problem(lens=(9, 5), ratio=4, coff=2, head_dim=64)"')
    parser.add_argument("--distribution", default="normal", choices=DISTRIBUTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--clause", action="append", choices=CLAUSES, help="judge this clause only; may be given more than once"
    )
    parser.add_argument("--poison", default="nan", choices=POISONS, help="what the output buffers hold before")


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
    wanted = _wanted(contract, kernel.name, args.clause)
    inputs = make_inputs(problem, args.seed, args.distribution, device)
    reproduce = f"{check_command(inputs, args.kernel)} --poison {args.poison}"
    try:
        result = run_kernel(kernel, inputs, poison=args.poison)
    except MemoryFault as fault:
        print(f"{fault}\nreproduce: {reproduce}")
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a kernel must not end the gate's process as if all were well
        traceback.print_exc()
        print(f"kernel {kernel.name} raised {type(error).__name__}: {error}\nreproduce: {reproduce}")
        return 1
    verdict = judge(
        contract, inputs, result, kernel=args.kernel, clauses=[c for c in wanted if c != "memory"], reproduce=reproduce
    )
    if "memory" in wanted:  # whatever broke it was raised above
        verdict = replace(verdict, checked=("memory", *verdict.checked))
    if not verdict.checked:
        raise ValueError(f"--problem: {', '.join(wanted)} has nothing to look at in {problem}")
    print(verdict.message)
    return 0 if verdict else 1


def _wanted(contract: Contract, kernel: str, asked: list[str] | None) -> list[str]:
    """The clauses to look at: those asked for, or all that the kernel claims."""
    for clause in asked or ():
        if not contract.claims(clause):
            raise ValueError(f"--clause: kernel {kernel} does not claim {clause}")
    wanted = asked or [c for c in CLAUSES if contract.claims(c)]
    if not wanted:
        raise ValueError(f"--kernel: {kernel} claims no clause that a single run can show")
    return wanted
