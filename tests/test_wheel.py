"""What is shipped: the wheel, the sdist, and the suites run from an installed wheel in a folder of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("oracles", "fused", "fixtures", "suites")


def python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel made of it (in `dist`) and the wheel made of the tree (in `direct`)."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in (*ROOMS, "src", "tests", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for args in (["--outdir", "dist"], ["--wheel", "--outdir", "direct"]):
        done = python("-m", "build", "--no-isolation", *args, cwd=tree)
        assert done.returncode == 0, done.stdout + done.stderr
    return tree


def names(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def test_wheel_holds_the_package_and_nothing_else(built):
    """Every module and data file of src/csa_gate, links followed, under csa_gate; no other top-level name."""
    wanted = []
    for folder, _, files in os.walk(ROOT / "src" / "csa_gate", followlinks=True):
        inside = Path(folder).relative_to(ROOT / "src")
        wanted += [
            (inside / file).as_posix()
            for file in files
            if file.endswith(".py")
            or file == "py.typed"
            or (inside.name in ("data", "vectors") and file.endswith(".json"))
            or (inside.name, file) == ("vectors", "README.md")
        ]
    (wheel,) = (built / "direct").glob("*.whl")
    assert names(wheel) == sorted(wanted)
    assert {f"csa_gate/{room}/__init__.py" for room in ROOMS} <= set(wanted)
    assert {"csa_gate/py.typed", "csa_gate/fixtures/vectors/schema.json"} <= set(wanted)
    everything = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in everything} == {
        "csa_gate",
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
    }
    assert any(name.endswith("/licenses/LICENSE") for name in everything)


def test_sdist_makes_the_same_wheel(built):
    """The sdist has real files where the tree has links, and the wheel made of it is the tree's."""
    (through,), (direct,) = (built / "dist").glob("*.whl"), (built / "direct").glob("*.whl")
    assert names(through) == names(direct)
    (sdist,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive)
        inside = {member.name.partition("/")[2] for member in archive}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/csa_gate/oracles/problem.py"} <= inside
    assert not inside & set(ROOMS)


def test_suites_of_an_installed_wheel(built, tmp_path):
    """`pytest --pyargs csa_gate.suites` finds the installed suites from a folder that knows nothing of them."""
    (wheel,) = (built / "dist").glob("*.whl")
    target, neutral = tmp_path / "target", tmp_path / "neutral"
    neutral.mkdir()
    (neutral / "pytest.ini").touch()
    done = python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=neutral
    )
    assert done.returncode == 0, done.stdout + done.stderr
    where = python("-c", "import csa_gate.suites as s; print(s.__file__)", cwd=neutral, PYTHONPATH=str(target))
    assert where.stdout.strip() == str(target / "csa_gate" / "suites" / "__init__.py")
    # Ids count from the root, so with the root where the wheel is they say which files were taken.
    args = [
        "-m",
        "pytest",
        "--pyargs",
        "csa_gate.suites",
        "--rootdir",
        str(target),
        "--collect-only",
        "-q",
        "-W",
        "error",
    ]
    done = python(*args, cwd=neutral, PYTHONPATH=str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert collected
    assert all(line.startswith("csa_gate/suites/") for line in collected)
