"""`fixtures.canary` and `fixtures.run`: stray writes and changed inputs are seen, and named."""

import dataclasses
import re

import pytest
import torch

from csa_gate.fixtures.canary import ALIGN_BYTES, GUARD_BYTES, POISONS, Canary, GuardedInputs, MemoryFault, Snapshot
from csa_gate.fixtures.kernels import Kernel
from csa_gate.fixtures.run import Buffers, run, run_backward, run_forward
from csa_gate.oracles import Contract, Inputs, Problem, make_inputs
from csa_gate.oracles.bits import bit_pattern

PROBLEM = Problem(lens=(9, 3), ratio=4, coff=2, head_dim=8)


def make(problem: Problem = PROBLEM) -> Inputs:
    g = torch.Generator().manual_seed(0)
    shape = (problem.total_tokens, problem.width)
    return Inputs(
        problem=problem,
        kv=torch.randn(shape, generator=g).bfloat16(),
        score=torch.randn(shape, generator=g).bfloat16(),
        ape=torch.randn((problem.ratio, problem.width), generator=g),
        grad_out=torch.randn((problem.total_comp, problem.head_dim), generator=g).bfloat16(),
        cu_seqlens=torch.tensor(problem.cu_seqlens),
        cu_seqlens_comp=torch.tensor(problem.cu_seqlens_comp),
    )


class Sevens:
    """Writes 7 everywhere it should, unless a fault is planted: a function of all its tensors by name."""

    name = "sevens"

    def __init__(self, forward_fault=None, backward_fault=None):
        self.forward_fault, self.backward_fault = forward_fault, backward_fault
        self.seen = {}

    def contract(self, device):
        return Contract()

    def supports(self, problem):
        return None

    def forward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, *, ratio, coff, out):
        self.seen["out"] = out.clone()
        out.fill_(7)
        if self.forward_fault:
            self.forward_fault(locals())

    def backward(
        self, kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, *, ratio, coff, grad_kv, grad_score, grad_ape
    ):
        for tensor in (grad_kv, grad_score, grad_ape):
            tensor.fill_(7)
        if self.backward_fault:
            self.backward_fault(locals())


def stray(name, element, value=7.0):
    """A fault that stores to `element` of the flat tensor `name`, past either end if need be."""

    def fault(tensors):
        tensor = tensors[name]
        start = tensor.storage_offset() + element
        torch.as_strided(tensor, (1,), (1,), start).fill_(value)

    return fault


def test_stand_in_meets_the_protocol():
    """What the tests below run is a kernel."""
    assert isinstance(Sevens(), Kernel)


def test_a_clean_run_returns_what_was_written():
    """A kernel that writes its outputs only passes, and its results come back whole."""
    result = run(Sevens(), make())
    for _, tensor in result.items():
        assert bool((tensor == 7).all())
    assert result.out.shape == (2, 8)
    assert result.grad_ape.dtype == torch.float32


@pytest.mark.parametrize("value", [7.0, 0.0, float("nan")])
@pytest.mark.parametrize(
    ("name", "phase", "element", "what"),
    [
        ("out", "forward", 16, r"out: \d guard bytes past its end were written, the nearest [01] bytes after the end"),
        ("out", "forward", -1, r"out: \d guard bytes before its start were written, the nearest [12] bytes before"),
        ("grad_kv", "backward", 12 * 16, r"grad_kv: \d guard bytes past its end were written, the nearest [01] bytes"),
        (
            "grad_score",
            "backward",
            12 * 16 + 100,
            r"grad_score: \d guard bytes past its end were written, the nearest 20[01] bytes",
        ),
        (
            "grad_ape",
            "backward",
            -3,
            r"grad_ape: \d guard bytes before its start were written, the nearest (9|10|11|12) bytes",
        ),
    ],
)
def test_stray_stores_are_named(name, phase, element, what, value):
    """One element stored outside a buffer raises MemoryFault with phase, buffer, side and byte offset."""
    with pytest.raises(MemoryFault) as caught:
        run(Sevens(**{f"{phase}_fault": stray(name, element, value)}), make())
    message = str(caught.value)
    assert message.startswith(f"contract broken: memory\n{phase} of kernel sevens, {PROBLEM}")
    assert re.search(what, message)
    assert "got 0x" in message


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "element", "value", "where"),
    [
        ("kv", 17, 7.0, "kv: 1 elements of this input were changed, first kv[1, 1]: got 7.0"),
        ("score", 0, 7.0, "first score[0, 0]: got 7.0"),
        ("ape", 63, 7.0, "first ape[3, 15]: got 7.0"),
        ("cu_seqlens", 1, 8, "first cu_seqlens[1]: got 8, need 9"),
        ("cu_seqlens_comp", 2, 3, "first cu_seqlens_comp[2]: got 3, need 2"),
    ],
)
def test_changed_inputs_are_named(phase, name, element, value, where):
    """An input changed by either phase raises MemoryFault with the tensor, the coordinate and both values."""
    with pytest.raises(MemoryFault) as caught:
        run(Sevens(**{f"{phase}_fault": stray(name, element, value)}), make())
    assert where in str(caught.value)
    assert f"{phase} of kernel sevens" in str(caught.value)


@pytest.mark.parametrize(
    ("phase", "name", "change", "words"),
    [
        ("forward", "out", lambda t: t.requires_grad_(), "out: requires_grad of this tensor was changed: got True"),
        ("forward", "out", lambda t: t.unsqueeze_(0), r"out: shape of this tensor was changed: got \(1, "),
        ("backward", "grad_ape", lambda t: t.set_(t.clone()), "grad_ape: data_ptr of this tensor was changed"),
        ("backward", "grad_kv", lambda t: t.t_(), r"grad_kv: shape of this tensor was changed"),
        ("backward", "score", lambda t: t.copy_(t.clone()), "score: this input was written, if with"),
    ],
)
def test_what_tensors_say_of_themselves_stays(phase, name, change, words):
    """A result put elsewhere, in another shape or into a graph; an input written with the bits that it had."""
    with pytest.raises(MemoryFault, match=words):
        run(Sevens(**{f"{phase}_fault": lambda tensors: change(tensors[name])}), make())


def test_input_snapshots_compare_bits():
    """A zero that changed its sign and a NaN that changed its payload are changes; grad_out is watched too."""
    inputs = make()
    inputs.grad_out[0, 0] = 0.0
    snapshot = Snapshot(inputs)
    snapshot.check()
    inputs.grad_out[0, 0] = -0.0
    with pytest.raises(MemoryFault, match=r"grad_out: 1 elements .*first grad_out\[0, 0\]: got -0.0, need 0.0"):
        snapshot.check()
    inputs.grad_out[0, 0] = 0.0
    with pytest.raises(MemoryFault, match="grad_out: this input was written, if with the bits that it had"):
        snapshot.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.requires_grad_(), "requires_grad of this tensor was changed: got True, need False"),
        (lambda t: t.resize_(t.shape[0] - 1, t.shape[1]), r"shape of this tensor was changed: got \(4, 16\)"),
        (lambda t: t.as_strided_(t.shape, (0, 1)), r"stride of this tensor was changed: got \(0, 1\), need \(16, 1\)"),
        (lambda t: t.set_(t.clone()), "data_ptr of this tensor was changed"),
        (lambda t: setattr(t, "grad", torch.zeros_like(t)), "grad of this tensor was changed: got a tensor, need None"),
    ],
)
def test_input_snapshots_compare_what_tensors_say_of_themselves(change, words):
    inputs = make_inputs(Problem((3, 2), 4, 2, 8))
    snapshot = Snapshot(inputs)
    change(inputs.kv)
    with pytest.raises(MemoryFault, match=f"kv: {words}"):
        snapshot.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("poison", "holds"),
    [
        ("nan", lambda t: torch.isnan(t)),
        ("inf", lambda t: torch.isposinf(t)),
        ("aa", lambda t: t.view(torch.uint8) == 0xAA),
        ("zero", lambda t: bit_pattern(t) == 0),
        ("ones", lambda t: t == 1),
    ],
)
def test_poisons_fill_the_payload(dtype, poison, holds):
    """Each poison is in every element before the kernel runs, and filling it touches no guard."""
    canary = Canary("x", (33, 7), dtype, "cpu", poison=poison)
    assert bool(holds(canary.payload).all())
    canary.check()


def test_random_poison_follows_its_seed():
    """Random bytes fill the whole payload, differ between seeds and between buffers, and agree for one seed."""
    first, again, other = (Canary("x", (200, 500), torch.float32, "cpu", poison="random", seed=s) for s in (1, 1, 2))
    bits = bit_pattern(first.payload)
    assert torch.equal(bits, bit_pattern(again.payload))
    assert bool((bits != bit_pattern(other.payload)).float().mean() > 0.99)
    assert len(bits.unique()) > 0.99 * bits.numel() / 2
    buffers = Buffers(PROBLEM, "cpu", poison="random")
    assert not torch.equal(bit_pattern(buffers.result.grad_kv), bit_pattern(buffers.result.grad_score))


@pytest.mark.parametrize("poison", POISONS)
def test_the_kernel_sees_the_chosen_poison(poison):
    """`run` hands over buffers that hold the poison asked for."""
    kernel = Sevens()
    run(kernel, make(), poison=poison, seed=3)
    want = Canary("x", (2, 8), torch.bfloat16, "cpu", poison=poison, seed=3).payload
    assert torch.equal(bit_pattern(kernel.seen["out"]), bit_pattern(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (64, 512)])
def test_alignment_of_payloads(dtype, shape):
    """A payload is aligned to 256 bytes by default, and by `offset` elements off that where asked."""
    assert Canary("x", shape, dtype, "cpu").payload.data_ptr() % ALIGN_BYTES == 0
    shifted = Canary("x", shape, dtype, "cpu", offset=1)
    assert shifted.payload.data_ptr() % ALIGN_BYTES == dtype.itemsize
    assert shifted.payload.is_contiguous()
    shifted.check()
    stray("t", torch.Size(shape).numel())({"t": shifted.payload})
    assert "the nearest 0 bytes after the end" in str(shifted.fault())


def test_guards_reach_as_far_as_promised():
    """A store at either far end of the guards is seen; both guards in one report."""
    canary = Canary("x", (4, 4), torch.float32, "cpu")
    far = GUARD_BYTES // 4
    stray("t", -far)({"t": canary.payload})
    stray("t", 16 + far - 1)({"t": canary.payload})
    fault = str(canary.fault())
    assert f"the nearest {GUARD_BYTES - 3} bytes before the start" in fault
    assert f"the nearest {GUARD_BYTES - 4} bytes after the end" in fault


def test_empty_payloads_are_guarded():
    """A problem without rows has an out of no bytes, and a store to it is seen."""
    problem = Problem(lens=(3,), ratio=4, coff=1, head_dim=8)
    run(Sevens(), make(problem))
    buffers = Buffers(problem, "cpu")
    canary = buffers.canaries["out"]
    canary._storage[canary._start] += 1
    assert buffers.faults() == [canary.fault()]
    assert "out: 1 guard bytes past its end" in str(canary.fault())


def test_reused_buffers_keep_their_contents():
    """Buffers handed in are not poisoned again, and the result is a view of them."""
    buffers = Buffers(PROBLEM, "cpu", poison="ones")
    kernel = Sevens()
    result = run(kernel, make(), buffers=buffers)
    assert result.out.data_ptr() == buffers.result.out.data_ptr()
    run_forward(kernel, make(), buffers)
    assert bool((kernel.seen["out"] == 7).all())
    buffers.poison("zero")
    run_backward(kernel, make(), buffers)
    assert bool((buffers.result.out == 0).all())
    assert bool((buffers.result.grad_ape == 7).all())


def test_narrowed_buffers_guard_the_rest():
    """A shorter call into the same memory may not touch what the longer one left behind its end."""
    small = Problem(lens=(5,), ratio=4, coff=2, head_dim=8)
    buffers = Buffers(PROBLEM, "cpu")
    run(Sevens(), make(), buffers=buffers)
    part = buffers.narrow(small)
    assert part.result.grad_kv.shape == (5, 16)
    assert part.result.grad_kv.data_ptr() == buffers.result.grad_kv.data_ptr()
    run(Sevens(), make(small), buffers=part)
    with pytest.raises(MemoryFault, match="grad_kv: 2 guard bytes past its end were written, the nearest 14 bytes"):
        run(Sevens(backward_fault=stray("grad_kv", 5 * 16 + 7, 8.0)), make(small), buffers=part)
    with pytest.raises(ValueError, match=r"shape: got \(2, 8\), 16 elements, need at most 8"):
        part.narrow(dataclasses.replace(PROBLEM, lens=(9,)))


def test_shifted_inputs():
    """The copy holds the same bits, contiguous, off 4-byte (bf16) or 8-byte (fp32, int32) alignment."""
    inputs = make()
    inputs.kv[0, 0] = -0.0
    shifted = GuardedInputs(inputs, 1).inputs
    assert shifted.problem is inputs.problem
    for field in dataclasses.fields(Inputs):
        before, after = getattr(inputs, field.name), getattr(shifted, field.name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before.contiguous().view(torch.uint8), after.view(torch.uint8))
            assert after.is_contiguous()
            assert after.storage_offset() % 2 == 1
            assert after.data_ptr() % (2 * after.element_size()) == after.element_size()
            assert after.data_ptr() != before.data_ptr()


def test_bad_arguments():
    """Wrong names, offsets and foreign buffers raise ValueError with what came and what is needed."""
    with pytest.raises(ValueError, match="poison: got 'arsenic', need one of nan, inf"):
        Canary("x", (1,), torch.float32, "cpu", poison="arsenic")
    with pytest.raises(ValueError, match="offset: got -1"):
        Canary("x", (1,), torch.float32, "cpu", offset=-1)
    other = Problem(lens=(8,), ratio=4, coff=2, head_dim=8)
    with pytest.raises(
        ValueError, match=r"buffers: got buffers of Problem\(lens=\(8,\).*need those of Problem\(lens=\(9"
    ):
        run(Sevens(), make(), buffers=Buffers(other, "cpu"))


def test_empty_inputs_from_numpy_are_no_fault() -> None:
    """A problem without rows has empty tensors, which NumPy gives strides of its own."""
    Snapshot(make_inputs(Problem((3, 2), 4, 2, 8))).check()
