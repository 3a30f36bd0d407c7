"""The wrappers and classes in the manner of `cudnn.csa`: its arguments, one import away, and our bits."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from csa_gate.fused import (
    CSACompressorBackward,
    CSACompressorForward,
    compress_thd,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from csa_gate.oracles import Inputs, Problem, Result, make_inputs, ordered
from csa_gate.oracles.bits import bit_pattern

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# One configuration throughout, since each takes a second to compile.
PROBLEM = Problem((9, 0, 3, 14), ratio=4, coff=2, head_dim=8, row_capacity=7, token_capacity=28)
SETTINGS: dict[str, Any] = {"ratio": 4, "head_dim": 8, "coff": 2}


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.kv, inputs.score, inputs.ape, inputs.cu_seqlens, inputs.cu_seqlens_comp


def specified(inputs: Inputs) -> Result:
    return ordered(inputs, exp="portable" if inputs.device.type == "cpu" else "native")


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bit_pattern(a), bit_pattern(b))


def buffers_of(inputs: Inputs) -> dict[str, Tensor]:
    """NaN-filled buffers for the four outputs."""
    p = inputs.problem
    out = torch.empty((p.total_comp, p.head_dim), dtype=torch.bfloat16, device=inputs.device)
    likes = {"out": out, "grad_kv": inputs.kv, "grad_score": inputs.score, "grad_ape": inputs.ape}
    return {name: torch.full_like(t, float("nan")) for name, t in likes.items()}


_TENSORS = "kv score ape cu_seqlens cu_seqlens_comp"
_SAMPLES = " ".join(f"sample_{name}" for name in _TENSORS.split())


@pytest.mark.parametrize(
    ("function", "names", "defaults"),
    [
        (
            csa_compressor_forward_wrapper,
            f"{_TENSORS} ratio head_dim coff total_comp stream",
            {"ratio": 4, "head_dim": None, "coff": 2, "total_comp": None, "stream": None},
        ),
        (
            csa_compressor_backward_wrapper,
            f"{_TENSORS} grad_out ratio head_dim coff stream deterministic",
            {"ratio": 4, "head_dim": None, "coff": 2, "stream": None, "deterministic": False},
        ),
        (CSACompressorForward, f"{_SAMPLES} sample_out ratio coff", {"ratio": 4, "coff": 2}),
        (
            CSACompressorBackward,
            f"{_SAMPLES} sample_out ratio coff deterministic",
            {"ratio": 4, "coff": 2, "deterministic": False},
        ),
        (CSACompressorForward.execute, f"self {_TENSORS} out current_stream", {"current_stream": None}),
        (
            CSACompressorBackward.execute,
            f"self {_TENSORS} grad_out grad_kv grad_score grad_ape current_stream workspace",
            {"current_stream": None, "workspace": None},
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_arguments(function: Callable[..., Any], names: str, defaults: dict[str, Any]) -> None:
    """Names, order and defaults are those of nvidia-cudnn-frontend 1.32.0, and every argument may be positional."""
    parameters = inspect.signature(function).parameters
    assert list(parameters) == names.split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == defaults


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_bits(device: str, deterministic: bool) -> None:
    """The results are those of the specification, to the bit, by name and in order."""
    inputs = make_inputs(PROBLEM, device=device)
    want = specified(inputs)
    result = csa_compressor_forward_wrapper(*tensors_of(inputs), **SETTINGS, total_comp=7)
    assert list(result.keys()) == ["out"]
    assert same(result["out"], want.out)
    gradients = csa_compressor_backward_wrapper(
        *tensors_of(inputs), inputs.grad_out, **SETTINGS, deterministic=deterministic
    )
    assert list(gradients.keys()) == ["grad_kv", "grad_score", "grad_ape"]
    assert all(same(gradient, getattr(want, name)) for name, gradient in gradients.items())


def test_results_unpack() -> None:
    """A result is a dict by name, and a tuple to whoever unpacks or counts."""
    inputs = make_inputs(PROBLEM)
    gradients = csa_compressor_backward_wrapper(*tensors_of(inputs), inputs.grad_out)
    grad_kv, grad_score, grad_ape = gradients
    assert grad_kv is gradients["grad_kv"] is gradients[0]
    assert grad_score is gradients["grad_score"] is gradients[1]
    assert grad_ape is gradients["grad_ape"] is gradients[2]
    assert "grad_kv" in gradients and len(gradients) == 3
    assert dict(**gradients)["grad_ape"] is grad_ape
    with pytest.raises(IndexError):
        gradients[3]
    with pytest.raises(KeyError):
        gradients["out"]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_from_offsets(device: str) -> None:
    """`total_comp=None` makes as many rows as there are, `head_dim=None` as many columns."""
    inputs = make_inputs(PROBLEM, device=device)
    (out,) = csa_compressor_forward_wrapper(*tensors_of(inputs))
    assert same(out, specified(inputs).out[:5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", [Problem((3, 2), 4, 2, 8), Problem((), 4, 2, 8, token_capacity=5)], ids=str)
def test_no_rows(device: str, problem: Problem) -> None:
    """Without rows the result is empty and all gradients are +0, by wrapper and by class."""
    inputs = make_inputs(problem, device=device)
    for total_comp in (0, None):
        (out,) = csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=total_comp)
        assert out.shape == (0, 8)
    gradients = csa_compressor_backward_wrapper(*tensors_of(inputs), inputs.grad_out)
    assert not any(bit_pattern(gradient).any() for gradient in gradients)
    buffers = buffers_of(inputs)
    backward = CSACompressorBackward(*tensors_of(inputs), buffers.pop("out"))
    backward.compile()
    backward.execute(*tensors_of(inputs), inputs.grad_out, **buffers)
    assert not any(bit_pattern(gradient).any() for gradient in buffers.values())


def test_inputs_that_require_grad() -> None:
    """The wrappers take leaves of an autograd graph as they are, and their results belong to none."""
    inputs = make_inputs(PROBLEM)
    kv, *others = tensors_of(inputs)
    kv.requires_grad_()
    (out,) = csa_compressor_forward_wrapper(kv, *others, total_comp=7)
    gradients = csa_compressor_backward_wrapper(kv, *others, inputs.grad_out)
    assert not any(t.requires_grad for t in (out, *gradients))


class _Calls(TorchDispatchMode):
    """The names of all operations of torch that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("device", DEVICES)
def test_no_reads(device: str) -> None:
    """A call that names total_comp reads no element of a tensor; one that does not reads one."""
    inputs = make_inputs(PROBLEM, device=device)
    for total_comp, reads in ((7, 0), (None, 1)):
        with _Calls() as calls:
            csa_compressor_forward_wrapper(*tensors_of(inputs), total_comp=total_comp)
        assert calls.names.count("_local_scalar_dense") == reads
        assert sum(name.startswith("empty") for name in calls.names) == 1
        assert not any(name in ("copy_", "clone", "_to_copy", "fill_", "zero_") for name in calls.names)
    with _Calls() as calls:
        csa_compressor_backward_wrapper(*tensors_of(inputs), inputs.grad_out)
    assert not any(
        name in ("copy_", "clone", "_to_copy", "fill_", "zero_", "_local_scalar_dense") for name in calls.names
    )


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda t: t[:0], r"cu_seqlens_comp: got shape \(0,\), need the number of segments \+ 1"),
        (lambda t: t[None], r"cu_seqlens_comp: got shape \(1, 5\), need the number of segments \+ 1"),
        (lambda t: -t, r"cu_seqlens_comp: got -5 at the end, need a number of rows"),
        (lambda t: t.tolist(), r"cu_seqlens_comp: got list, need a torch\.Tensor"),
        (lambda t: t.to("meta"), r"cu_seqlens_comp: got device meta, need one to read the number of rows on"),
        (lambda t: t.long(), r"cu_seqlens_comp: got dtype torch\.int64, need torch\.int32"),
        (lambda t: t.float(), r"cu_seqlens_comp: got dtype torch\.float32, need torch\.int32"),
        (lambda t: t * float("nan"), r"cu_seqlens_comp: got dtype torch\.float32, need torch\.int32"),
        (lambda t: t / 0, r"cu_seqlens_comp: got dtype torch\.float32, need torch\.int32"),
        (lambda t: t.to(torch.complex64), r"cu_seqlens_comp: got dtype torch\.complex64, need torch\.int32"),
        (lambda t: t.to_sparse(), r"cu_seqlens_comp: got torch\.sparse_coo, need torch\.strided"),
        (lambda t: torch.nested.nested_tensor([t]), r"cu_seqlens_comp: got a nested tensor, need torch\.strided"),
        (FakeTensorMode().from_tensor, r"cu_seqlens_comp: got a FakeTensor, need values to read the number of rows"),
    ],
)
@pytest.mark.parametrize("call", [csa_compressor_forward_wrapper, compress_thd])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_offsets_that_give_no_rows(call: Any, spoil: Any, text: str) -> None:
    """`total_comp=None` reads the last offset, which has to be there and to be one."""
    arguments = _arguments()
    del arguments["head_dim"]
    with pytest.raises(ValueError, match=text):
        call(**arguments | {"cu_seqlens_comp": spoil(arguments["cu_seqlens_comp"])})


def _arguments() -> dict[str, Any]:
    return dict(zip(_TENSORS.split(), tensors_of(make_inputs(PROBLEM)), strict=True)) | SETTINGS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_meta", ["none", "out", "all"])
def test_classes(device: str, on_meta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once compiled for samples, with or without memory, calls compile nothing and have the specification's bits."""
    if on_meta == "all" and device != DEVICES[-1]:
        pytest.skip("samples on meta alone stand for the CUDA device")
    inputs = make_inputs(Problem((9, 0, 3, 14), ratio=5, coff=1, head_dim=8, row_capacity=6), device=device)
    buffers, want = buffers_of(inputs), specified(inputs)
    tensors = [t.clone() for t in (*tensors_of(inputs), inputs.grad_out)]  # aligned as torch allocates them
    samples = [t.to("meta") if on_meta == "all" else t for t in tensors[:5]]
    samples.append(buffers["out"].to("meta") if on_meta != "none" else buffers["out"])
    forward = CSACompressorForward(*samples, ratio=5, coff=1)
    backward = CSACompressorBackward(*samples, ratio=5, coff=1, deterministic=True)
    assert forward.check_support() is True and backward.check_support() is True
    for compressor in (forward, backward):
        compressor.compile()
        compressor.compile()
    monkeypatch.setattr("cutlass.cute.compile", None)
    forward.execute(*tensors[:5], buffers["out"])
    scratch = torch.empty(backward.scratch_workspace_bytes(), dtype=torch.uint8, device=device)
    gradients = (buffers["grad_kv"], buffers["grad_score"], buffers["grad_ape"])
    backward.execute(*tensors, *gradients, workspace=scratch)
    assert all(same(buffers[name], tensor) for name, tensor in want.items())


def test_classes_keep_no_samples() -> None:
    """Samples may be freed: only their descriptions are kept."""
    samples = [t.clone() for t in tensors_of(make_inputs(PROBLEM))]
    out = torch.empty((7, 8), dtype=torch.bfloat16)
    forward, backward = CSACompressorForward(*samples, out), CSACompressorBackward(*samples, out)
    references = [weakref.ref(t) for t in (*samples, out)]
    samples.clear()
    del out
    assert all(reference() is None for reference in references)
    assert forward.check_support() and backward.check_support()


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("kv", lambda t: t.float(), r"kv: got dtype torch\.float32, need torch\.bfloat16"),
        ("kv", lambda t: t.t().contiguous().t(), r"kv: got strides \(1, 28\), need contiguous ones"),
        ("score", lambda t: t[1:], r"score: got shape \(27, 16\), need \(28, 16\)"),
        ("ape", lambda t: t.tolist(), r"ape: got list, need a torch\.Tensor"),
        ("out", lambda t: t[:, :5], r"out: got shape \(7, 5\), need \(7, 8\)"),
        ("ratio", lambda r: 0, r"ratio: got 0, need an integer from 1 to 256"),
        ("coff", lambda c: 3, r"coff: got 3, need 1 or 2"),
    ],
)
@pytest.mark.parametrize("compressor", [CSACompressorForward, CSACompressorBackward])
def test_check_support_refuses(compressor: Any, name: str, spoil: Any, text: str) -> None:
    """What is not supported raises ValueError, no later than in `check_support`."""
    arguments = _arguments() | {"out": torch.empty((7, 8), dtype=torch.bfloat16)}
    del arguments["head_dim"]
    arguments[name] = spoil(arguments[name])
    settings = {n: arguments.pop(n) for n in ("ratio", "coff")}
    with pytest.raises(ValueError, match=text):
        compressor(**{f"sample_{n}": value for n, value in arguments.items()}, **settings).check_support()


def test_execute_refuses() -> None:
    """`execute` wants `compile` first, and tensors like the samples."""
    inputs = make_inputs(PROBLEM)
    tensors, out = tensors_of(inputs), torch.zeros((7, 8), dtype=torch.bfloat16)
    forward = CSACompressorForward(*tensors, out)
    with pytest.raises(ValueError, match="got execute before compile"):
        forward.execute(*tensors, out)
    forward.compile()
    with pytest.raises(ValueError, match=r"out: got shape \(6, 8\), need \(7, 8\), the sample's"):
        forward.execute(*tensors, out[:6])
    with pytest.raises(ValueError, match=r"score: got device meta, need cpu, where the samples are"):
        forward.execute(tensors[0], tensors[1].to("meta"), *tensors[2:], out)
    with pytest.raises(ValueError, match=r"kv: got dtype torch\.float32, need torch\.bfloat16"):
        forward.execute(tensors[0].float(), *tensors[1:], out)
    with pytest.raises(ValueError, match=r"ape: got list, need a torch\.Tensor"):
        forward.execute(*tensors[:2], tensors[2].tolist(), *tensors[3:], out)
    assert not out.any()
