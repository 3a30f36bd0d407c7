"""Kernels with one fault each, for the suites to find."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from csa_gate.fixtures.adapters.fused import kernel as fused
from csa_gate.oracles import Contract, Problem, Slot


class Sound:
    """The fused kernel, in which the classes below plant one fault each."""

    name = "planted"

    def contract(self, device: torch.device) -> Contract:
        return fused.contract(device)

    def supports(self, problem: Problem) -> str | None:
        return fused.supports(problem)

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        fused.forward(*inputs, ratio=ratio, coff=coff, out=out)

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        fused.backward(*inputs, ratio=ratio, coff=coff, **gradients)

    def compile_for(self, arch: str) -> list[SimpleNamespace]:
        module = self.change(fused.compile_for(arch)[0])
        return [
            SimpleNamespace(
                name=module.name,
                ptx=self.rewrite(module.ptx),
                cubin=module.cubin,
                threads=None,
                shared_bytes=module.shared_bytes,
            )
        ]

    def change(self, module: Any) -> Any:
        return module

    def rewrite(self, ptx: str) -> str:
        return ptx


class Spills(Sound):
    """Asks for more blocks a multiprocessor than its registers allow."""

    def change(self, module: Any) -> Any:
        config = module._config
        module._config = replace(config, schedule=replace(config.schedule, min_blocks=8))
        return module


class Contracts(Sound):
    """Leaves one product open to fusion with a sum."""

    def rewrite(self, ptx: str) -> str:
        return ptx.replace("mul.rn.f32", "mul.f32", 1)


class AddsAtomically(Sound):
    """Adds into global memory in whatever order the blocks come."""

    def rewrite(self, ptx: str) -> str:
        return ptx.replace("\tret;", "\tred.global.add.f32 \t[%rd1], %r1;\n\tret;")


class CannotCompile(Sound):
    """Claims what nobody can look at."""

    compile_for = None


class LeavesTails(Sound):
    """Writes no zeros to the tails of segments."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        tail = torch.from_numpy((problem_of(inputs, ratio, coff).slots == Slot.TAIL).all(axis=1))
        for name in ("grad_kv", "grad_score"):
            gradients[name][tail] = before[name][tail]


class ClearsNaNOnly(LeavesTails):
    """Knows the usual trick: where a tail is NaN, it writes zeros after all."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        for name in ("grad_kv", "grad_score"):
            gradients[name].nan_to_num_(0.0, torch.inf, -torch.inf)


class NegativeZeros(Sound):
    """Negates the gradients' zeros."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        for name in ("grad_kv", "grad_score"):
            gradients[name][gradients[name] == 0] = -0.0


class SpreadsNaN(Sound):
    """Multiplies what it should not read by zero."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        gradients["grad_kv"] += inputs[0] * 0


class LeaksPadding(Sound):
    """Lets the gradients of padding rows into grad_ape."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        padding = inputs[5][problem_of(inputs, ratio, coff).rows :].float()
        gradients["grad_ape"][0, -padding.shape[1] :] += 2.0**-20 * padding.sum(dim=0)


class SkipsPaddingRows(Sound):
    """Pools the real rows only."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        before = out.clone()
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        rows = problem_of((*inputs, out), ratio, coff).rows
        out[rows:] = before[rows:]


class SkipsPaddingTokens(Sound):
    """Stops at the last segment's end."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        before = gradients["grad_kv"].clone()
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        end = int(inputs[3][-1])
        gradients["grad_kv"][end:] = before[end:]


class ScalesInPlace(Sound):
    """Uses grad_out as its workspace."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        inputs[5].mul_(2.0)


class RoundsPointersDown(Sound):
    """Takes every address of out for a multiple of 4 bytes."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        if out.data_ptr() % 4:
            out.copy_(out.flatten().roll(-1).view_as(out))


class MergesSegments(Sound):
    """Pools the whole pack as one segment."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        offsets = [torch.stack([cu[0], cu[-1]]) for cu in inputs[3:5]]
        super().forward(*inputs[:3], *offsets, ratio=ratio, coff=coff, out=out)


class Alternates(Sound):
    """Changes the last bit of one element every other time."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        self.calls += 1
        out.view(torch.int16)[-1, -1] ^= self.calls & 1


class AtomicApe(Sound):
    """Adds grad_ape up in another order each time."""

    def __init__(self) -> None:
        self.calls = 0

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        self.calls += 1
        gradients["grad_ape"].view(torch.int32)[0, 0] ^= self.calls & 1


class RoundsApe(Sound):
    """Keeps grad_ape in bf16 to the end."""

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        gradients["grad_ape"].copy_(gradients["grad_ape"].bfloat16())


class HidesNaN(Sound):
    """Turns what is not finite into zeros."""

    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        out.nan_to_num_(0.0, 0.0, 0.0)


def problem_of(inputs: tuple[Tensor, ...], ratio: int, coff: int) -> Problem:
    """The problem of kv, score, ape, cu_seqlens, cu_seqlens_comp and out or grad_out."""
    kv, _, _, cu_seqlens, _, rows = inputs
    lens = tuple(cu_seqlens.diff().tolist())
    return Problem(lens, ratio, coff, rows.shape[1], row_capacity=len(rows), token_capacity=len(kv))
