"""The child process of `python -m csa_gate static`: compiles for one architecture and writes down what it sees.

    python -m csa_gate._static_probe ARCH KERNEL SUBSTRING WHICH FILE

WHICH is one of `Which`. FILE gets one JSON object a line: `{"modules": [names]}` first, then for each of them
`{"module", "rows"}`, or `{"module", "error"}` where it could not be probed.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, cast

from ._static_cubin import WARP, occupancy, usage
from ._static_ptx import kernels

Which = Literal["all", "representative", "sample"]
"""All modules, those whose attribute `representative` does not say otherwise, or the first of these."""

SAMPLE = 2  # modules: of the fused kernels, one in each direction


class Compiled(Protocol):
    """What `compile_for(arch)` of a kernel under test returns a list of: one compilation each.

    Attributes may be computed when first asked for. `details` (any string) is optional, and so is `representative`:
    False leaves a module out where one of its like is looked at.

    name: told apart from the others' names.
    ptx, cubin: of one or more kernels, the same ones.
    threads: of a block, an integer, or a mapping from each kernel's name in the PTX; None if the PTX bounds them.
    shared_bytes: dynamic shared memory of a launch, likewise.
    """

    @property
    def name(self) -> str: ...

    @property
    def ptx(self) -> str: ...

    @property
    def cubin(self) -> bytes: ...

    @property
    def threads(self) -> int | Mapping[str, int] | None: ...

    @property
    def shared_bytes(self) -> int | Mapping[str, int]: ...


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture. `faults` says what must not be, an empty list that all is well.

    name: the module's, and after a slash the kernel's, where the module has several.
    shared_bytes: static and dynamic, without the kilobyte that the system keeps of every block.
    pinned, expf: fp32 instructions pinned to round to nearest, and calls of CUDA's expf.
    """

    name: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    blocks_per_multiprocessor: int
    warps_per_multiprocessor: int
    limited_by: str
    pinned: int
    expf: int
    kernel: str
    details: str = ""
    faults: list[str] = field(default_factory=list)


def compiler_of(spec: str) -> Callable[[str], Sequence[Compiled]]:
    """The function that compiles the kernel of `spec` for an architecture.

    Raises:
        KernelError: there is no such kernel, or it cannot be compiled for other machines.
    """
    from csa_gate.fixtures.kernels import KernelError, load_kernel

    kernel = load_kernel(spec)
    compile_for: Callable[[str], Sequence[Compiled]] | None = getattr(kernel, "compile_for", None)
    if not callable(compile_for):
        raise KernelError(f"--kernel: {kernel.name} has no method compile_for(arch)")
    return compile_for


def rows_of(module: Compiled, arch: str) -> list[Row]:
    """A row for every kernel of a module.

    Raises:
        ValueError: PTX, cubin and what the module says of itself do not belong together.
    """
    found, used = kernels(module.ptx), usage(module.cubin, arch)
    if not found or set(found) != set(used):
        raise ValueError(f"the PTX has the kernels {sorted(found)}, the cubin {sorted(used)}")
    rows = []
    names = _names(module.name, list(found))
    for kernel, findings in found.items():
        given = _of(module.threads, kernel)
        threads = findings.threads if given is None else given
        dynamic = _of(module.shared_bytes, kernel)
        if threads is None or dynamic is None:
            raise ValueError(f"no threads, or no shared memory, known of {kernel}")
        uses = used[kernel]
        shared = uses.shared_bytes + dynamic
        bound = occupancy(arch, uses.registers, shared, threads)
        faults = [f"spills {uses.spill_bytes} bytes"] * bool(uses.spill_bytes)
        faults += [f"stack of {uses.stack_bytes} bytes"] * bool(uses.stack_bytes)
        faults += [f"does not fit a multiprocessor: {bound.limited_by}"] * (not bound.blocks)
        faults += _listed("unpinned", findings.unpinned) + _listed("atomic on global memory", findings.atomics)
        rows.append(
            Row(
                name=names[kernel],
                arch=arch,
                registers=uses.registers,
                spill_bytes=uses.spill_bytes,
                stack_bytes=uses.stack_bytes,
                shared_bytes=shared,
                threads=threads,
                blocks_per_multiprocessor=bound.blocks,
                warps_per_multiprocessor=bound.blocks * -(-threads // WARP),
                limited_by=bound.limited_by,
                pinned=findings.pinned,
                expf=findings.expf,
                kernel=kernel,
                details=str(getattr(module, "details", "")),
                faults=faults,
            )
        )
    return rows


def chosen(modules: Sequence[Compiled], substring: str, which: Which) -> list[Compiled]:
    """The modules with `substring` in their names that `which` leaves, in their order."""
    named = [module for module in modules if substring in module.name]
    if which == "all":
        return named
    representative = [module for module in named if getattr(module, "representative", True)]
    return representative[:SAMPLE] if which == "sample" else representative


def main(argv: list[str]) -> int:
    arch, spec, substring, which, path = argv
    modules = chosen(compiler_of(spec)(arch), substring, cast(Which, which))
    with open(path, "w") as file:

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=file, flush=True)

        write({"modules": [module.name for module in modules]})
        for i, module in enumerate(modules):
            start = time.perf_counter()
            try:
                rows = rows_of(module, arch)
            except Exception as error:
                write({"module": module.name, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
            else:
                write({"module": module.name, "rows": [asdict(row) for row in rows]})
            seconds = time.perf_counter() - start
            print(f"{arch} {i + 1}/{len(modules)} {module.name} {seconds:.1f} s", flush=True)
    return 0


def _of(value: int | Mapping[str, int] | None, kernel: str) -> int | None:
    return value.get(kernel) if isinstance(value, Mapping) else value


def _names(module: str, kernels: list[str]) -> dict[str, str]:
    """What each kernel is called: as the module if it is alone, numbered from the second of a name on."""
    if len(kernels) == 1:
        return {kernels[0]: module}
    seen: Counter[str] = Counter()
    names = {}
    for kernel in kernels:
        short = _short(kernel)
        seen[short] += 1
        names[kernel] = f"{module}/{short}" + (f"-{seen[short]}" if seen[short] > 1 else "")
    return names


def _short(kernel: str) -> str:
    """The function's name in the DSL's mangled one, `kernel_cutlass_NAME_kernel_TYPES_0`, or the whole."""
    return kernel.removeprefix("kernel_cutlass_").partition("_kernel")[0].strip("_") or kernel


def _listed(what: str, instructions: tuple[str, ...]) -> list[str]:
    if not instructions:
        return []
    more = f" and {len(instructions) - 1} more" if len(instructions) > 1 else ""
    return [f"{what}: {instructions[0]}{more}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
