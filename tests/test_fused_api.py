"""The first API of the fused kernels: every malformed argument is named, and nothing is written then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
