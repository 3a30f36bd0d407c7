"""What a kernel's PTX shows: fp32 arithmetic that the assembler may not reorder or fuse, and no atomics.

PTX lets `ptxas` contract a product and a sum into one fma, with one rounding instead of two, unless both name their
rounding. So `add`, `sub`, `mul`, `fma`, `mad`, `div`, `rcp` and `sqrt` of fp32 must be `.rn` and nothing else: neither
`.ftz` nor `.sat`, no other rounding, no `.approx` or `.full`. Instructions that flush or approximate are faults too.
What was fused before there was PTX looks like an fma that was meant: that is for the bits to show.

Three sequences are let through, each instruction only in its place. CUDA's `expf`, as libdevice has it (it is that of
PyTorch, and so part of the contract); with s = `cvt.sat.f32.f32` of the scaled argument:

- `fma.rm.f32 j, s, 252.0, 12582913.0`: rounding down picks the power of two; nothing may take its place.
- `add.f32 n, j, -12583039.0`: integers below 2^24, so the sum is exact under any rounding; j is no product.
- `ex2.approx.ftz.f32 e, ...`: the approximation that `expf` rests on.
- `mul.f32 y, e, p`, p being `shl.b32 j, 23`: scaling by a power of two. It could be fused only with a plain add, and
  the only plain add has j, not y, for operand.

The same powers in fewer instructions, for arguments that are near 0:

- `fma.rn.sat.f32 s, x, 1 / (252 * log(2)), 0.5`: rounded as in `expf`, which saturates in a step of its own.
- `fma.rp.f32 j, s, -252.0, 12583038.0`: rounding up, of what `expf` rounds down with the other sign.

The start of a division, its approximation mended by Newton's step: `rcp.approx.ftz.f32 r, d`, if `fma.rn.f32` alone
takes r.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ROUNDED = ("add", "sub", "mul", "mad", "fma", "div", "rcp", "sqrt")
APPROXIMATED = ("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
FP32 = ("f32", "f32x2")
SCALE, SHIFTED, BACK = "0f437C0000", "0f4B400001", "0fCB40007F"  # 252.0, 12582913.0, -12583039.0
NEAR = ("0f3BBB989D", "0f3F000000"), ("0fC37C0000", "0f4B40007E")  # 1 / (252 * log(2)), 0.5; -252.0, 12583038.0


@dataclass(frozen=True)
class Instruction:
    """`opcode operands`: the operands as written, the first one is what is defined."""

    opcode: str
    operands: tuple[str, ...]

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Findings:
    """Of one kernel, the device functions of its module included.

    threads: of a block, where the PTX fixes or bounds them.
    pinned: fp32 instructions rounded to nearest by name.
    expf: calls of CUDA's expf, one for each `ex2`.
    unpinned, atomics: the instructions that must not be there.
    """

    threads: int | None
    pinned: int
    expf: int
    unpinned: tuple[str, ...]
    atomics: tuple[str, ...]


def kernels(ptx: str) -> dict[str, Findings]:
    """Findings for every `.entry` of a module, by its name."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    entries: dict[str, str] = {}
    shared = []  # device functions, which any kernel may call
    for section in re.split(r"(?m)^(?=[ \t]*(?:\.(?:visible|weak|extern)[ \t]+)*\.(?:entry|func)\b)", ptx)[1:]:
        named = re.match(r"[^(]*\.entry\s+([\w$]+)", section)
        if named:
            entries[named[1]] = section
        else:
            shared.append(section)
    return {name: _findings(section, [section, *shared]) for name, section in entries.items()}


def _findings(entry: str, sections: list[str]) -> Findings:
    unpinned: list[str] = []
    atomics: list[str] = []
    pinned = expf = 0
    for section in sections:
        code = list(instructions(section))
        definitions = _Definitions(code)
        for instruction in code:
            if is_atomic(instruction):
                atomics.append(str(instruction))
            elif is_pinned(instruction):
                pinned += 1
            elif _needs_pin(instruction):
                if definitions.in_place(instruction):
                    expf += instruction.parts[0] == "ex2"
                else:
                    unpinned.append(str(instruction))
    bounds = re.search(r"\.(?:req|max)ntid\s+([\d,\s]+)", entry)
    threads = None
    if bounds:
        threads = 1
        for extent in bounds[1].split(","):
            threads *= int(extent)
    return Findings(threads, pinned, expf, tuple(unpinned), tuple(atomics))


def instructions(section: str) -> Iterator[Instruction]:
    """The instructions of an entry's or a function's body, those of inline assembly included."""
    _, _, body = section.partition("\n{")
    for statement in re.split(r"[;\n]", body):
        text = re.sub(r"^[\s{}]*(?:[\w$]+:\s*)?(?:@!?%[\w$]+\s+)?", "", statement).rstrip("} \t")
        found = re.match(r"([a-z][\w.:]*)(?:\s+(.*))?$", text)
        if found:
            yield Instruction(found[1], tuple(_operands(found[2] or "")))


def is_atomic(instruction: Instruction) -> bool:
    """Whether this reads, modifies and writes global memory, or memory that may be global, in one step."""
    base, *rest = instruction.parts
    spaces = [part.partition("::")[0] for part in rest]
    if base in ("atom", "red"):
        return not any(space == "shared" for space in spaces)
    return base == "multimem" or ((base, *spaces[:1]) == ("cp", "reduce") and "global" in spaces)


def is_pinned(instruction: Instruction) -> bool:
    """Whether this is fp32 arithmetic that is rounded to nearest and may be neither fused nor flushed."""
    base, *rest = instruction.parts
    return base in ROUNDED and len(rest) == 2 and rest[0] == "rn" and rest[1] in FP32


def _needs_pin(instruction: Instruction) -> bool:
    base, *rest = instruction.parts
    arithmetic = base in (*ROUNDED, *APPROXIMATED) and bool(rest) and rest[-1] in FP32
    return arithmetic or "ftz" in rest or "approx" in rest


class _Definitions:
    """What defines each register of one function."""

    def __init__(self, code: list[Instruction]) -> None:
        self._by: dict[str, list[Instruction]] = {}
        self._code = code
        for instruction in code:
            if instruction.operands:
                for register in re.findall(r"%[\w$]+", instruction.operands[0]):
                    self._by.setdefault(register, []).append(instruction)

    def in_place(self, instruction: Instruction) -> bool:
        """Whether an unpinned instruction has its place in what is let through, as the module's docstring lists it."""
        sources = instruction.operands[1:]
        if instruction.opcode == "ex2.approx.ftz.f32":
            return True
        if instruction.opcode == "fma.rm.f32":
            return self._is_rounded_down(instruction)
        if instruction.opcode == "add.f32":
            return self._match(sources, self._from_rounded_down, self._is_constant(BACK))
        if instruction.opcode == "mul.f32":
            return self._match(sources, self._from("ex2.approx.ftz.f32"), self._from_power)
        if instruction.opcode == "fma.rn.sat.f32":
            return self._has_constants(sources[1:], NEAR[0])
        if instruction.opcode == "fma.rp.f32":
            return self._from("fma.rn.sat.f32")(sources[0]) and self._has_constants(sources[1:], NEAR[1])
        if instruction.opcode == "rcp.approx.ftz.f32":
            uses = [i.opcode for i in self._code if instruction.operands[0] in i.operands[1:]]
            return len(uses) > 1 and set(uses) == {"fma.rn.f32"}
        return False

    def _has_constants(self, operands: tuple[str, ...], values: tuple[str, str]) -> bool:
        return len(operands) == 2 and all(self._is_constant(v)(o) for o, v in zip(operands, values, strict=True))

    def _match(self, sources: tuple[str, ...], *wanted: Callable[[str], bool]) -> bool:
        """Whether the two operands are as wanted, in either order."""
        return len(sources) == 2 and any(
            all(test(source) for test, source in zip(wanted, order, strict=True)) for order in (sources, sources[::-1])
        )

    def _all(self, register: str, test: Callable[[Instruction], bool]) -> bool:
        found = self._by.get(register, [])
        return bool(found) and all(test(instruction) for instruction in found)

    def _from(self, opcode: str) -> Callable[[str], bool]:
        return lambda register: self._all(register, lambda i: i.opcode == opcode)

    def _is_constant(self, value: str) -> Callable[[str], bool]:
        def test(operand: str) -> bool:
            moved = self._all(operand, lambda i: i.parts[0] == "mov" and i.operands[1].upper() == value.upper())
            return operand.upper() == value.upper() or moved

        return test

    def _is_rounded_down(self, instruction: Instruction) -> bool:
        sources = instruction.operands[1:]
        wanted = (self._from("cvt.sat.f32.f32"), self._is_constant(SCALE), self._is_constant(SHIFTED))
        return len(sources) == 3 and all(test(source) for test, source in zip(wanted, sources, strict=True))

    def _from_rounded_down(self, register: str) -> bool:
        return self._all(register, lambda i: i.opcode == "fma.rm.f32" and self._is_rounded_down(i))

    def _from_power(self, register: str) -> bool:
        def test(instruction: Instruction) -> bool:
            if instruction.opcode in ("mov.b32", "mov.f32"):  # to a register of another type
                return self._from_power(instruction.operands[1])
            return instruction.opcode == "shl.b32" and (
                self._from_rounded_down_bits(instruction.operands[1]) and instruction.operands[2] == "23"
            )

        return self._all(register, test)

    def _from_rounded_down_bits(self, register: str) -> bool:
        return self._from_rounded_down(register) or self._all(
            register, lambda i: i.opcode == "mov.b32" and self._from_rounded_down(i.operands[1])
        )


def _operands(text: str) -> Iterator[str]:
    """Operands apart, where a vector or an address counts as one."""
    for operand in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text):
        yield operand.strip()
