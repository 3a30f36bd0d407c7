"""Malformed arguments of the oracles, the judge and what they stand on: a ValueError that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from csa_gate.oracles import (
    NUMERICS,
    Contract,
    Inputs,
    Problem,
    Result,
    compare,
    eager,
    error_bound,
    fp64,
    judge,
    make_inputs,
    mp,
    ordered,
    parse_problem,
)
from csa_gate.oracles.bits import same_bits

PROBLEM = Problem((5, 2), ratio=2, coff=2, head_dim=3, row_capacity=4)
INPUTS = make_inputs(PROBLEM)
RESULT = ordered(INPUTS, exp="portable")
CONTRACT = Contract(forward_bits="portable", zero_slots=True)
ORACLES: tuple[Callable[..., Result], ...] = (mp, fp64, eager, ordered, error_bound)
OTHERS: list[Any] = [None, 4, "inputs", [INPUTS], PROBLEM, torch.zeros(3)]
NO_INTEGERS: list[Any] = [True, np.True_, 4.0, np.float64(4), "4", None, [4], torch.tensor(4), -1]


def refuses(text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call raises ValueError, and the same oracle gives the same bits as ever right after."""
    with pytest.raises(ValueError, match=f"^{text}"):
        call(*args, **kwargs)
    assert same_bits(ordered(INPUTS, exp="portable").out, RESULT.out)
    assert judge(CONTRACT, INPUTS, RESULT)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
@pytest.mark.parametrize("bad", OTHERS, ids=lambda bad: type(bad).__name__)
def test_no_inputs(oracle: Callable[..., Result], bad: Any) -> None:
    refuses(rf"inputs: got {type(bad).__name__}, need csa_gate\.oracles\.Inputs", oracle, bad)


SETTINGS: list[tuple[Callable[..., Any], str, Any, str]] = [
    *((oracle, "output_dtype", bad, r"output_dtype: got .+, need one of torch\.bfloat16, torch\.float32")
      for oracle in (mp, eager, ordered, error_bound) for bad in (torch.float16, "bfloat16", None, [torch.bfloat16])),
    *((oracle, "chunk_bytes", bad, "chunk_bytes: got .+, need an integer >= 1")
      for oracle in (fp64, error_bound) for bad in (0, *NO_INTEGERS)),
    *((ordered, "exp", bad, r"exp: got .+, need one of native, portable") for bad in ("fast", None, ["native"], 1)),
    *((eager, "numerics", bad, r"numerics: got .+, need a Numerics or one of fp32, ") for bad in ("fp8", None, 1, [])),
]  # fmt: skip


@pytest.mark.parametrize(("oracle", "name", "bad", "text"), SETTINGS)
def test_settings_of_oracles(oracle: Callable[..., Any], name: str, bad: Any, text: str) -> None:
    refuses(text, oracle, INPUTS, **{name: bad})


@pytest.mark.parametrize("bad", [None, 4, "result", [RESULT], INPUTS, RESULT.out], ids=lambda bad: type(bad).__name__)
def test_no_result(bad: Any) -> None:
    refuses(r"result: got \w+, need csa_gate\.oracles\.Result", judge, CONTRACT, INPUTS, bad)
    refuses(r"got: got \w+, need csa_gate\.oracles\.Result", compare, "deterministic", INPUTS, RESULT, bad)
    refuses(r"want: got \w+, need csa_gate\.oracles\.Result", compare, "deterministic", INPUTS, bad, RESULT)


@pytest.mark.parametrize("bad", [None, {"zero_slots": True}, "zero_slots", INPUTS], ids=lambda bad: type(bad).__name__)
def test_no_contract(bad: Any) -> None:
    refuses(r"contract: got \w+, need csa_gate\.oracles\.Contract", judge, bad, INPUTS, RESULT)


@pytest.mark.parametrize("bad", OTHERS, ids=lambda bad: type(bad).__name__)
def test_judge_without_inputs(bad: Any) -> None:
    refuses(r"inputs: got \w+, need csa_gate\.oracles\.Inputs", judge, CONTRACT, bad, RESULT)
    refuses(r"inputs: got \w+, need csa_gate\.oracles\.Inputs", compare, "deterministic", bad, RESULT, RESULT)


def without_memory(good: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
    """Tensors that are like this one but for what lies behind them, and what is said of each."""
    freed, part, short = good.clone(), torch.stack([good] * 2)[1], good.clone()
    for tensor in (freed, part):
        tensor.untyped_storage().resize_(0)
    short.untyped_storage().resize_(good.nbytes - 1)
    fake = FakeTensorMode().from_tensor(good)
    return [
        (freed, rf"got a storage of 0 bytes for {good.nbytes}, need a strided tensor with memory"),
        (part, rf"got a storage of 0 bytes for {2 * good.nbytes}, need a strided tensor with memory"),
        (short, rf"got a storage of {good.nbytes - 1} bytes for {good.nbytes}, need a strided tensor with memory"),
        (fake, "got a FakeTensor, need a strided tensor with memory"),
        (torch._efficientzerotensor(good.shape, dtype=good.dtype), "got a Tensor that wraps others or has no memory"),
        (TwoTensor(good, good), "got a TwoTensor that wraps others or has no memory of its own, need a strided"),
        (torch.nested.nested_tensor([good]), "got a nested tensor, need a strided tensor with memory"),
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("output", [field.name for field in fields(Result)])
def test_results_that_do_not_fit(output: str) -> None:
    good = getattr(RESULT, output)
    dtype = "torch.float32" if output == "grad_ape" else "torch.bfloat16"
    for bad, text in (
        (None, "got NoneType, need a torch.Tensor"),
        (good.tolist(), "got list, need a torch.Tensor"),
        (good.float().numpy(), "got ndarray, need a torch.Tensor"),
        (good[1:], rf"got shape .+, need \({good.shape[0]}, {good.shape[1]}\)"),
        (good[None], rf"got shape .+, need \({good.shape[0]}, {good.shape[1]}\)"),
        (good.double(), f"got dtype torch.float64, need {dtype}"),
        (good.to("meta"), "got device meta, need cpu"),
        *without_memory(good),
    ):
        spoiled = replace(RESULT, **{output: bad})
        refuses(f"result.{output}: {text}", judge, CONTRACT, INPUTS, spoiled)
        refuses(f"got.{output}: {text}", compare, "replay", INPUTS, RESULT, spoiled)
        refuses(f"want.{output}: {text}", compare, "replay", INPUTS, spoiled, RESULT)


@pytest.mark.parametrize("bad", ["zero_slots", 4, True])
def test_clauses_that_are_no_collection(bad: Any) -> None:
    refuses(r"clauses: got .+, need a collection of names", judge, CONTRACT, INPUTS, RESULT, clauses=bad)
    refuses(r"outputs: got .+, need a collection of names", compare, "replay", INPUTS, RESULT, RESULT, outputs=bad)


@pytest.mark.parametrize("bad", ["speed", None, 4, ["replay"]])
def test_names_that_are_no_clause(bad: Any) -> None:
    refuses(r"clauses: got .+, need some of forward_bits, ", judge, CONTRACT, INPUTS, RESULT, clauses=[bad])
    refuses(r"clause: got .+, need one of forward_bits, ", compare, bad, INPUTS, RESULT, RESULT)
    refuses(r"outputs: got .+, need some of out, ", compare, "replay", INPUTS, RESULT, RESULT, outputs=[bad])
    refuses(r"clause: got .+, need one of forward_bits, ", CONTRACT.claims, bad)


@pytest.mark.parametrize("name", ["rows", "tokens"])
@pytest.mark.parametrize("bad", [0, "all", (0, 3), slice(0, 4, 2), slice(None, None, -1)], ids=str)
def test_parts_that_are_no_slice(name: str, bad: Any) -> None:
    refuses(rf"{name}: got .+, need a slice of step 1", compare, "replay", INPUTS, RESULT, RESULT, **{name: bad})


@pytest.mark.parametrize("bad", OTHERS[:-2], ids=lambda bad: type(bad).__name__)
def test_no_problem(bad: Any) -> None:
    refuses(r"problem: got \w+, need csa_gate\.oracles\.Problem", make_inputs, bad)
    tensors = {field.name: getattr(INPUTS, field.name) for field in fields(Inputs)}
    refuses(r"problem: got \w+, need csa_gate\.oracles\.Problem", Inputs, **tensors | {"problem": bad})


@pytest.mark.parametrize("bad", [None, 4, b"Problem()", [PROBLEM]], ids=str)
def test_no_text_of_a_problem(bad: Any) -> None:
    refuses(r"problem: got .+, need Problem\(lens=", parse_problem, bad)


@pytest.mark.parametrize("bad", ["gauss", None, 4, ["normal"]], ids=str)
def test_no_distribution(bad: Any) -> None:
    refuses("distribution: got .+, need one of normal, wide", make_inputs, PROBLEM, 0, bad)


@pytest.mark.parametrize("bad", [None, "tpu", "meta", 1.5, ["cpu"], "cuda:99"], ids=str)
def test_no_device(bad: Any) -> None:
    refuses(r"device: got .+, need cpu, or one of this machine's \d+ cuda", make_inputs, PROBLEM, device=bad)


@pytest.mark.parametrize("name", ["ratio", "coff", "head_dim", "row_capacity", "token_capacity"])
@pytest.mark.parametrize("bad", NO_INTEGERS, ids=repr)
def test_numbers_of_a_problem(name: str, bad: Any) -> None:
    """None is a capacity, and no other number."""
    good = {field.name: getattr(PROBLEM, field.name) for field in fields(Problem)}
    if bad is None and name.endswith("capacity"):
        assert getattr(Problem(**good | {name: None}), name) is None
    else:
        refuses(rf"{name}: got .+, need an integer >= [01]", Problem, **good | {name: bad})


@pytest.mark.parametrize(
    "bad",
    [None, 4, "55", b"52", bytearray(b"52"), memoryview(b"52"), {5, 2}, np.array([5, 2]), torch.tensor([5, 2])],
    ids=lambda bad: type(bad).__name__,
)
def test_lengths_of_a_problem(bad: Any) -> None:
    refuses(r"lens: got .+, need a sequence of segment lengths", Problem, bad, 2, 2, 3)
    refuses(r"lens\[1\]: got .+, need an integer >= 0", Problem, (5, -1), 2, 2, 3)
    refuses(r"lens\[0\]: got 5\.0, need an integer >= 0", Problem, (5.0, 2), 2, 2, 3)


def test_numbers_of_numpy() -> None:
    """NumPy's integers are as good as Python's, and come out as Python's."""
    for kind in (np.int64, np.uint8, np.int16):
        problem = Problem([kind(5), kind(2)], kind(2), kind(2), kind(3), row_capacity=kind(4), token_capacity=kind(7))
        assert repr(problem) == repr(replace(PROBLEM, token_capacity=7))
        inputs = make_inputs(PROBLEM, kind(0))
        assert type(inputs.seed) is int and same_bits(inputs.kv, INPUTS.kv)
        assert torch.equal(fp64(INPUTS, chunk_bytes=kind(99)).out, fp64(INPUTS).out)
        assert torch.equal(error_bound(INPUTS, chunk_bytes=kind(99)).out, error_bound(INPUTS).out)


TENSORS = [field.name for field in fields(Inputs) if isinstance(getattr(INPUTS, field.name), torch.Tensor)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_without_values(name: str) -> None:
    """On meta, one of them or all; sparse; of another dtype, rank or type."""
    good = getattr(INPUTS, name)
    for bad, text in (
        (None, "got NoneType, need a torch.Tensor"),
        (good.tolist(), "got list, need a torch.Tensor"),
        (good[None], r"got shape \(1, .+\), need \("),
        (good.double(), "got dtype torch.float64, need torch."),
        (good.to_sparse(), "got layout torch.sparse_coo, need a strided tensor with memory"),
        *without_memory(good),
    ):
        refuses(f"{name}: {text}", replace, INPUTS, **{name: bad})
    where = "kv: got device meta, need a strided" if name == "kv" else f"{name}: got device meta, need cpu, where kv is"
    refuses(where, replace, INPUTS, **{name: good.to("meta")})
    on_meta = {n: getattr(INPUTS, n).to("meta") for n in TENSORS}
    refuses("kv: got device meta, need a strided tensor with memory", replace, INPUTS, **on_meta)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_inside_a_transform(transform: Any) -> None:
    """torch.func hands wrappers to what it transforms."""

    def inside(kv: torch.Tensor) -> torch.Tensor:
        refuses("kv: got a Tensor that wraps others or has no memory of its own", replace, INPUTS, kv=kv)
        return kv.sum()

    transform(inside)(INPUTS.kv[None] if transform is torch.func.vmap else INPUTS.kv)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_inference_mode(oracle: Callable[..., Result]) -> None:
    """In torch's inference mode, on tensors made there and outside of it, and on those outside: the same values."""
    want = oracle(INPUTS)
    with torch.inference_mode():
        inputs = make_inputs(PROBLEM)
        results = [oracle(inputs), oracle(INPUTS)]
    for result in (*results, oracle(inputs)):
        for name, tensor in result.items():
            assert not tensor.requires_grad, name
            assert torch.equal(*(t.view(torch.uint8) for t in (tensor, getattr(want, name)))), name


@pytest.mark.parametrize("numerics", NUMERICS)
def test_eager_in_inference_mode(numerics: str) -> None:
    """Whatever tensors are used as they came, such as a bf16 gradient of bf16 products."""
    want = eager(INPUTS, numerics=numerics)
    with torch.inference_mode():
        inputs = make_inputs(PROBLEM)
        got = eager(inputs, numerics=numerics)
    assert all(same_bits(tensor, getattr(want, name)) for name, tensor in got.items())


def test_judge_in_inference_mode() -> None:
    """Tensors made there are judged by what they hold, also after they were written."""
    contract = Contract(forward_bits="portable", gradient_bits="eager", dape_accuracy=True, error_bound=True)
    with torch.inference_mode():
        inputs = make_inputs(PROBLEM)
        result = ordered(inputs, exp="portable")
        assert judge(contract, inputs, result)
        inputs.kv.neg_()
        assert not judge(contract, inputs, result)
        assert judge(contract, inputs, ordered(inputs, exp="portable"))


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_any_strides_and_leaves(oracle: Callable[..., Result]) -> None:
    """Inputs that are strided, leaves of an autograd graph or negated when read give the same values, of no graph."""
    want = oracle(INPUTS)
    strided = {n: torch.stack([getattr(INPUTS, n)] * 2, -1)[..., 0] for n in TENSORS}
    leaves = {n: getattr(INPUTS, n).clone().requires_grad_() for n in ("kv", "score", "ape", "grad_out")}
    negated = {n: torch._neg_view(-getattr(INPUTS, n)) for n in TENSORS}
    for tensors in (strided, leaves, negated):
        for name, tensor in oracle(replace(INPUTS, **tensors)).items():
            assert not tensor.requires_grad, name
            assert torch.equal(*(t.view(torch.uint8) for t in (tensor, getattr(want, name)))), name
