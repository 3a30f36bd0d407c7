"""`python -m csa_gate vectors`: make the golden vectors, or see that they are what would be made."""

from __future__ import annotations

import argparse
from pathlib import Path

from csa_gate.fixtures.golden import FOLDER, generate

_OTHERS = {"schema.json"}  # in the folder, but not made here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="the folder (default: the package's)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file there is not this one")


def run(args: argparse.Namespace) -> int:
    """Make all files, which takes a minute or two of one core, and write or compare them.

    Returns 0, or 1 if --check finds a file that differs, is missing or is none of these. Raises ValueError if the
    folder does not exist.
    """
    if not args.out.is_dir():
        raise ValueError(f"--out: got {args.out}, need a folder that exists")
    made = {name: text.encode() for name, text in generate().items()}
    if not args.check:
        for name, content in made.items():
            (args.out / name).write_bytes(content)
            print(f"{args.out / name}: {len(content)} bytes")
        return 0
    there = {path.name: path.read_bytes() for path in args.out.glob("*.json") if path.name not in _OTHERS}
    for name in sorted(made.keys() | there.keys()):
        if name not in there:
            print(f"{args.out / name}: missing")
        elif name not in made:
            print(f"{args.out / name}: not one of the golden vectors")
        elif there[name] != made[name]:
            print(f"{args.out / name}: {_first_difference(there[name], made[name])}")
        else:
            print(f"{args.out / name}: as made here")
    return int(made != there)


def _first_difference(there: bytes, made: bytes) -> str:
    lines = list(zip(there.splitlines(), made.splitlines(), strict=False))
    at = next((i for i, (a, b) in enumerate(lines, 1) if a != b), len(lines) + 1)
    return f"differs from line {at} on from what is made here"
