"""`compress_thd`: an operator of torch like any other, with the bits that the specification gives it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from csa_gate.fused import compress_thd
from csa_gate.oracles import Inputs, Problem, Result, make_inputs, ordered
from csa_gate.oracles.bits import bit_pattern

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# One configuration throughout, since each takes a second to compile.
PROBLEM = Problem((9, 0, 3, 14), ratio=4, coff=2, head_dim=8, row_capacity=7, token_capacity=28)
ROWLESS = Problem((3, 2), ratio=4, coff=2, head_dim=8)
SETTINGS: dict[str, Any] = {"ratio": 4, "coff": 2}


def tensors_of(inputs: Inputs, *, grad: str = "") -> tuple[Tensor, ...]:
    """The five tensors of a call, as new leaves; those whose initials are in `grad` require gradients."""
    kv, score, ape = (getattr(inputs, name).clone().requires_grad_(name[0] in grad) for name in ("kv", "score", "ape"))
    return kv, score, ape, inputs.cu_seqlens, inputs.cu_seqlens_comp


def specified(inputs: Inputs) -> Result:
    return ordered(inputs, exp="portable" if inputs.device.type == "cpu" else "native")


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bit_pattern(a), bit_pattern(b))


def assert_specified(inputs: Inputs, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """out and the gradients have the bits of the specification; on CUDA those of grad_ape are their own."""
    want = specified(inputs)
    kv, score, ape = (t.grad for t in tensors[:3])
    assert same(out.detach(), want.out)
    assert kv is not None and same(kv, want.grad_kv)
    assert score is not None and same(score, want.grad_score)
    assert ape is not None and same(ape, want.grad_ape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("distribution", ["normal", "peaked"])
def test_bits(device: str, distribution: str) -> None:
    """Values and gradients are those of the specification, to the bit."""
    inputs = make_inputs(PROBLEM, 1, distribution, device)
    tensors = tensors_of(inputs, grad="ksa")
    out = compress_thd(*tensors, **SETTINGS, total_comp=7)
    out.backward(inputs.grad_out)
    assert_specified(inputs, out, tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_negated_views(device: str) -> None:
    """What torch negates when it is read, it negates before the kernels see it, the incoming gradient too."""
    inputs = make_inputs(PROBLEM, device=device)
    tensors = tensors_of(inputs, grad="ksa")
    out = compress_thd(*(torch._neg_view(-t) for t in tensors), **SETTINGS, total_comp=7)
    out.backward(torch._neg_view(-inputs.grad_out))
    assert_specified(inputs, out, tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", [ROWLESS, Problem((), 4, 2, 8), Problem((), 4, 2, 8, token_capacity=5)], ids=str)
def test_no_rows(device: str, problem: Problem) -> None:
    """Without rows there is an empty result, and gradients that are +0 everywhere."""
    tensors = tensors_of(make_inputs(problem, device=device), grad="ksa")
    out = compress_thd(*tensors, **SETTINGS, total_comp=0)
    assert out.shape == (0, 8) and out.dtype == torch.bfloat16
    out.sum().backward()
    for tensor in tensors[:3]:
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape
        assert not bit_pattern(tensor.grad).any()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_from_offsets(device: str) -> None:
    """`total_comp=None` makes as many rows as there are."""
    tensors = tensors_of(make_inputs(PROBLEM, device=device))
    out = compress_thd(*tensors, **SETTINGS)
    assert out.shape == (5, 8)
    assert same(out, compress_thd(*tensors, **SETTINGS, total_comp=7)[:5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", ["", "k", "ksa"])
@pytest.mark.parametrize("problem", [PROBLEM, ROWLESS], ids=str)
def test_opcheck_forward(device: str, grad: str, problem: Problem) -> None:
    """Schema, autograd registration, fake kernel and tracing with symbolic shapes agree with the kernel."""
    tensors = tensors_of(make_inputs(problem, device=device), grad=grad)
    torch.library.opcheck(torch.ops.csa_gate.compress_thd.default, (*tensors, 4, 2, problem.total_comp))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", [PROBLEM, ROWLESS], ids=str)
def test_opcheck_backward(device: str, problem: Problem) -> None:
    """The same for the operator that computes the gradients."""
    inputs = make_inputs(problem, device=device)
    torch.library.opcheck(
        torch.ops.csa_gate.compress_thd_backward.default, (*tensors_of(inputs), inputs.grad_out, 4, 2)
    )


def _alone(*tensors: Tensor, total_comp: int) -> Tensor:
    return compress_thd(*tensors, **SETTINGS, total_comp=total_comp)


def _between(kv: Tensor, *others: Tensor, total_comp: int) -> Tensor:
    return _alone(kv * 1, *others, total_comp=total_comp) * 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_graph(device: str, dynamic: bool) -> None:
    """One graph without breaks, forward and backward, that also serves other lengths and row counts."""
    compiled = torch.compile(_between, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for problem in (PROBLEM, Problem((8, 7), 4, 2, 8)):
        inputs = make_inputs(problem, 2, device=device)
        tensors = tensors_of(inputs, grad="ksa")
        out = compiled(*tensors, total_comp=problem.total_comp)
        out.backward(inputs.grad_out)
        assert_specified(inputs, out, tensors)


@pytest.mark.filterwarnings("ignore")  # inductor has much to say about itself
@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "default"),
        pytest.param("cuda", "default", marks=needs_cuda),
        pytest.param("cuda", "reduce-overhead", marks=needs_cuda),
    ],
)
def test_inductor(device: str, mode: str) -> None:
    """The default backend, and CUDA graph trees, keep the bits; later calls see their own data."""
    # On the CPU the operator alone: its neighbours would take a C++ compiler, and seconds.
    compiled = torch.compile(_alone if device == "cpu" else _between, fullgraph=True, mode=mode)
    for seed in range(3):
        inputs = make_inputs(PROBLEM, seed, device=device)
        tensors = tensors_of(inputs, grad="ksa")
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*tensors, total_comp=7)
        out.backward(inputs.grad_out)
        assert_specified(inputs, out, tensors)


def test_saves_its_inputs_only() -> None:
    """What waits for the backward is the five tensors themselves, no copy and nothing computed."""
    tensors = tensors_of(make_inputs(PROBLEM), grad="ksa")
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        compress_thd(*tensors, **SETTINGS, total_comp=7)
    assert saved == [t.data_ptr() for t in tensors]


def test_input_changed_before_backward() -> None:
    """A saved tensor that was written since is noticed."""
    tensors = tensors_of(make_inputs(PROBLEM), grad="sa")
    out = compress_thd(*tensors, **SETTINGS, total_comp=7)
    tensors[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("grad", ["k", "s", "a", "ka"])
def test_gradients_of_some(grad: str) -> None:
    """Inputs that require no gradient get none, the others the same as ever."""
    inputs = make_inputs(PROBLEM)
    tensors, want = tensors_of(inputs, grad=grad), specified(inputs)
    compress_thd(*tensors, **SETTINGS, total_comp=7).backward(inputs.grad_out)
    for tensor, name in zip(tensors, ("kv", "score", "ape"), strict=False):
        if name[0] in grad:
            assert tensor.grad is not None and same(tensor.grad, getattr(want, f"grad_{name}"))
        else:
            assert tensor.grad is None


def test_strided_gradient() -> None:
    """An incoming gradient may have any strides, like the zeros of a sum's."""
    tensors = tensors_of(make_inputs(PROBLEM), grad="ksa")
    out = compress_thd(*tensors, **SETTINGS, total_comp=7)
    broadcast = torch.autograd.grad(out.sum(), tensors[:3], retain_graph=True)
    written = torch.autograd.grad(out, tensors[:3], torch.ones_like(out))
    assert all(same(a, b) for a, b in zip(broadcast, written, strict=True))


def test_second_derivative() -> None:
    """Differentiating the gradients is refused by name, rather than wrong."""
    tensors = tensors_of(make_inputs(PROBLEM), grad="ksa")
    out = compress_thd(*tensors, **SETTINGS, total_comp=7)
    (gradient,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="compress_thd: its gradients cannot be differentiated again"):
        gradient.sum().backward()


NO_TANGENT = "compress_thd: got a tangent of forward-mode AD, need none: there is no forward-mode derivative"
jvp_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # its first call


def _of(at: int, tensors: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
    """The operator as a function of one of its tensors."""
    return lambda tensor: _alone(*tensors[:at], tensor, *tensors[at + 1 :], total_comp=7)


@jvp_warns
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("grad", ["", "ksa"])
def test_forward_mode(at: int, grad: str) -> None:
    """A tangent is refused by name, rather than lost, in dual numbers and in all that torch.func makes of them."""
    tensors = tensors_of(make_inputs(PROBLEM), grad=grad)
    call, primal, tangent = _of(at, tensors), tensors[at], torch.ones_like(tensors[at])

    def jvp(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        return torch.func.jvp(function, (tensor,), (torch.ones_like(tensor),))[1]

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_TANGENT):
        call(forward_ad.make_dual(primal, tangent))
    for transformed in (
        lambda: jvp(call, primal),
        lambda: jvp(lambda t: torch.func.vmap(call)(t[None]), primal),
        lambda: torch.func.vmap(lambda t: jvp(call, t))(primal[None]),
        lambda: jvp(lambda t: jvp(lambda _: call(t), primal), primal),
        lambda: torch.func.jacfwd(call)(primal),
    ):
        with pytest.raises(NotImplementedError, match=NO_TANGENT):
            transformed()
    assert same(call(primal).detach(), specified(make_inputs(PROBLEM)).out)


@jvp_warns
def test_no_tangent_in_forward_mode() -> None:
    """What forward-mode AD does not differentiate by is taken as ever, and has its gradients."""
    inputs = make_inputs(PROBLEM)
    tensors = tensors_of(inputs, grad="ksa")
    with forward_ad.dual_level():
        out = compress_thd(*tensors, **SETTINGS, total_comp=7)
        out.backward(inputs.grad_out)
    assert_specified(inputs, out, tensors)
    _, tangent = torch.func.jvp(lambda t: t * _of(0, tensors)(tensors[0]).detach(), (out,), (torch.ones_like(out),))
    assert same(tangent.detach(), out.detach())


def test_forward_mode_under_compile() -> None:
    """A compiled call does not lose a tangent either: a graph breaks there, or is refused if it must not."""
    tensors = tensors_of(make_inputs(PROBLEM))
    call, primal = _of(0, tensors), tensors[0]
    for fullgraph, error, text in (
        (False, NotImplementedError, NO_TANGENT),
        (True, torch._dynamo.exc.Unsupported, "compress_thd has no forward-mode derivative"),
    ):
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=fullgraph, backend="aot_eager")
        assert same(compiled(primal), call(primal))
        with forward_ad.dual_level(), pytest.raises(error, match=text):
            compiled(forward_ad.make_dual(primal, torch.ones_like(primal)))
        assert same(compiled(primal), call(primal))


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device: str) -> None:
    """Calls and backward passes in several threads at a time do not disturb each other."""
    packs = [make_inputs(PROBLEM, seed, device=device) for seed in range(4)]
    calls = [tensors_of(inputs, grad="ksa") for inputs in packs]
    results: dict[int, Tensor] = {}
    start = threading.Barrier(len(packs))

    def work(i: int) -> None:
        start.wait()
        results[i] = compress_thd(*calls[i], **SETTINGS, total_comp=7)
        results[i].backward(packs[i].grad_out)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(packs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, inputs in enumerate(packs):
        assert_specified(inputs, results[i], calls[i])


def test_gradcheck() -> None:
    """The gradients are those of the function, as finite differences of it in bf16 see them.

    With a step e on each side, differences of results below 1, each off by at most half an ulp of bf16 there, 2^-9, are
    off by 2^-9 / e. kv enters linearly; in a logit out is a logistic curve of height < 7/4, whose third derivative is
    below 7/32, so that the difference quotient is off by e^2/6 times that. The gradient is below 1, so its own
    rounding is at most 2^-9. fp32 does not count. All inputs and steps are multiples of 2^-6 below 1: exact in bf16.
    """
    step = 2.0**-3
    tolerance = 2.0**-9 / step + step**2 / 6 * 7 / 32 + 2.0**-9
    inputs = make_inputs(Problem((9,), 4, 2, 8))
    generator = torch.Generator().manual_seed(0)
    leaves = [
        (torch.randint(-48, 49, t.shape, generator=generator) / 64).double().requires_grad_()
        for t in (inputs.kv, inputs.score, inputs.ape)
    ]

    def rounded(kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
        tensors = (kv.bfloat16(), score.bfloat16(), ape.float(), inputs.cu_seqlens, inputs.cu_seqlens_comp)
        return compress_thd(*tensors, **SETTINGS, total_comp=2).double()

    assert torch.autograd.gradcheck(rounded, leaves, eps=step, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_algorithms(device: str) -> None:
    """torch's deterministic mode is honoured: nothing is refused, and no bit differs."""
    inputs = make_inputs(PROBLEM, device=device)
    tensors = tensors_of(inputs, grad="ksa")
    torch.use_deterministic_algorithms(True)
    try:
        out = compress_thd(*tensors, **SETTINGS, total_comp=7)
        out.backward(inputs.grad_out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_specified(inputs, out, tensors)


def test_without_values() -> None:
    """Meta and fake tensors give the shape, the dtype and the place of the result and of the gradients."""
    on_meta = tuple(t.to("meta") for t in tensors_of(make_inputs(PROBLEM)))
    out = compress_thd(*on_meta, **SETTINGS, total_comp=6)
    assert (out.shape, out.dtype, out.device.type) == ((6, 8), torch.bfloat16, "meta")
    with FakeTensorMode() as mode:
        for device in DEVICES:
            fake = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in on_meta]
            leaves = [t.requires_grad_() for t in fake[:3]]
            out = compress_thd(*leaves, *fake[3:], **SETTINGS, total_comp=6)
            assert mode.is_our_fake(out)
            assert (out.shape, out.dtype, out.device.type) == ((6, 8), torch.bfloat16, device)
            for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
                assert (gradient.shape, gradient.dtype, gradient.device) == (leaf.shape, leaf.dtype, leaf.device)


@needs_cuda
def test_captured_training_step() -> None:
    """Forward and backward in one CUDA graph, whose replays follow new data."""
    first, second = (make_inputs(PROBLEM, seed, device="cuda") for seed in (0, 1))
    tensors = tensors_of(first, grad="ksa")
    grad_out = first.grad_out.clone()

    def step() -> tuple[Tensor, ...]:
        out = compress_thd(*tensors, **SETTINGS, total_comp=7)
        return out, *torch.autograd.grad(out, tensors[:3], grad_out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for inputs in (second, first):
        with torch.no_grad():
            for tensor, name in zip(tensors, ("kv", "score", "ape"), strict=False):
                tensor.copy_(getattr(inputs, name))
            grad_out.copy_(inputs.grad_out)
        graph.replay()
        want = specified(inputs)
        assert all(same(a.detach(), b) for a, (_, b) in zip(results, want.items(), strict=True))
