"""Small random changes to the kernels' shared functions and to the oracles: which of them does nobody notice?

    python benchmarks/random_mutants.py [--count 100] [--seed 0] [-n 2]    # half an hour on two idle cores

The faults of `python -m csa_gate mutants` were thought of; these were not. cosmic-ray makes them, one at a time, in a
copy of the tree: half of them in `fused`, half in `oracles`, at most one at a place. A change is noticed if L0 fails,
or else the module's own tests (tests/test_MODULE.py or what `OWN_TESTS` has), if there are any. Those that nobody
notices are printed as diffs, to be looked at: docs/mutants.md has what was made of them. Exits with 0; with 2 where the
unchanged copy fails.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
MODULES = {
    "fused": ("window", "gaps", "ape", "arith", "config", "cpu"),
    "oracles": ("ordered", "orders", "windows", "problem", "fp32", "fp64", "bound", "judge"),
}
OWN_TESTS = {"config": ("schedules", "fused_api")}  # of modules whose tests have other names
ANNOTATIONS = "ReplaceBinaryOperator_BitOr"  # `|` stands in type hints alone, which nobody evaluates
TIMEOUT = 1800.0  # seconds


def sample(count: int, seed: int) -> list[MutationSpec]:
    """`count` changes, the same for the same seed and source, with paths relative to the tree."""
    chance = random.Random(seed)
    chosen: list[MutationSpec] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (room, modules) in enumerate(MODULES.items()):
            with use_db(f"{folder}/{room}.sqlite") as db:
                init([Path(room, f"{module}.py") for module in modules], db, {})
                specs = [spec for item in db.work_items for spec in item.mutations]
            places: dict[tuple[object, ...], list[MutationSpec]] = {}
            for spec in sorted(specs, key=lambda s: (str(s.module_path), s.start_pos, s.operator_name, s.occurrence)):
                if ANNOTATIONS not in spec.operator_name:
                    places.setdefault((spec.module_path, spec.start_pos, spec.end_pos), []).append(spec)
            share = count // len(MODULES) + (number < count % len(MODULES))
            chosen += [chance.choice(places[place]) for place in chance.sample(list(places), min(share, len(places)))]
    return chosen


def command(tree: Path, module: str) -> str:
    """What must fail for a change in `module` to be noticed."""
    pytest = f"{shlex.quote(sys.executable)} -m pytest -x -q -p no:cacheprovider"
    words = [
        f"export PYTHONPATH={shlex.quote(str(tree / 'src'))} OMP_NUM_THREADS=1",
        f"cd {shlex.quote(str(tree / 'empty'))}",
        f"{pytest} --pyargs csa_gate.suites -m L0 --csa-device=cpu",
    ]
    tests = [f"tests/test_{name}.py" for name in OWN_TESTS.get(module, (module,))]
    if all((tree / test).exists() for test in tests):
        words += ["cd ..", f"{pytest} {' '.join(tests)}"]
    return f"sh -c {shlex.quote(' && '.join(words))}"


def copy(tree: Path) -> None:
    """The tree, and an empty folder to run the suites in."""
    for name in (*MODULES, "fixtures", "suites", "src", "tests", "benchmarks"):
        shutil.copytree(
            ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "conftest.py", "README.md", "constraints.txt", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "empty").mkdir()
    (tree / "empty" / "pytest.ini").touch()


def main() -> int:
    """Sample, try and report."""
    parser = argparse.ArgumentParser(description="random changes that nobody notices")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", dest="workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    os.chdir(ROOT)
    specs = sample(args.count, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for worker in range(args.workers):
            tree = Path(folder, str(worker))
            copy(tree)
            trees.put(tree)
        if subprocess.run(command(tree, ""), shell=True, stdout=subprocess.DEVNULL, check=False).returncode:
            print("the unchanged copy fails: nothing was tried")
            return 2

        def attempt(spec: MutationSpec) -> tuple[MutationSpec, TestOutcome | None, str]:
            tree = trees.get()
            try:
                moved = attrs.evolve(spec, module_path=tree / spec.module_path)
                result = mutate_and_test([moved], command(tree, spec.module_path.stem), TIMEOUT)
            finally:
                trees.put(tree)
            return spec, result.test_outcome, result.diff or result.output or ""

        noticed = 0
        with ThreadPoolExecutor(args.workers) as pool:
            for spec, outcome, diff in pool.map(attempt, specs):
                noticed += outcome == TestOutcome.KILLED
                word = "noticed" if outcome == TestOutcome.KILLED else str(outcome).upper()
                print(f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name}: {word}", flush=True)
                if outcome != TestOutcome.KILLED:
                    print(
                        "\n".join(
                            line for line in diff.split("\n") if line[:1] in "+-" and line[:3] not in ("+++", "---")
                        )
                    )
    print(f"{noticed} of {len(specs)} changes noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
