"""What is measured: the kernel under test, the eager region, and a peer's kernels where its wheel is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from csa_gate.fixtures.kernels import Kernel
from csa_gate.oracles import Problem

from ._bench_packs import Direction

Call = Callable[[], object]


@dataclass(frozen=True)
class Buffers:
    """Inputs and outputs of one problem, on one device."""

    problem: Problem
    kv: Tensor
    score: Tensor
    ape: Tensor
    cu_seqlens: Tensor
    cu_seqlens_comp: Tensor
    grad_out: Tensor
    out: Tensor
    grad_kv: Tensor
    grad_score: Tensor
    grad_ape: Tensor

    @classmethod
    def make(cls, problem: Problem, device: torch.device, seed: int) -> Buffers:
        """Normal values; made on the device, for their number."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        tokens = (problem.total_tokens, problem.width)
        kv, score, grad_out = normal(*tokens), normal(*tokens), normal(problem.total_comp, problem.head_dim)
        ape = normal(problem.ratio, problem.width, dtype=torch.float32)
        return cls(
            problem,
            kv,
            score,
            ape,
            cu_seqlens=torch.from_numpy(problem.cu_seqlens.copy()).to(device),
            cu_seqlens_comp=torch.from_numpy(problem.cu_seqlens_comp.copy()).to(device),
            grad_out=grad_out,
            out=torch.empty_like(grad_out),
            grad_kv=torch.empty_like(kv),
            grad_score=torch.empty_like(score),
            grad_ape=torch.empty_like(ape),
        )

    def fresh(self, direction: Direction) -> Buffers:
        """The same inputs, with new outputs for `direction`."""
        fresh = self
        if direction != "backward":
            fresh = replace(fresh, out=torch.empty_like(self.out))
        if direction != "forward":
            gradients = [torch.empty_like(t) for t in (self.grad_kv, self.grad_score, self.grad_ape)]
            fresh = replace(fresh, grad_kv=gradients[0], grad_score=gradients[1], grad_ape=gradients[2])
        return fresh


class Subject(Protocol):
    """Something to measure."""

    name: str

    def refuses(self, problem: Problem) -> str | None:
        """Why it cannot be measured on this problem, if so."""

    def calls(self, buffers: Buffers) -> Mapping[Direction, Call]:
        """What to call for each direction that it has; every call writes `buffers`, or returns new tensors."""


class KernelSubject:
    """A kernel under test."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self._kernel = "ours", kernel

    def refuses(self, problem: Problem) -> str | None:
        return self._kernel.supports(problem)

    def calls(self, buffers: Buffers) -> dict[Direction, Call]:
        b, p = buffers, buffers.problem
        inputs = (b.kv, b.score, b.ape, b.cu_seqlens, b.cu_seqlens_comp)
        forward = partial(self._kernel.forward, *inputs, ratio=p.ratio, coff=p.coff, out=b.out)
        backward = partial(
            self._kernel.backward,
            *inputs,
            b.grad_out,
            ratio=p.ratio,
            coff=p.coff,
            grad_kv=b.grad_kv,
            grad_score=b.grad_score,
            grad_ape=b.grad_ape,
        )
        return {"forward": forward, "backward": backward, "both": partial(_in_turn, forward, backward)}


class EagerSubject:
    """The region in plain PyTorch with fp32 intermediates, its index tensors made beforehand."""

    name = "eager"

    def __init__(self) -> None:
        self._region = cache(Region)

    def refuses(self, problem: Problem) -> str | None:
        return None

    def calls(self, buffers: Buffers) -> dict[Direction, Call]:
        region = self._region(buffers.problem, buffers.kv.device)
        inputs = (buffers.kv, buffers.score, buffers.ape)
        return {
            "forward": partial(region.forward, *inputs),
            "both": partial(region.forward_backward, *inputs, buffers.grad_out),
        }


class Region:
    """Gather, add, softmax, multiply and sum over one problem's windows. Never synchronises, so CUDA graphs hold it."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem = problem
        first_token = torch.from_numpy(problem.row_token.copy()).to(device)
        self._own = first_token[:, None] + torch.arange(problem.ratio, device=device)
        self._previous = (self._own - problem.ratio).clamp(min=0)
        self._invalid = torch.zeros((len(first_token), problem.window, 1), dtype=torch.bool, device=device)
        if problem.coff == 2:
            self._invalid[:, : problem.ratio] = torch.from_numpy(problem.row_is_first.copy()).to(device)[:, None, None]

    @torch.no_grad()
    def forward(self, kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
        """out, (total_comp, head_dim) bf16."""
        return self._pool(kv, score, ape)

    def forward_backward(self, kv: Tensor, score: Tensor, ape: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        """out, grad_kv, grad_score and grad_ape."""
        leaves = [t.detach().requires_grad_() for t in (kv, score, ape)]
        out = self._pool(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    def _pool(self, kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
        values, logits = self._windows(kv.float()), self._windows(score.float())
        if self._problem.coff == 2:
            ape = torch.cat(ape.chunk(2, dim=1))
        logits = logits + ape
        if self._problem.coff == 2:
            logits = logits.masked_fill(self._invalid, -torch.inf)
        return (values * torch.softmax(logits, dim=1)).sum(dim=1).to(torch.bfloat16)

    def _windows(self, tensor: Tensor) -> Tensor:
        if self._problem.coff == 1:
            return tensor[self._own]
        overlap, own = tensor.chunk(2, dim=1)
        return torch.cat((overlap[self._previous], own[self._own]), dim=1).masked_fill(self._invalid, 0.0)


class PeerSubject:
    """The compressor of the wheel nvidia-cudnn-frontend, called where its API calls it: below the check of the device.

    The atomic form of its backward adds to grad_ape, which its callers must clear first; that is left out here.
    """

    WHEEL = "nvidia-cudnn-frontend"

    def __init__(self, *, deterministic: bool) -> None:
        self.name = "peer-deterministic" if deterministic else "peer"
        self._deterministic = deterministic

    def refuses(self, problem: Problem) -> str | None:
        try:
            importlib.metadata.version(self.WHEEL)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.WHEEL} is not installed"
        if problem.ratio not in (2, 4) and (problem.ratio != 128 or problem.head_dim not in (128, 512)):
            return f"{self.WHEEL} has no ratio {problem.ratio} with head_dim {problem.head_dim}"
        try:
            self._module(problem)
        except Exception as error:
            return f"{self.WHEEL} cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def calls(self, buffers: Buffers) -> dict[Direction, Call]:
        b, p, module = buffers, buffers.problem, self._module(buffers.problem)
        long = "_r128" if p.ratio == 128 else ""
        run_forward, run_backward = getattr(module, f"run_fwd{long}"), getattr(module, f"run_bwd{long}")
        size = getattr(module, f"bwd_dape_workspace_bytes{long}")
        inputs, shape = (
            (b.kv, b.score, b.ape, b.cu_seqlens, b.cu_seqlens_comp),
            (p.total_comp, p.ratio, p.head_dim, p.coff),
        )
        reduction = {}
        if self._deterministic:
            device = (b.kv.device.index,) if long else ()
            workspace = torch.empty(size(*shape, *device), dtype=torch.uint8, device=b.kv.device)
            reduction = {"deterministic": True, "workspace": workspace}
        forward = partial(run_forward, *inputs, b.out, *shape)
        gradients = (b.grad_kv, b.grad_score, b.grad_ape)
        backward = partial(run_backward, *inputs, b.grad_out, *gradients, *shape, **reduction)
        return {"forward": forward, "backward": backward, "both": partial(_in_turn, forward, backward)}

    @staticmethod
    def _module(problem: Problem) -> ModuleType:
        return importlib.import_module(
            f"cudnn.csa.compressor.compressor_sm100{'_r128' if problem.ratio == 128 else ''}"
        )


def _in_turn(*calls: Call) -> None:
    for call in calls:
        call()
