"""`python -m csa_gate COMMAND ...`: what the gate does outside pytest."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from ._stops import take_sigterm
from ._supervise import supervised

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("csa_gate._check", "judge one kernel on one problem"),
    "vectors": ("csa_gate._vectors", "make the golden vectors, or check them"),
    "soak": ("csa_gate._soak", "hold a kernel to random problems for some minutes"),
    "bench": ("csa_gate._bench", "measure kernels against the eager region, a peer and the memory"),
    "static": ("csa_gate._static", "look into kernels compiled for any architecture, without a GPU"),
    "sanitize": ("csa_gate._sanitize", "run the kernels under compute-sanitizer, on a CUDA device"),
    "mutants": ("csa_gate._mutants", "plant faults in the kernels and see whether the suites catch them"),
}
"""Each command's module and what it does. The module has `add_arguments(parser)` and `run(args) -> int`, the exit
status; it raises ValueError for arguments that make no sense, and is imported only when it is asked for."""

SUPERVISED = ("check", "soak")
"""The commands whose exit status is a verdict on a kernel that runs in their own process."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command in this process; `argv` without the program's name, None for the process's own.

    Returns the exit status, 130 after Ctrl-C. Raises SystemExit for --help, --version and arguments that make no sense.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print(f"python -m csa_gate {' '.join(argv[:1])}: stopped before its end", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    prog = "python -m csa_gate"
    overview = Parser(
        prog=prog,
        description="\n".join(["commands:", *(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{prog} COMMAND --help says what a command takes",
    )
    overview.add_argument("--version", action="version", version=f"csa-gate {__version__}")
    overview.add_argument("command", metavar="COMMAND", choices=COMMANDS)
    command = overview.parse_args(argv[:1]).command
    module, text = COMMANDS[command]
    loaded = importlib.import_module(module)
    parser = Parser(prog=f"{prog} {command}", description=text)
    loaded.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    try:
        status: int = loaded.run(args)
    except ValueError as error:
        parser.error(str(error))
    except SystemExit as ended:  # a kernel's, for the arguments have been read
        print(f"{parser.prog}: ended by SystemExit: {ended.code}", file=sys.stderr)
        return 1
    return status


def run_as_program() -> int:
    """`main` for this process's own arguments, where a kernel cannot end it as if all were well."""
    take_sigterm()
    return supervised(_exit_status) if sys.argv[1:2] and sys.argv[1] in SUPERVISED else main()


def _exit_status() -> int:
    try:
        return main()
    except SystemExit as ended:  # argparse's, which has said why
        return int(ended.code or 0)


if __name__ == "__main__":
    sys.exit(run_as_program())
