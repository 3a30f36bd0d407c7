"""Where the kernels' buffers lie: what overlaps is refused, what merely touches is not; and debug mode, for CUDA."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from csa_gate.fused import checks, compiled, compress_backward, compress_forward
from csa_gate.oracles import Problem
from csa_gate.oracles.bits import bit_pattern, same_bits

from .entry_points import DEVICES, ENTRIES, GRADIENTS, PROBLEM, TENSORS, Arguments, call, specified, tensors_in
from .test_bad_input import freed, freed_part, is_refused, zeros

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROWS = (PROBLEM.total_comp, PROBLEM.head_dim)


def _in(tensor: Tensor, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """A contiguous tensor of `shape` in the memory of another, `start` elements on."""
    return tensor.as_strided(shape, (shape[1], 1), tensor.storage_offset() + start)


OVERLAPS: list[tuple[str, Callable[[Arguments], Arguments], str]] = [
    ("out", lambda good: {"out": _in(good["kv"], ROWS)}, "out: got memory that kv has too, need its own"),
    ("out", lambda good: {"out": _in(good["score"], ROWS, 144 - 18)}, "out: got memory that score has too"),
    ("grad_kv", lambda good: {"grad_kv": good["kv"]}, "grad_kv: got memory that kv has too, need its own"),
    ("grad_kv", lambda good: {"grad_score": good["grad_kv"]}, "grad_score: got memory that grad_kv has too"),
    ("grad_ape", lambda good: {"grad_ape": good["ape"]}, "grad_ape: got memory that ape has too, need its own"),
    (
        "grad_score",
        lambda good: {"grad_out": _in(good["grad_score"], ROWS, 144 - 1 - 17)},
        "grad_score: got memory that grad_out has too",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("entry", "spoil", "text"),
    [
        pytest.param(entry, spoil, text, id=f"{entry.name}-{at}".replace(" ", "-"))
        for entry in ENTRIES.values()
        for at, (argument, spoil, text) in enumerate(OVERLAPS)
        if argument in entry.takes
    ],
)
def test_overlap(entry: Any, spoil: Any, text: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that shares memory with an input or another output, all or part of it."""
    monkeypatch.setattr(checks, "DEBUG", device == "cuda")
    is_refused(entry, spoil, text, device)


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of which each begins where another ends overlap nowhere, and an empty one does not wherever it is."""
    monkeypatch.setattr(checks, "DEBUG", device == "cuda")
    entry = ENTRIES["backward"]
    arguments, _ = entry.arguments(device=device)
    memory = torch.empty(2 * 144 + 18 + 2 * 48, dtype=torch.bfloat16, device=device)
    starts = {"grad_kv": 0, "grad_out": 144, "grad_score": 144 + 18}
    for name, start in starts.items():
        arguments[name] = _in(memory, tuple(arguments[name].shape), start).copy_(arguments[name])
    arguments["grad_ape"] = _in(memory[2 * 144 + 18 :].view(torch.float32), (4, 12))
    for name, tensor in call(entry, arguments, device).items():
        assert same_bits(tensor, getattr(specified(device=device), name)), name
    rowless, _ = ENTRIES["forward"].arguments(Problem((3,), 4, 2, 6), device)
    compress_forward(**rowless | {"out": _in(rowless["kv"], (0, 6), 5)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)
def test_views_at_odd_offsets(entry: Any, device: str) -> None:
    """Contiguous views need no more than the alignment of an element."""
    arguments, _ = entry.arguments(device=device)
    for name in [n for n, value in arguments.items() if isinstance(value, Tensor)]:
        tensor = arguments[name]
        arguments[name] = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    for name, tensor in call(entry, arguments, device).items():
        assert same_bits(tensor, getattr(specified(device=device), name)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint16])
def test_numbers_of_numpy(entry: Any, kind: Any, device: str) -> None:
    """NumPy's integers are as good as Python's."""
    arguments, _ = entry.arguments(device=device)
    arguments |= {n: kind(arguments[n]) for n in ("ratio", "coff", "head_dim", "total_comp") if n in arguments}
    for name, tensor in call(entry, arguments, device).items():
        assert same_bits(tensor, getattr(specified(device=device), name)), name


@pytest.mark.parametrize("device", DEVICES)
def test_leaves_without_gradients(device: str) -> None:
    """Where autograd is off, buffers that require grad are as good as others."""
    for name in ("forward", "backward"):
        arguments, _ = ENTRIES[name].arguments(device=device)
        for buffer in ("out", *GRADIENTS):
            if buffer in arguments:
                arguments[buffer] = torch.nn.Parameter(arguments[buffer])
        with torch.no_grad():
            results = call(ENTRIES[name], arguments, device)
        assert all(same_bits(t.detach(), getattr(specified(device=device), n)) for n, t in results.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_offsets_that_wrap(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every difference of these offsets is positive in int32, and at ratio 1 as many rows as tokens are no mistake."""
    monkeypatch.setattr(checks, "DEBUG", device == "cuda")
    arguments, _ = ENTRIES[name].arguments(Problem((3, 0, 0, 0), 1, 1, 6), device)
    wrapped = torch.tensor([0, 2**31 - 1, -(2**31), -1, 0], dtype=torch.int32, device=device)
    arguments |= {"cu_seqlens": wrapped, "cu_seqlens_comp": wrapped.clone()}
    with pytest.raises(ValueError, match=r"cu_seqlens: got -4294967295 tokens and -4294967295 rows in segment 1"):
        call(ENTRIES[name], arguments, device)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_need_a_block(device: str) -> None:
    """Rows that can only be padding pool tokens [0, ratio), which must exist."""
    arguments, _ = ENTRIES["forward"].arguments(device=device)
    short = {name: arguments[name][:3] for name in ("kv", "score")}
    with pytest.raises(ValueError, match=r"kv: got 3 tokens, need at least ratio = 4: the 3 rows of out"):
        compress_forward(**arguments | short)


def test_workspace_past_int32() -> None:
    """A capacity of rows whose sums outgrow int32 offsets is refused; of the memory here none is ever touched."""
    wide = Problem((256,), 256, 2, 1)
    arguments, _ = ENTRIES["backward"].arguments(wide)
    grad_out = torch.empty((2**27, 1), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"grad_out: got 134217728 rows, whose workspace has 2147483648 elements"):
        compress_backward(**arguments | {"grad_out": grad_out})


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> tuple[Arguments, list[str]]:
    """Arguments for which a plan is there to repeat, as on CUDA after a first call, and what it has been used for."""
    arguments, _ = ENTRIES["forward"].arguments()
    arguments |= {name: _far_up(arguments[name]) for name in (*TENSORS, "out")}
    tensors = [*(arguments[name] for name in TENSORS), arguments["out"]]
    used: list[str] = []
    key = compiled._plan_key("forward", 4, 2, None, tensors)
    monkeypatch.setitem(compiled._PLANS, key, lambda tensors: used.append("plan"))
    return arguments, used


def _far_up(tensor: Tensor) -> Tensor:
    """A copy in a mapping of its own: where Python is not relocatable, small ones lie where no CUDA tensor does."""
    memory = torch.empty(1 << 26, dtype=torch.uint8)  # more than an allocator ever takes from its heap; never touched
    size = tensor.numel() * tensor.itemsize
    return memory[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def test_a_plan_is_repeated(repeated: tuple[Arguments, list[str]]) -> None:
    """The fixture does what it says: nothing is checked, nothing computed."""
    arguments, used = repeated
    before = arguments["out"].clone()
    arguments["cu_seqlens"] += 1  # in place: a tensor of another memory might have a low address
    compress_forward(**arguments)
    assert used == ["plan"] and torch.equal(bit_pattern(arguments["out"]), bit_pattern(before))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ({"ratio": 4.0}, r"ratio: got 4\.0"),
        ({"coff": 2.0}, r"coff: got 2\.0"),
        ({"out": torch.zeros(ROWS, dtype=torch.bfloat16, requires_grad=True)}, "out: got a tensor that requires grad"),
        *(
            ({name: torch._neg_view(tensor)}, f"{name}: got a view with torch's negative bit")
            for name, tensor in tensors_in(ENTRIES["forward"].arguments()[0])
            if tensor.is_floating_point()  # torch itself makes no other
        ),
        *(
            ({name: spoil(tensor)}, rf"{name}: got {text}")
            for name, tensor in tensors_in(ENTRIES["forward"].arguments()[0])
            for spoil, text in (
                (freed, r"a storage of 0 bytes, need \d+ \(freed or resized\?\)"),
                (freed_part, r"a storage of 0 bytes, need \d+ \(freed or resized\?\)"),
                (zeros, "a Tensor that wraps others or has no memory of its own"),
                (lambda t: TwoTensor(t, t), "a TwoTensor that wraps others or has no memory of its own"),
            )
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else next(iter(part)),
)
def test_a_plan_is_no_way_around_checks(repeated: tuple[Arguments, list[str]], spoil: Arguments, text: str) -> None:
    """What equals the arguments of an earlier call without being like them is looked at."""
    arguments, used = repeated
    with pytest.raises(ValueError, match=text):
        compress_forward(**arguments | spoil)
    assert not used


def test_debug_mode_repeats_no_plan(repeated: tuple[Arguments, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In debug mode every call is checked, whatever has succeeded before."""
    arguments, used = repeated
    monkeypatch.setattr(checks, "DEBUG", True)
    with pytest.raises(ValueError, match=r"cu_seqlens\[0\]: got 1, need 0"):
        compress_forward(**arguments | {"cu_seqlens": arguments["cu_seqlens"] + 1})
    assert same_bits(compress_forward(**arguments), specified().out)
    assert not used


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_debug_variable(value: str | None, on: bool) -> None:
    """The environment decides when the kernels are first imported."""
    environment = {k: v for k, v in os.environ.items() if k != "CSA_GATE_DEBUG"}
    if value is not None:
        environment["CSA_GATE_DEBUG"] = value
    code = "from csa_gate.fused import checks; print(checks.DEBUG)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout == f"{on}\n", done.stderr


class OnCuda:
    """What `check_contents` asks of a tensor on a CUDA device, without one."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: Tensor, reads: list[str]) -> None:
        self.tensor, self.reads = tensor, reads
        self.data_ptr, self.nbytes = tensor.data_ptr, tensor.nbytes

    def cpu(self) -> Tensor:
        self.reads.append("read")
        return self.tensor


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("wrong", ["", "offsets", "overlap"])
def test_debug_mode_off_the_cpu(debug: bool, capturing: bool, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are read in debug mode alone, and never under capture."""
    monkeypatch.setattr(checks, "DEBUG", debug)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    arguments, _ = ENTRIES["forward"].arguments()
    if wrong == "offsets":
        arguments["cu_seqlens"] += 1
    if wrong == "overlap":
        arguments["out"] = _in(arguments["kv"], ROWS)
    reads: list[str] = []
    inputs: Any = {name: OnCuda(arguments[name], reads) for name in TENSORS}
    outputs: Any = {"out": OnCuda(arguments["out"], reads)}
    shape = checks.Shape(segments=2, total_tokens=12, total_comp=3, head_dim=6)
    message = None
    try:
        checks.check_contents(4, shape, inputs, outputs)
    except (ValueError, RuntimeError) as error:
        message = f"{type(error).__name__} {error}"
    if not debug:
        assert message is None and not reads
    elif capturing:
        assert message is not None and message.startswith("RuntimeError CSA_GATE_DEBUG: got a call under CUDA graph")
        assert not reads
    else:
        want = {
            "": None,
            "offsets": "ValueError cu_seqlens[0]: got 1, need 0",
            "overlap": "ValueError out: got memory that kv has too, need its own",
        }
        assert message == want[wrong] and reads


@needs_cuda
@pytest.mark.parametrize("name", ["forward", "backward", "forward wrapper", "backward wrapper", "compress_thd"])
def test_debug_mode_under_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot wait for offsets: the call is refused, and the capture goes on without debug mode."""
    entry = ENTRIES[name]
    arguments, _ = entry.arguments(device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        call(entry, arguments, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with monkeypatch.context() as patch:
            patch.setattr(checks, "DEBUG", True)
            with pytest.raises(RuntimeError, match=r"CSA_GATE_DEBUG: got a call under CUDA graph capture"):
                call(entry, arguments, "cuda")
        results = call(entry, arguments, "cuda")
    graph.replay()
    assert all(same_bits(t, getattr(specified(device="cuda"), n)) for n, t in results.items())
