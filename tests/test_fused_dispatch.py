"""The dispatch: the fused result where it can be had, None and one line in the log where not; and a layer on top."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from csa_gate.fused import compiled, compress_thd, dispatch, maybe_compress_thd_fused
from csa_gate.fused.config import LOOP, schedule_of
from csa_gate.oracles import Inputs, Problem, error_bound, make_inputs, ordered
from csa_gate.oracles.bits import bit_pattern

from .compressor_module import Compressor, eager_pool

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PROBLEM = Problem((9, 0, 3, 14), ratio=4, coff=2, head_dim=8, row_capacity=7, token_capacity=28)
NAMES = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been logged yet, and nothing is switched off."""
    monkeypatch.setattr(dispatch, "_LOGGED", set())
    monkeypatch.delenv(dispatch.SWITCH, raising=False)


def arguments(device: str = "cpu") -> dict[str, Any]:
    inputs = make_inputs(PROBLEM, device=device)
    return {name: getattr(inputs, name) for name in NAMES} | {"total_comp": 7, "ratio": 4, "head_dim": 8, "coff": 2}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bit_pattern(a), bit_pattern(b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batched", [False, True], ids=["packed", "batch-axis"])
def test_engaged(device: str, batched: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What is supported gives the operator's bits, with a batch axis if kv has one, gradients included."""
    given = arguments(device)
    want = compress_thd(*(given[n] for n in NAMES), ratio=4, coff=2, total_comp=7)
    if batched:
        given |= {name: given[name].unsqueeze(1) for name in ("kv", "score")}
    given["kv"].requires_grad_()
    out = maybe_compress_thd_fused(*given.values())
    assert out is not None and out.shape == ((7, 1, 8) if batched else (7, 8))
    assert same(out.detach().view(7, 8), want)
    out.sum().backward()
    assert given["kv"].grad is not None and given["kv"].grad.shape == given["kv"].shape
    assert not caplog.records


def test_defaults() -> None:
    """total_comp, ratio, head_dim and coff have defaults, as in the wrappers."""
    out = maybe_compress_thd_fused(*(arguments()[name] for name in NAMES))
    assert out is not None and out.shape == (5, 8)


def test_deterministic_algorithms() -> None:
    """torch's deterministic mode is no reason to decline."""
    torch.use_deterministic_algorithms(True)
    try:
        out = maybe_compress_thd_fused(**arguments())
    finally:
        torch.use_deterministic_algorithms(False)
    assert out is not None and same(out, maybe_compress_thd_fused(**arguments()))


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _misaligned(t: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(t.numel() * t.itemsize + 1), dtype=t.dtype, offset=1).view(t.shape)


DECLINED: list[tuple[str, Any, str]] = [
    ("kv", lambda t: t.half(), r"kv is torch.float16, not torch.bfloat16"),
    ("score", lambda t: t.float(), r"score is torch.float32, not torch.bfloat16"),
    ("ape", lambda t: t.bfloat16(), r"ape is torch.bfloat16, not torch.float32"),
    ("cu_seqlens", lambda t: t.long(), r"cu_seqlens is torch.int64, not torch.int32"),
    ("cu_seqlens_comp", lambda t: t.long(), r"cu_seqlens_comp is torch.int64, not torch.int32"),
    ("kv", lambda t: t.t().contiguous().t(), r"kv is not contiguous"),
    ("score", lambda t: t.to_sparse(), r"score is not contiguous"),
    ("kv", lambda t: torch.nested.nested_tensor([t], layout=torch.jagged), r"kv is not contiguous"),
    ("kv", lambda t: t.flatten()[0], r"kv is neither (tokens, columns) nor (tokens, 1, columns)"),
    ("kv", lambda t: t[:, :0], r"kv has no columns"),
    ("ape", _misaligned, r"ape starts at an address that is no multiple of its element's size"),
    ("kv", lambda t: t.view(14, 2, 16), r"kv is neither (tokens, columns) nor (tokens, 1, columns)"),
    ("kv", lambda t: t.to("meta"), r"kv is on a meta device, not cpu or cuda"),
    ("kv", lambda t: t[:3], r"kv has fewer tokens than ratio, so that there is nothing that padding rows could pool"),
    ("ratio", lambda r: 257, r"ratio is 257, not from 1 to 256"),
    *(("ratio", lambda r, v=v: v, f"ratio is {v!r}, not from 1 to 256") for v in (0, True, 4.0, "4", None, [4], 2**70)),
    *(("coff", lambda c, v=v: v, f"coff is {v!r}, not 1 or 2") for v in (3, True, 2.0, "2", None, [2])),
    ("total_comp", lambda n: 2**70, r"kv or out has more than 2147483647 elements, which int32 offsets do not reach"),
    ("total_comp", lambda n: 2**28, r"kv or out has more than 2147483647 elements, which int32 offsets do not reach"),
]


WRAPPED = "wraps other tensors or has no memory of its own"
DECLINED += [
    ("kv", lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), f"kv {WRAPPED}"),
    *((n, lambda t: TwoTensor(t, t), f"{n} {WRAPPED}") for n in NAMES),
]


@pytest.mark.parametrize(
    ("name", "spoil", "reason"), DECLINED, ids=[f"{n}-{at}" for at, (n, _, _) in enumerate(DECLINED)]
)
def test_declines(name: str, spoil: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is not supported gives None, each time, and a warning with the reason, once."""
    given = arguments()
    given[name] = spoil(given[name])
    with caplog.at_level(logging.WARNING):
        assert maybe_compress_thd_fused(**given) is None
        assert maybe_compress_thd_fused(**given) is None
    out = maybe_compress_thd_fused(**arguments())
    assert out is not None and same(out, compress_thd(*(arguments()[n] for n in NAMES), ratio=4, coff=2, total_comp=7))
    assert [record.getMessage() for record in caplog.records] == [f"The fused compressor is not used: {reason}."]


def test_negative_views_are_taken() -> None:
    """torch gives the operator their values."""
    given, plain = arguments(), arguments()
    given["score"], plain["score"] = torch._neg_view(given["score"]), -plain["score"]
    out, want = maybe_compress_thd_fused(**given), maybe_compress_thd_fused(**plain)
    assert out is not None and want is not None and same(out, want)


def test_too_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat offsets into kv have to fit as well."""
    for limit, engaged in ((28 * 16, True), (28 * 16 - 1, False)):
        monkeypatch.setattr(dispatch, "INT32_MAX", limit)
        assert (maybe_compress_thd_fused(**arguments()) is not None) is engaged


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int8])
def test_numbers_of_numpy(kind: Any) -> None:
    """NumPy's integers are as good as Python's, however few bits they have, beside more columns and tokens."""
    inputs = make_inputs(Problem((300,), ratio=64, coff=2, head_dim=256))
    tensors = [getattr(inputs, name) for name in NAMES]
    tensors[0].requires_grad_()
    out = maybe_compress_thd_fused(*tensors, kind(4), kind(64), np.int16(256), kind(2))
    assert out is not None and same(out, compress_thd(*tensors, ratio=64, coff=2, total_comp=4))


def test_workspace_of_the_backward(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where a gradient is needed, the backward's workspace has to fit, for as many rows as there can be."""
    inputs = make_inputs(Problem((64,), ratio=64, coff=2, head_dim=2, row_capacity=65))
    tensors = [getattr(inputs, name) for name in NAMES]
    elements = 3 * 64 * 4  # leaves of 32 rows, each as long as ape; no tensor has as many

    def engages(limit: int, rows: int | None = 65) -> bool:
        for module in (dispatch, compiled):
            monkeypatch.setattr(module, "INT32_MAX", limit)
        out = maybe_compress_thd_fused(*tensors, total_comp=rows, ratio=64, head_dim=2, coff=2)
        if out is not None and out.requires_grad:
            out.sum().backward()
        return out is not None

    assert engages(elements - 1)
    tensors[2].requires_grad_()
    assert engages(elements) and not engages(elements - 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"The fused compressor is not used: the backward's workspace has more than {elements - 1} elements, "
        "which int32 offsets do not reach."
    ]
    with torch.no_grad():
        assert engages(elements - 1)
    monkeypatch.setattr(dispatch, "_leaf_parts", lambda window, on_gpu: 16)
    assert engages(16 * 64 * 4, None) and not engages(16 * 64 * 4 - 1, None)


@pytest.mark.parametrize("window", [*range(1, 34), 64, 127, 128, 129, 256, 257, 512])
def test_parts_of_a_leaf_depend_on_the_window(window: int) -> None:
    """The dispatch foresees the largest workspace without knowing how the work will be cut."""
    shapes = itertools.product(((1, 1), (3, 1), (16, 2), (512, 2), (16384, 2)), (1, 31, 300, 5000, 10**6))
    parts = [schedule_of("backward", window, *columns, rows).leaf_parts for columns, rows in shapes]
    assert max(parts) == dispatch._leaf_parts(window, on_gpu=True)
    assert dispatch._leaf_parts(window, on_gpu=False) == LOOP.leaf_parts


def test_parts_of_a_leaf_under_compile() -> None:
    """torch.compile can trace what finds them, which it meets for tensors on CUDA alone."""

    def parts(t: Tensor) -> Tensor:
        return t + dispatch._leaf_parts(2 * t.shape[0], on_gpu=True)

    assert torch.compile(parts, fullgraph=True, backend="eager")(torch.zeros(64))[0] == 32


def test_every_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Once means once for each reason."""
    for spoiled in ({"ratio": 257}, {"coff": 3}, {"ratio": 257}):
        maybe_compress_thd_fused(**arguments() | spoiled)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize(("value", "engaged"), [("0", False), ("1", True), ("", True)])
def test_switch(value: str, engaged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """CSA_GATE_FUSED=0, set at any time, turns the fused path off."""
    assert maybe_compress_thd_fused(**arguments()) is not None
    monkeypatch.setenv("CSA_GATE_FUSED", value)
    assert (maybe_compress_thd_fused(**arguments()) is not None) is engaged
    assert [r.getMessage() for r in caplog.records] == ["The fused compressor is not used: CSA_GATE_FUSED is 0."] * (
        not engaged
    )


def test_callers_switch(caplog: pytest.LogCaptureFixture) -> None:
    """`enabled=False` is the caller's own business, and not logged."""
    for off, on in ((False, True), (np.False_, np.True_)):
        assert maybe_compress_thd_fused(**arguments(), enabled=off) is None
        assert maybe_compress_thd_fused(**arguments(), enabled=on) is not None
    assert not caplog.records


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_transforms_decline(transform: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Inside the transforms of torch.func the eager path does better: it has all of their rules."""
    given = arguments()

    def inside(kv: Tensor) -> Tensor:
        assert maybe_compress_thd_fused(**given | {"kv": kv}) is None
        return kv.sum()

    transform(inside)(given["kv"][None] if transform is torch.func.vmap else given["kv"])
    assert [r.getMessage() for r in caplog.records] == [f"The fused compressor is not used: kv {WRAPPED}."]


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("score", lambda t: t[1:], r"score: got shape \(27, 16\), need \(28, 16\)"),
        ("head_dim", lambda d: 9, r"head_dim: got 9, need 8"),
        ("ape", lambda t: t[1:], r"ape: got shape \(3, 16\), need \(4, 16\)"),
        ("kv", lambda t: t.tolist(), r"kv: got list, need a torch\.Tensor"),
        *(("total_comp", lambda n, v=v: v, r"total_comp: got .+, need a number") for v in (-1, True, 7.0, "7", [7])),
        *(("head_dim", lambda d, v=v: v, r"head_dim: got .+, need 8") for v in (True, 8.0, "8", 0, -8, [8])),
        *((n, lambda t: None, rf"{n}: got NoneType, need a torch\.Tensor") for n in NAMES),
        *((n, lambda t: t.to("meta"), rf"{n}: got device meta, need cpu, where kv is") for n in NAMES[1:]),
        ("score", lambda t: t[None], r"score: got shape \(1, 28, 16\), need \(28, 16\)"),
        ("kv", lambda t: t[:, :15].clone(), r"head_dim: got 8, need 7.5: kv has 15 columns"),
        ("cu_seqlens", lambda t: t + 1, r"cu_seqlens\[0\]: got 1, need 0"),
        ("cu_seqlens", lambda t: t[:0], r"cu_seqlens: got 0 offsets"),
        *((n, _freed, rf"{n}: got a storage of 0 bytes, need \d+") for n in NAMES),
        *(("enabled", lambda e, v=v: v, r"enabled: got .+, need True or False") for v in ("no", "0", 0, 1, None, [])),
    ],
)
def test_contradictions_raise(name: str, spoil: Any, text: str) -> None:
    """Sizes that do not fit each other are a mistake, on which no eager path would do better."""
    given = arguments()
    with pytest.raises(ValueError, match=text):
        maybe_compress_thd_fused(**given | {name: spoil(given.get(name))})


@pytest.mark.parametrize("name", ["kv", "score"])
def test_batch_axis_of_one_raises(name: str) -> None:
    """kv and score have a batch axis both, or neither."""
    given = arguments()
    shapes = [r"\(28, 16\)", r"\(28, 1, 16\)"]
    got, need = shapes if name == "kv" else shapes[::-1]
    with pytest.raises(ValueError, match=f"^score: got shape {got}, need {need}$"):
        maybe_compress_thd_fused(**given | {name: given[name].unsqueeze(1)})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch.func.jvp
@pytest.mark.parametrize("name", ["kv", "score", "ape"])
def test_forward_mode_declines(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where forward-mode AD differentiates, the eager path gives the tangent; where it does not, nothing changes."""
    given = arguments()
    want = maybe_compress_thd_fused(**given)
    with forward_ad.dual_level():
        out = maybe_compress_thd_fused(**given)
        assert out is not None and want is not None and same(out, want)
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            assert maybe_compress_thd_fused(**given | {name: dual}) is None

    def call(tensor: Tensor) -> Tensor:
        assert maybe_compress_thd_fused(**given | {name: tensor}) is None
        return tensor

    torch.func.jvp(call, (given[name],), (torch.ones_like(given[name]),))
    (record,) = caplog.records
    assert "kv, score or ape has a tangent" in record.getMessage()


def _layer(kv: Tensor, score: Tensor, ape: Tensor, cu_seqlens: Tensor, cu_seqlens_comp: Tensor) -> tuple[Tensor, bool]:
    tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    out = maybe_compress_thd_fused(*tensors, 7, 4, 8, 2)
    return (eager_pool(*tensors, 7, 4, 2), False) if out is None else (out, True)


@pytest.mark.parametrize("device", DEVICES)
def test_under_compile(device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Traced without a break, the dispatch decides as ever, and declines without a word."""
    tensors = tuple(arguments(device)[name] for name in NAMES)
    out, engaged = torch.compile(_layer, fullgraph=True, backend="aot_eager")(*tensors)
    assert engaged and same(out, maybe_compress_thd_fused(*tensors, 7))
    torch.compiler.reset()
    monkeypatch.setenv(dispatch.SWITCH, "0")
    out, engaged = torch.compile(_layer, fullgraph=True, backend="aot_eager")(*tensors)
    assert not engaged and same(out, eager_pool(*tensors, 7, 4, 2))
    assert not [record for record in caplog.records if record.name == dispatch.__name__]


def test_forward_mode_declines_under_compile() -> None:
    """The graph breaks where forward-mode AD is asked about, and the answer is that of a plain call."""
    tensors = tuple(arguments()[name] for name in NAMES)
    layer = torch.compile(_layer, backend="aot_eager")
    with forward_ad.dual_level():
        assert layer(*tensors)[1]
        dual = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        out, engaged = layer(dual, *tensors[1:])
        assert not engaged and forward_ad.unpack_dual(out).tangent is not None
    assert layer(*tensors)[1]


class _Specified(torch.autograd.Function):
    """The pooling by the oracle that has the kernels' bits."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
        inputs = _inputs(kv, score, ape)
        ctx.save_for_backward(kv, score, ape)
        return ordered(inputs, exp=_exp(kv)).out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        result = ordered(_inputs(*ctx.saved_tensors, grad_out), exp=_exp(grad_out))
        return result.grad_kv, result.grad_score, result.grad_ape


def _exp(t: Tensor) -> Any:
    return "native" if t.is_cuda else "portable"


def _inputs(kv: Tensor, score: Tensor, ape: Tensor, grad_out: Tensor | None = None) -> Inputs:
    plain = make_inputs(PROBLEM, device=kv.device)
    if grad_out is None:
        grad_out = plain.grad_out
    tensors = (t.detach() for t in (kv, score, ape, grad_out))
    return Inputs(PROBLEM, *tensors, plain.cu_seqlens, plain.cu_seqlens_comp)


def _run(layer: Compressor, device: str) -> dict[str, Tensor]:
    """out and all gradients of one step of a layer."""
    x = torch.randn((28, 32), generator=torch.Generator().manual_seed(1)).bfloat16().to(device).requires_grad_()
    inputs = make_inputs(PROBLEM, device=device)
    layer.zero_grad()
    out = layer(x, inputs.cu_seqlens, inputs.cu_seqlens_comp, 7)
    out[:5].backward(inputs.grad_out[:5])
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad.clone()} | gradients


@pytest.mark.parametrize("device", DEVICES)
def test_layer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer trains through the dispatch: it engages, every parameter has a gradient, all bits are as specified."""
    layer = Compressor(32, head_dim=8, ratio=4, coff=2).to(device)
    got = _run(layer, device)
    assert layer.fused
    assert set(got) == {"out", "x", "values.weight", "gate.weight", "ape", "norm.weight"}
    for name, tensor in got.items():
        assert tensor.isfinite().all() and tensor.any(), name
    monkeypatch.setattr(
        f"{Compressor.__module__}.maybe_compress_thd_fused", lambda *given: _Specified.apply(*given[:3])
    )
    want = _run(layer, device)
    assert all(same(got[name], want[name]) for name in want)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_without_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layer runs on without kernels."""
    layer = Compressor(32, head_dim=8, ratio=4, coff=2).to(device)
    monkeypatch.setenv(dispatch.SWITCH, "0")
    got = _run(layer, device)
    assert not layer.fused
    assert all(tensor.isfinite().all() and tensor.any() for tensor in got.values())


@pytest.mark.parametrize("device", DEVICES)
def test_matches_eager(device: str) -> None:
    """The fused pooling and the layer's own differ by no more than each may differ from the exact values."""
    inputs = make_inputs(PROBLEM, device=device)
    bound = error_bound(inputs)
    results = []
    for pool in (maybe_compress_thd_fused, eager_pool):
        leaves = [t.clone().requires_grad_() for t in (inputs.kv, inputs.score, inputs.ape)]
        tensors = (*leaves, inputs.cu_seqlens, inputs.cu_seqlens_comp, 7)
        out = pool(*tensors, ratio=4, coff=2)
        assert out is not None
        results.append((out.detach(), *torch.autograd.grad(out[:5], leaves, inputs.grad_out[:5])))
    for fused, eager, (name, limit) in zip(*results, bound.items(), strict=True):
        assert ((fused.double() - eager.double()).abs() <= 2 * limit).all(), name
