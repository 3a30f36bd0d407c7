"""The first API of the fused kernels: every malformed argument is named, and nothing is written then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from csa_gate.fused import compress_backward, compress_forward
from csa_gate.fused.config import orders
from csa_gate.oracles import Problem
from csa_gate.oracles.bits import bit_pattern
from csa_gate.oracles.distributions import make_inputs
from csa_gate.oracles.orders import MANY_ROWS, pool_lanes, softmax_lanes

PROBLEM = Problem((9, 3), ratio=4, coff=2, head_dim=6, row_capacity=3)


def forward_arguments(problem: Problem = PROBLEM) -> dict[str, Any]:
    """Valid keyword arguments of `compress_forward`, out poisoned."""
    inputs = make_inputs(problem)
    names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
    out = torch.full((problem.total_comp, problem.head_dim), float("nan"), dtype=torch.bfloat16)
    return {n: getattr(inputs, n) for n in names} | {"ratio": problem.ratio, "coff": problem.coff, "out": out}


def backward_arguments(problem: Problem = PROBLEM) -> dict[str, Any]:
    """Valid keyword arguments of `compress_backward`, the gradients poisoned."""
    arguments = forward_arguments(problem)
    del arguments["out"]
    poisoned = {f"grad_{n}": torch.full_like(arguments[n], float("nan")) for n in ("kv", "score", "ape")}
    return arguments | {"grad_out": make_inputs(problem).grad_out} | poisoned


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def _misaligned(t: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(t.numel() * t.itemsize + 1), dtype=t.dtype, offset=1).view(t.shape)


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("kv", lambda t: t.float(), r"kv: got dtype torch\.float32, need torch\.bfloat16"),
    ("kv", lambda t: t[None], r"kv: got shape \(1, 12, 12\), need 2 dimensions"),
    ("kv", lambda t: t[:, :11].contiguous(), r"kv: got 11 columns, need a positive multiple of coff = 2"),
    ("kv", lambda t: t.tolist(), r"kv: got list, need a torch\.Tensor"),
    ("kv", _strided, r"kv: got strides \(24, 2\), need contiguous ones"),
    ("kv", lambda t: t.to("meta"), r"kv: got device meta, need cpu or cuda"),
    ("score", lambda t: t.half(), r"score: got dtype torch\.float16, need torch\.bfloat16"),
    ("score", lambda t: t[1:], r"score: got shape \(11, 12\), need \(12, 12\)"),
    ("score", lambda t: t.to("meta"), r"score: got device meta, need cpu, where kv is"),
    ("ape", lambda t: t.bfloat16(), r"ape: got dtype torch\.bfloat16, need torch\.float32"),
    ("ape", lambda t: t[1:], r"ape: got shape \(3, 12\), need \(4, 12\)"),
    ("ape", _misaligned, r"ape: got address 0x[0-9a-f]+, need one aligned to 4 bytes"),
    ("ape", lambda t: None, r"ape: got NoneType, need a torch\.Tensor"),
    ("cu_seqlens", lambda t: t.long(), r"cu_seqlens: got dtype torch\.int64, need torch\.int32"),
    ("cu_seqlens", lambda t: t[:0], r"cu_seqlens: got 0 offsets, need the number of segments \+ 1"),
    ("cu_seqlens", lambda t: t[None], r"cu_seqlens: got shape \(1, 3\), need 1 dimensions"),
    ("cu_seqlens_comp", lambda t: t[1:], r"cu_seqlens_comp: got shape \(2,\), need \(3,\)"),
    ("cu_seqlens", lambda t: t + 1, r"cu_seqlens\[0\]: got 1, need 0"),
    ("cu_seqlens", lambda t: t * 1000, r"cu_seqlens\[-1\]: got 12000, need at most 12"),
    (
        "cu_seqlens",
        lambda t: t.flip(0) * 0 + torch.tensor([0, 9, 8], dtype=torch.int32),
        r"got -1 tokens and 0 rows in segment 1",
    ),
    ("cu_seqlens_comp", lambda t: t * 9, r"cu_seqlens_comp\[-1\]: got 18, need at most 3"),
    ("cu_seqlens_comp", lambda t: t // 2, r"got 9 tokens and 1 rows in segment 0, need 2 rows of 4 tokens"),
    ("coff", lambda c: 2.0, r"coff: got 2\.0, need 1 or 2"),
    ("ratio", lambda r: 0, r"ratio: got 0, need an integer from 1 to 256"),
    ("ratio", lambda r: 257, r"ratio: got 257, need an integer from 1 to 256"),
    ("ratio", lambda r: 4.0, r"ratio: got 4\.0, need an integer from 1 to 256"),
    ("coff", lambda c: 3, r"coff: got 3, need 1 or 2"),
    ("exp", lambda e: "fast", r"exp: got 'fast', need 'native' or 'portable'"),
    ("exp", lambda e: "native", r"exp: got 'native' for tensors on cpu, need 'portable' there"),
]
BAD_FORWARD = [
    ("out", lambda t: t[:, :5], r"out: got shape \(3, 5\), need \(3, 6\)"),
    ("out", lambda t: t.float(), r"out: got dtype torch\.float32, need torch\.bfloat16"),
    ("out", lambda t: t[0], r"out: got shape \(6,\), need 2 dimensions"),
]
BAD_BACKWARD = [
    ("grad_out", lambda t: t[:, 1:], r"grad_out: got shape \(3, 5\), need \(3, 6\)"),
    ("grad_kv", lambda t: t[1:], r"grad_kv: got shape \(11, 12\), need \(12, 12\)"),
    ("grad_score", _strided, r"grad_score: got strides \(24, 2\), need contiguous ones"),
    ("grad_ape", lambda t: t.double(), r"grad_ape: got dtype torch\.float64, need torch\.float32"),
]


def _ids(table: list[tuple[str, Any, str]]) -> list[str]:
    return [text.replace("\\", "") for _, _, text in table]


def _is_refused(call: Callable[..., Any], arguments: dict[str, Any], name: str, spoil: Any, text: str) -> None:
    before = {
        n: bit_pattern(t).clone() for n, t in arguments.items() if isinstance(t, Tensor) and t.is_floating_point()
    }
    with pytest.raises(ValueError, match=text):
        call(**arguments | {name: spoil(arguments.get(name))})
    for n, pattern in before.items():
        assert torch.equal(bit_pattern(arguments[n]), pattern), f"{n} was written"


@pytest.mark.parametrize(("name", "spoil", "text"), BAD + BAD_FORWARD, ids=_ids(BAD + BAD_FORWARD))
def test_forward_refuses(name: str, spoil: Any, text: str) -> None:
    """A malformed argument raises ValueError with what came and what is needed; no buffer is touched."""
    _is_refused(compress_forward, forward_arguments(), name, spoil, text)


@pytest.mark.parametrize(("name", "spoil", "text"), BAD + BAD_BACKWARD, ids=_ids(BAD + BAD_BACKWARD))
def test_backward_refuses(name: str, spoil: Any, text: str) -> None:
    """The same for backward."""
    _is_refused(compress_backward, backward_arguments(), name, spoil, text)


def test_padding_rows_need_a_block() -> None:
    """Rows that can only be padding pool tokens [0, ratio), which must exist."""
    arguments = forward_arguments()
    short = {n: arguments[n][:3] for n in ("kv", "score")}
    with pytest.raises(ValueError, match=r"kv: got 3 tokens, need at least ratio = 4: the 3 rows of out"):
        compress_forward(**arguments | short)


def test_too_many_elements() -> None:
    """Flat offsets are int32; a larger tensor is refused before anything else looks at it."""
    arguments = forward_arguments()
    huge = torch.empty(1, dtype=torch.bfloat16).expand(2**28, 12)
    with pytest.raises(ValueError, match=r"kv: got 3221225472 elements, need at most 2147483647 \(int32 offsets\)"):
        compress_forward(**arguments | {"kv": huge})


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_elements_at_the_limit(call: str) -> None:
    """One more than int32 offsets reach is too many; the last that they reach is a matter of the other arguments."""
    compress = compress_forward if call == "forward" else compress_backward
    arguments = (forward_arguments() if call == "forward" else backward_arguments()) | {"coff": 1}
    one = torch.empty(1, dtype=torch.bfloat16)
    rows = "out" if call == "forward" else "grad_out"
    for name in ("kv", rows):
        with pytest.raises(ValueError, match=rf"{name}: got 2147483648 elements, need at most 2147483647"):
            compress(**arguments | {name: one.expand(2**31, 1)})  # type: ignore[operator]
        with pytest.raises(ValueError) as error:
            compress(**arguments | {name: one.expand(2**31 - 1, 1)})  # type: ignore[operator]
        assert "elements" not in str(error.value)


def test_results_are_the_buffers() -> None:
    """Both calls return the buffers they wrote."""
    forward, backward = forward_arguments(), backward_arguments()
    assert compress_forward(**forward) is forward["out"]
    assert all(
        a is backward[n]
        for a, n in zip(compress_backward(**backward), ("grad_kv", "grad_score", "grad_ape"), strict=True)
    )
    assert not torch.isnan(forward["out"]).any()
    assert not any(torch.isnan(backward[f"grad_{n}"]).any() for n in ("kv", "score", "ape"))


def test_inputs_that_require_grad() -> None:
    """Leaves of an autograd graph are taken as they are."""
    arguments = forward_arguments()
    plain = compress_forward(**arguments).clone()
    arguments["kv"].requires_grad_()
    assert torch.equal(bit_pattern(compress_forward(**arguments)), bit_pattern(plain))


@pytest.mark.parametrize("head_dim", [1, 2, 3, 8, 16, 33, 60, 63, 64, 65, 66, 68, 128, 130, 512])
def test_orders_agree_with_the_oracles(head_dim: int) -> None:
    """The kernels' table of summation orders, written apart from the oracles', says the same of every shape."""
    for window in range(1, 520):
        for rows in (None, 1, 2, 3, 7, 31, 32, 33, 257, 100_000):
            want = (softmax_lanes(window, head_dim), pool_lanes(window, head_dim, rows or MANY_ROWS))
            assert orders(window, head_dim, rows) == want, (window, head_dim, rows)


def test_fake_tensors_are_refused() -> None:
    """They have no memory to read; an error, not a crash."""
    arguments = forward_arguments()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(arguments["kv"])
        with pytest.raises(ValueError, match="kv: got a FakeTensor, need one with memory"):
            compress_forward(**arguments | {"kv": fake})
