"""The house itself: which room may import which, that everything is packaged, that everything tested is pinned."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "csa_gate"
ROOMS = ("oracles", "fused", "fixtures", "suites")

# What is true and what is judged by it share no code, or the verdict would be worth nothing.
FORBIDDEN = {
    "oracles": ("cutlass", "tvm_ffi", "csa_gate.fused", "csa_gate.fixtures", "csa_gate.suites"),
    "fused": ("csa_gate.oracles", "csa_gate.fixtures", "csa_gate.suites"),
    "fixtures": ("csa_gate.suites",),
    "suites": (),
}


def imported(source: str, package: str) -> Iterator[str]:
    """Every name that a module of `package` imports, relative ones resolved, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            for alias in node.names:
                yield ".".join([*base, *([node.module] if node.module else []), alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("import_module", "__import__"):
                yield str(node.args[0].value)


def trespasses(source: str, package: str) -> list[str]:
    """What a module of `package` imports and must not: from a room closed to it, or a room by its bare name."""
    room = package.split(".")[1]
    closed = (*FORBIDDEN[room], *ROOMS)
    return [name for name in imported(source, package) if any(f"{name}.".startswith(f"{c}.") for c in closed)]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_keep_to_themselves(room):
    """No file of a room imports from a room closed to it."""
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {}
    for file in files:
        package = ".".join(["csa_gate", *file.parent.relative_to(ROOT).parts])
        if names := trespasses(file.read_text(), package):
            found[str(file.relative_to(ROOT))] = names
    assert not found


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("import csa_gate.fused.api as api", "csa_gate.oracles", ["csa_gate.fused.api"]),
        ("from csa_gate import fused", "csa_gate.oracles", ["csa_gate.fused"]),
        ("from ..fused import api", "csa_gate.oracles", ["csa_gate.fused.api"]),
        ("from ...oracles.inputs import Inputs", "csa_gate.fused.sub", ["csa_gate.oracles.inputs.Inputs"]),
        ("def f():\n    import cutlass.cute", "csa_gate.oracles", ["cutlass.cute"]),
        ("importlib.import_module('csa_gate.oracles')", "csa_gate.fused", ["csa_gate.oracles"]),
        ("import fixtures.kernels", "csa_gate.suites", ["fixtures.kernels"]),
        ("from . import fused_like\nimport fusedlike\nfrom .fused import x", "csa_gate.oracles", []),
        ("from csa_gate.oracles import Problem", "csa_gate.fixtures", []),
    ],
)
def test_trespasses_are_seen(source, package, found):
    """The check above sees an import however it is written, and no more than that."""
    assert trespasses(source, package) == found


@pytest.mark.parametrize("room", ROOMS)
def test_links(room):
    """The package's rooms are links to the folders beside it: one file, one place to edit it."""
    assert (PACKAGE / room).is_symlink()
    assert (PACKAGE / room).readlink() == Path("../..") / room


def test_every_folder_is_a_package():
    """A folder of modules without __init__.py would be missing from the wheel."""
    folders = {file.parent for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_everything_tested_is_pinned():
    """constraints.txt has one exact version, within our own bounds, of every package that pyproject.toml names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for requirement in (Requirement(line) for line in lines if not line.startswith("#")):
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        pins[canonicalize_name(requirement.name)] = specifier.version
    assert len(pins) == len(lines) - 1
    with (ROOT / "pyproject.toml").open("rb") as file:
        config = tomllib.load(file)
    project = config["project"]
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    for requirement in map(Requirement, [*config["build-system"]["requires"], *project["dependencies"], *extras]):
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
