"""Portable numerics: the fused kernels give one value on every machine, which the digests below hold."""

from __future__ import annotations

import hashlib

import pytest
import torch

from csa_gate.fixtures.adapters.fused import portable
from csa_gate.fixtures.run import run
from csa_gate.oracles import DISTRIBUTIONS, Problem, Result, make_inputs, ordered

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
LENS = (37, 0, 3, 64, 4)
PROBLEMS = {
    "4-2-64": Problem(LENS, 4, 2, 64, row_capacity=31, token_capacity=120),
    "1-1-7": Problem(LENS, 1, 1, 7),
    "32-2-16": Problem((160, *LENS), 32, 2, 16),
    "128-1-64": Problem((300, 127, 129), 128, 1, 64),
    "128-2-66": Problem((520, 130), 128, 2, 66),
    "4-1-8-long": Problem((5000,), 4, 1, 8),
}
DIGESTS = {
    "4-2-64": "931f5fd034b03358",
    "1-1-7": "8151fd919a573aab",
    "32-2-16": "871cbec58a437929",
    "128-1-64": "a1e0d889b6de3bdf",
    "128-2-66": "5a3e9607c44c5922",
    "4-1-8-long": "4c8ecba35e048b59",
}


def digest(result: Result) -> str:
    """SHA-256 over the bits of all outputs of all distributions, NaNs made alike."""
    sha = hashlib.sha256()
    for _, tensor in result.items():
        integers = tensor.cpu().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
        sha.update(integers.masked_fill(tensor.cpu().isnan(), -1).numpy().tobytes())
    return sha.hexdigest()[:16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_digest(name: str, device: str) -> None:
    """Kernels on any device and the oracle `ordered` on any device agree with what was written down."""
    got, want = [], []
    for distribution in DISTRIBUTIONS:
        inputs = make_inputs(PROBLEMS[name], 0, distribution, device)
        got.append(digest(run(portable, inputs)))
        want.append(digest(ordered(inputs, exp="portable")))
    assert got == want
    assert hashlib.sha256("".join(got).encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize(("coff", "head_dim"), [(2, 128), (1, 520)])
def test_threads_change_no_bit(coff: int, head_dim: int) -> None:
    """A call large enough for several threads gives what one thread gives, also where columns divide unevenly."""
    problem = Problem((1500, 2, 700, 3), 4, coff, head_dim, row_capacity=560, token_capacity=2300)
    inputs = make_inputs(problem)
    threads, digests = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            digests.add(digest(run(portable, inputs)))
    finally:
        torch.set_num_threads(threads)
    assert len(digests) == 1
