"""Every way into the fused kernels, called alike: by keyword, with buffers that are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from csa_gate.fixtures.canary import Canary
from csa_gate.fused import (
    CSACompressorBackward,
    CSACompressorForward,
    compress_backward,
    compress_forward,
    compress_thd,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from csa_gate.oracles import Inputs, Problem, Result, make_inputs, ordered

PROBLEM = Problem((9, 3), ratio=4, coff=2, head_dim=6, row_capacity=3)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TENSORS = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
GRADIENTS = ("grad_kv", "grad_score", "grad_ape")
SETTINGS = {"ratio": PROBLEM.ratio, "coff": PROBLEM.coff}

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One way in.

    call: by keyword; gives what was computed, by the names of `Result`.
    takes: the arguments beside `TENSORS`; buffers among them are poisoned.
    """

    name: str
    call: Callable[..., Mapping[str, Tensor]]
    takes: tuple[str, ...]

    def arguments(self, problem: Problem = PROBLEM, device: str = "cpu") -> tuple[Arguments, list[Canary]]:
        """Good arguments, and the guards around the buffers among them."""
        inputs = _inputs(problem, device)
        shapes = {"out": (problem.total_comp, problem.head_dim), "grad_ape": (problem.ratio, problem.width)}
        values: Arguments = SETTINGS | {"head_dim": problem.head_dim, "total_comp": problem.total_comp, "exp": None}
        values |= {"ratio": problem.ratio, "coff": problem.coff, "stream": None, "current_stream": None}
        canaries = []
        for name in self.takes:
            if name == "out" or name in GRADIENTS:
                dtype = torch.float32 if name == "grad_ape" else torch.bfloat16
                shape = shapes.get(name, (problem.total_tokens, problem.width))
                canaries.append(Canary(name, shape, dtype, device, poison="random"))
                values[name] = canaries[-1].payload
        values["grad_out"] = inputs.grad_out.clone()
        tensors = {name: getattr(inputs, name).clone() for name in TENSORS}
        return tensors | {name: values[name] for name in self.takes}, canaries


@cache
def _inputs(problem: Problem, device: str) -> Inputs:
    return make_inputs(problem, device=device)


@cache
def specified(problem: Problem = PROBLEM, device: str = "cpu") -> Result:
    """The bits that every entry point has to give."""
    return ordered(_inputs(problem, device), exp="portable" if device == "cpu" else "native")


def _forward(**given: Any) -> Mapping[str, Tensor]:
    return {"out": compress_forward(**given)}


def _backward(**given: Any) -> Mapping[str, Tensor]:
    return dict(zip(GRADIENTS, compress_backward(**given), strict=True))


def _thd(**given: Any) -> Mapping[str, Tensor]:
    return {"out": compress_thd(**given).detach()}


def _samples(given: Arguments, rows: str) -> Arguments:
    names = dict(zip(TENSORS, TENSORS, strict=True)) | {rows: "out"}
    return {f"sample_{target}": given[name] for name, target in names.items()}


def _make_forward(**given: Any) -> Mapping[str, Tensor]:
    made = CSACompressorForward(**_samples(given, "out"), ratio=given["ratio"], coff=given["coff"])
    assert made.check_support()
    made.compile()
    made.execute(*(given[name] for name in (*TENSORS, "out")))
    return {"out": given["out"]}


def _make_backward(**given: Any) -> Mapping[str, Tensor]:
    made = CSACompressorBackward(**_samples(given, "grad_out"), ratio=given["ratio"], coff=given["coff"])
    assert made.check_support()
    made.compile()
    made.execute(*(given[name] for name in (*TENSORS, "grad_out", *GRADIENTS)))
    return {name: given[name] for name in GRADIENTS}


def _execute_forward(**given: Any) -> Mapping[str, Tensor]:
    _made("forward", given.pop("_device")).execute(**given)
    return {"out": given["out"]}


def _execute_backward(**given: Any) -> Mapping[str, Tensor]:
    _made("backward", given.pop("_device")).execute(**given)
    return {name: given[name] for name in GRADIENTS}


@cache
def _made(direction: str, device: str) -> Any:
    """A compiled object whose samples were good."""
    inputs = _inputs(PROBLEM, device)
    samples = [getattr(inputs, name) for name in (*TENSORS, "grad_out")]
    kind = CSACompressorForward if direction == "forward" else CSACompressorBackward
    made = kind(*samples, **SETTINGS)
    made.compile()
    return made


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("forward", _forward, ("ratio", "coff", "out", "exp")),
        Entry("backward", _backward, ("ratio", "coff", "grad_out", *GRADIENTS, "exp")),
        Entry(
            "forward wrapper",
            csa_compressor_forward_wrapper,
            ("ratio", "head_dim", "coff", "total_comp", "stream"),
        ),
        Entry("backward wrapper", csa_compressor_backward_wrapper, ("grad_out", "ratio", "head_dim", "coff", "stream")),
        Entry("forward class", _make_forward, ("ratio", "coff", "out")),
        Entry("backward class", _make_backward, ("ratio", "coff", "grad_out", *GRADIENTS)),
        Entry("forward execute", _execute_forward, ("out", "current_stream")),
        Entry("backward execute", _execute_backward, ("grad_out", *GRADIENTS, "current_stream")),
        Entry("compress_thd", _thd, ("ratio", "coff", "total_comp")),
    )
}


def call(entry: Entry, arguments: Arguments, device: str) -> Mapping[str, Tensor]:
    """The results of a call."""
    extra = {"_device": device} if entry.name.endswith("execute") else {}
    return entry.call(**arguments, **extra)


def tensors_in(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """The tensors among some arguments."""
    yield from ((name, value) for name, value in arguments.items() if isinstance(value, Tensor))
