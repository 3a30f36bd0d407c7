"""One run of a kernel in a process that has run nothing before.

    python -m csa_gate._another_process KERNEL CASE DEVICE FILE

KERNEL is what `load_kernel` takes, CASE an id in `DETERMINISM`. FILE gets the outputs, by name.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from csa_gate.fixtures.cases import DETERMINISM
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.fixtures.run import run
from csa_gate.oracles import Result


@functools.cache
def in_other_processes(spec: str, case: str, device: torch.device, count: int) -> list[Result]:
    """The outputs of one case of `DETERMINISM` in `count` processes, which run side by side, once.

    Raises:
        AssertionError: one of them failed, with the last that it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(count)]
        command = [sys.executable, "-m", "csa_gate._another_process", spec, case, str(device)]
        processes = [subprocess.Popen([*command, str(path)], stderr=subprocess.PIPE, text=True) for path in paths]
        said = [process.communicate()[1] for process in processes]
        for process, words in zip(processes, said, strict=True):
            if process.returncode:
                last = words.strip().splitlines()[-1:]
                raise AssertionError(f"{' '.join(command)} ended with status {process.returncode}: {' '.join(last)}")
        return [Result(**torch.load(path, map_location=device)) for path in paths]


def main(spec: str, case: str, device: str, path: str) -> None:
    """Run it, and write the outputs down."""
    inputs = next(each for each in DETERMINISM if each.id == case).inputs(device)
    torch.save(dict(run(load_kernel(spec), inputs).items()), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
