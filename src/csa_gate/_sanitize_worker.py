"""The process that `python -m csa_gate sanitize` puts under compute-sanitizer.

    python -m csa_gate._sanitize_worker cases KERNEL WHICH SUBSTRING FILE
    python -m csa_gate._sanitize_worker plant NAME FILE

WHICH is `all` or `covering`. FILE gets `{"cases": [names]}` first, then `{"ran": name}` for each that ran to its end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from csa_gate.fixtures.cases import Case
from csa_gate.fixtures.kernels import Kernel, load_kernel, refusal
from csa_gate.fixtures.replay import launch
from csa_gate.fixtures.schedules import SCHEDULES, covering
from csa_gate.oracles import Result


def chosen(which: str, substring: str) -> list[Case]:
    """The cases with `substring` in their names: all, or one for each schedule."""
    named = [case for case in SCHEDULES if substring in case.id]
    return covering(named) if which == "covering" else named


def run_case(kernel: Kernel, case: Case) -> None:
    """Forward and backward once, each tensor an allocation of its own and no larger than it has to be.

    In some threads of a warp all logits are near the top, in others some are far from it, and they take other ways.
    Inputs are made on the host and copied, which the tools take for writing; nothing writes the outputs before.
    """
    inputs, p = case.inputs("cpu", "wide").to("cuda"), case.problem
    result = Result(
        out=torch.empty((p.total_comp, p.head_dim), dtype=torch.bfloat16, device="cuda"),
        grad_kv=torch.empty_like(inputs.kv),
        grad_score=torch.empty_like(inputs.score),
        grad_ape=torch.empty_like(inputs.ape),
    )
    launch(kernel, inputs, result)
    torch.cuda.synchronize()


def main(argv: list[str]) -> int:
    work: dict[str, Callable[[], None]]
    if argv[0] == "plant":
        from . import _sanitize_plants

        work = {argv[1]: lambda: _sanitize_plants.run(argv[1])}
    else:
        _, spec, which, substring, _ = argv
        kernel = load_kernel(spec)
        cases = [case for case in chosen(which, substring) if refusal(kernel, case.problem) is None]
        work = {case.id: lambda case=case: run_case(kernel, case) for case in cases}  # type: ignore[misc]
    with open(argv[-1], "w") as file:
        print(json.dumps({"cases": list(work)}), file=file, flush=True)
        for name, step in work.items():
            step()
            print(json.dumps({"ran": name}), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
