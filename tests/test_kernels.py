"""Naming, loading and checking kernels, and the eager adapter. `tests/test_plugin.py` has the messages of the gate."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch

from csa_gate.fixtures.kernels import (
    ADAPTERS,
    Kernel,
    KernelError,
    check_kernel,
    choose_device,
    contract_on,
    load_kernel,
    make_kernel,
    require_device,
)
from csa_gate.fixtures.marks import clause
from csa_gate.oracles import CLAUSES, Contract, Problem, Result
from csa_gate.oracles.bits import bit_pattern
from csa_gate.oracles.distributions import make_inputs
from csa_gate.oracles.eager import eager

CPU = torch.device("cpu")


class Complete:
    """Meets the protocol; every fault below takes one thing away."""

    name = "complete"

    def contract(self, device):
        return Contract(memory=True) if device.type == "cpu" else None

    def supports(self, problem):
        return None

    def forward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, *, ratio, coff, out):
        pass

    def backward(self, *inputs, ratio, coff, **gradients):
        pass


def altered(**changes):
    return type("Altered", (Complete,), changes)()


@pytest.mark.parametrize("found", [Complete(), Complete, lambda: Complete()], ids=["instance", "class", "factory"])
def test_what_makes_a_kernel(found):
    """An instance is taken as it is; a class and a function are called."""
    kernel = make_kernel(found, "it")
    assert isinstance(kernel, Complete) and isinstance(kernel, Kernel)
    if isinstance(found, Complete):
        assert kernel is found


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (None, "it: a NoneType with name = None, need a non-empty string"),
        (Complete, "it: got the class Complete, need an instance of it"),
        (altered(name=""), "it: a Altered with name = '', need a non-empty string"),
        (altered(name=3), "it: a Altered with name = 3, need a non-empty string"),
        (altered(contract=Contract()), "it: Altered has no method 'contract'"),
        (altered(supports=None), "it: Altered has no method 'supports'"),
        (altered(forward=None), "it: Altered has no method 'forward'"),
        (
            altered(supports=lambda self: None),
            "it: supports() must take 1 positional arguments: too many positional arguments",
        ),
        (
            altered(backward=lambda self, *inputs, ratio, coff, grad_kv, grad_score: None),
            "it: backward() must take 6 positional arguments, ratio=, coff=, grad_kv=, grad_score=, grad_ape=: "
            "got an unexpected keyword argument 'grad_ape'",
        ),
    ],
)
def test_what_is_no_kernel(candidate, message):
    """One line says what is missing; what a signature does not allow is found before a suite runs into it."""
    with pytest.raises(KernelError) as error:
        check_kernel(candidate, "it")
    assert str(error.value) == message


def test_compiled_methods_pass():
    """A method that tells no signature is taken at its word."""
    assert check_kernel(altered(contract=dict.fromkeys, supports=iter), "it").name == "complete"


def test_file_with_neighbours(tmp_path, monkeypatch):
    """A file may hold dataclasses and import its neighbours; dots lead into what it holds."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "neighbour_of_a_kernel.py").write_text("name = 'from the neighbour'\n")
    (tmp_path / "a kernel.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from csa_gate.fixtures.adapters.eager import EagerKernel\n"
        "import neighbour_of_a_kernel\n"
        "class Here:\n"
        "    @dataclass\n"
        "    class K(EagerKernel):\n"
        "        name: str = neighbour_of_a_kernel.name\n"
    )
    assert load_kernel(f"{tmp_path}/a kernel.py:Here.K").name == "from the neighbour"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax (bad.py, line 1)"),
        ("raise OSError('one\\n  two')", "OSError: one two"),
        (None, "FileNotFoundError: [Errno 2] No such file or directory: '{folder}/bad.py'"),
    ],
)
def test_file_that_cannot_be_imported(tmp_path, monkeypatch, text, message):
    """The message is one line whatever the error's was; the error itself is its cause."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    with pytest.raises(KernelError) as error:
        load_kernel("bad.py:kernel")
    assert str(error.value) == f"kernel 'bad.py:kernel': importing bad.py failed: {message.format(folder=tmp_path)}"
    assert type(error.value.__cause__).__name__ == message.partition(":")[0]


def test_module_that_is_a_file(tmp_path, monkeypatch):
    """Whoever names a file of the working directory as a module is told how to name it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file_here.py").touch()
    with pytest.raises(KernelError, match=r"\(for the file here, write a_file_here\.py:attr\)$"):
        load_kernel("a_file_here:kernel")


@pytest.mark.parametrize("spec", ["", "fusd", ":kernel", "csa_gate.fixtures:", None, 4])
def test_names_nothing(spec):
    """What is neither a name nor source:attr is answered with what there is."""
    with pytest.raises(KernelError, match=f"^kernel {spec!r}: need {', '.join(ADAPTERS)}, package.module:attr or"):
        load_kernel(spec)


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (
            lambda self, device: {},
            "kernel 'complete': contract(cpu) returned dict, need csa_gate.oracles.Contract or None",
        ),
        (lambda self, device: 1 / 0, "kernel 'complete': contract(cpu) failed: ZeroDivisionError: division by zero"),
    ],
)
def test_contract_that_is_none(contract, message):
    """Only a Contract or None is a claim."""
    with pytest.raises(KernelError) as error:
        contract_on(altered(contract=contract), CPU)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("wanted", "present", "runs_on", "chosen"),
    [
        ("auto", False, "cpu cuda", "cpu"),
        ("auto", True, "cpu cuda", "cuda"),
        ("auto", True, "cpu", "cpu"),
        ("auto", True, "cuda", "cuda"),
        ("cpu", True, "cpu cuda", "cpu"),
        ("cuda", True, "cuda", "cuda"),
        ("auto", True, "", "kernel 'complete' does not run on cuda or cpu"),
        ("auto", False, "cuda", "kernel 'complete' does not run on cpu"),
        ("cpu", True, "cuda", "kernel 'complete' does not run on cpu"),
        ("cuda", True, "cpu", "kernel 'complete' does not run on cuda"),
        ("cuda", False, "cuda", "device 'cuda': torch sees no CUDA device"),
        ("gpu", True, "cuda", "device: got 'gpu', need auto, cpu or cuda"),
    ],
)
def test_choice_of_device(monkeypatch, wanted, present, runs_on, chosen):
    """`auto` prefers cuda where there is one and the kernel runs there; what cannot be had is an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    kernel = altered(contract=lambda self, device: Contract() if device.type in runs_on.split() else None)
    if chosen in ("cpu", "cuda"):
        assert choose_device(wanted, kernel) == torch.device(*{"cpu": ("cpu",), "cuda": ("cuda", 3)}[chosen])
        require_device(wanted)
    else:
        with pytest.raises(KernelError) as error:
            choose_device(wanted, kernel)
        assert str(error.value) == chosen


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_load(name):
    """Every name leads to a kernel of that name, which claims something on the CPU."""
    kernel = load_kernel(name)
    assert kernel.name == name
    contract = contract_on(kernel, CPU)
    assert contract is not None and any(contract.claims(c) for c in CLAUSES)


@pytest.mark.parametrize(("ratio", "coff"), list(product((2, 4), (1, 2))))
def test_eager_adapter(ratio, coff):
    """From bare tensors it finds the problem again, empty segments and capacities included: the bits of eager."""
    problem = Problem((9, 0, 1, 5, 8), ratio, coff, 6, row_capacity=16, token_capacity=31)
    inputs = make_inputs(problem, seed=5)
    kernel, want = load_kernel("eager"), eager(inputs)
    got = Result(**{name: torch.full_like(tensor, torch.nan) for name, tensor in want.items()})
    tensors = (inputs.kv, inputs.score, inputs.ape, inputs.cu_seqlens, inputs.cu_seqlens_comp)
    assert kernel.supports(problem) is None
    kernel.forward(*tensors, ratio=ratio, coff=coff, out=got.out)
    gradients = {name: tensor for name, tensor in got.items() if name != "out"}
    kernel.backward(*tensors, inputs.grad_out, ratio=ratio, coff=coff, **gradients)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        assert torch.equal(bit_pattern(a), bit_pattern(b)), name


def test_eager_claims():
    """The bits are claimed on CUDA alone; nothing is claimed that PyTorch leaves open."""
    kernel = load_kernel("eager")
    on_cpu, on_cuda = kernel.contract(CPU), kernel.contract(torch.device("cuda"))
    assert on_cpu is not None and on_cuda is not None
    assert on_cpu.forward_bits is on_cpu.gradient_bits is None
    assert on_cuda.forward_bits == on_cuda.gradient_bits == "eager"
    for contract in (on_cpu, on_cuda):
        assert not (contract.dape_bits or contract.dape_deterministic or contract.graph_replay)


def test_clause_marker():
    """The marker is that of the plugin; a name that is no clause is an error where it is written."""
    assert clause("memory").mark.args == ("memory",)
    with pytest.raises(ValueError, match="clause: got 'memry', need one of forward_bits, "):
        clause("memry")
