"""What a cubin shows: registers, stack, spills and shared memory; and how many blocks of it a multiprocessor holds."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ._toolkit import find_tool

RESERVED = 1024  # bytes of shared memory that the system keeps of every block, from compute capability 8.0 on


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor, from the table "Technical Specifications per Compute Capability" of CUDA's guide.

    reserved_counted: cubins count the system's share of shared memory as static.
    """

    threads: int
    blocks: int
    shared_bytes: int
    shared_bytes_block: int
    reserved_counted: bool = True
    registers: int = 65536


_KIB = 1024
LIMITS = {
    "sm_80": Limits(2048, 32, 164 * _KIB, 163 * _KIB, reserved_counted=False),
    "sm_86": Limits(1536, 16, 100 * _KIB, 99 * _KIB, reserved_counted=False),
    "sm_89": Limits(1536, 24, 100 * _KIB, 99 * _KIB, reserved_counted=False),
    "sm_90a": Limits(2048, 32, 228 * _KIB, 227 * _KIB),
    "sm_100a": Limits(2048, 32, 228 * _KIB, 227 * _KIB),
    "sm_120a": Limits(1536, 24, 100 * _KIB, 99 * _KIB),
}

WARP = 32
_REGISTER_UNIT = 256  # registers of a warp are handed out in these
_WARP_UNIT = 4  # a multiprocessor has four register files, each a quarter of the registers
_SHARED_UNIT = 128


@dataclass(frozen=True)
class Usage:
    """What one kernel of a cubin takes. Shared bytes are static ones, without what the system keeps."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Occupancy:
    """Blocks that a multiprocessor holds at most, and what forbids one more."""

    blocks: int
    limited_by: str


def occupancy(arch: str, registers: int, shared_bytes: int, threads: int) -> Occupancy:
    """The bound that registers, shared memory (static and dynamic, in bytes a block) and threads set."""
    limits = LIMITS[arch]
    warps = -(-threads // WARP)
    register_warps = limits.registers // _up(max(registers, 1) * WARP, _REGISTER_UNIT) // _WARP_UNIT * _WARP_UNIT
    bounds = {
        "registers": register_warps // warps,
        "shared memory": limits.shared_bytes // _up(shared_bytes + RESERVED, _SHARED_UNIT),
        "threads": limits.threads // (warps * WARP),
        "blocks": limits.blocks,
    }
    if shared_bytes > limits.shared_bytes_block:
        bounds["shared memory"] = 0
    tightest = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[tightest], tightest)


def usage(cubin: bytes, arch: str) -> dict[str, Usage]:
    """What each kernel of a cubin takes, by its name.

    Raises:
        RuntimeError: cuobjdump cannot read the cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        resources = parse_resources(_dump("-res-usage", path))
        # Spilling needs a stack, and most cubins have none: then there is nothing to disassemble for.
        spills = {}
        if any(r["STACK"] or r["LOCAL"] for r in resources.values()):
            spills = parse_spills(_dump("-sass", path))
    kept = RESERVED if LIMITS[arch].reserved_counted else 0
    return {
        name: Usage(r["REG"], r["STACK"] + r["LOCAL"], spills.get(name, 0), max(0, r["SHARED"] - kept))
        for name, r in resources.items()
    }


def parse_resources(text: str) -> dict[str, dict[str, int]]:
    """`REG`, `STACK`, `SHARED` and `LOCAL` of each function in the output of `cuobjdump -res-usage`."""
    found = re.findall(r"^\s*Function (\S+):\s*\n\s*(REG:.*)$", text, re.MULTILINE)
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)} for name, line in found}


def parse_spills(text: str) -> dict[str, int]:
    """Bytes that each function of `cuobjdump -sass` stores to local memory, which is how `ptxas -v` counts spills."""
    spills = {}
    for section in re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]:
        total = 0
        for modifiers in re.findall(r"\bSTL((?:\.\w+)*)", section):
            widths = [int(bits) for bits in re.findall(r"\.[US]?(8|16|64|128)\b", modifiers)]
            total += widths[0] // 8 if widths else 4
        spills[section.split(maxsplit=1)[0]] = total
    return spills


@cache
def find_cuobjdump() -> str:
    """The tool's path: the wheel's of the extra `static`, or that of a CUDA toolkit.

    Raises:
        ValueError: there is none.
    """
    try:
        wheel = importlib.metadata.distribution("nvidia-cuda-cuobjdump")
        inside = [str(file.locate()) for file in wheel.files or () if file.name == "cuobjdump"]
    except importlib.metadata.PackageNotFoundError:
        inside = []
    found = next((path for path in inside if Path(path).is_file()), None) or find_tool("cuobjdump")
    if found is None:
        raise ValueError("cuobjdump: found none, need that of `pip install csa-gate[static]` or of a CUDA toolkit")
    return found


def _dump(option: str, cubin: Path) -> str:
    done = subprocess.run([find_cuobjdump(), option, str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option}: {' '.join(done.stderr.split())}")
    return done.stdout


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
