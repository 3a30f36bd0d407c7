"""Problems too large to judge whole: a few segments of them are, wherever they lie."""

from __future__ import annotations

import pytest
import torch

from csa_gate.fixtures.adapters.fused import FusedKernel, kernel
from csa_gate.fixtures.kernels import Kernel
from csa_gate.fixtures.run import run
from csa_gate.fixtures.vast import JUDGED, VAST, Vast, filled
from csa_gate.oracles import Problem
from csa_gate.oracles.bits import same_bits
from csa_gate.oracles.judge import judge
from csa_gate.oracles.problem import INT32_MAX
from csa_gate.suites import base, scale

CPU = torch.device("cpu")
SMALL = Vast("small", filled(8000, 4, 2, 8))
CLAUSES = ("forward_bits", "gradient_bits", "zero_slots")


class WrapsAround(FusedKernel):
    """At some flat offset: what lies behind it comes from elsewhere."""

    limit = SMALL.problem.total_comp - 2

    def __init__(self) -> None:
        super().__init__("planted", None)

    def forward(self, *inputs: torch.Tensor, ratio: int, coff: int, out: torch.Tensor) -> None:
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)
        out[self.limit :] = out[: len(out) - self.limit].clone()


def verdict(subject: Kernel, vast: Vast) -> list[str]:
    """The clauses that the judged segments break."""
    whole, part = vast.inputs(CPU)
    contract = subject.contract(CPU)
    assert contract is not None
    return list(judge(contract, part, vast.cut(run(subject, whole)), clauses=CLAUSES).broken)


@pytest.mark.parametrize("vast", [SMALL, Vast("exact", filled(1000, 1, 1, 1), "exact")], ids=lambda v: v.id)
def test_segments_are_judged_as_though_alone(vast: Vast) -> None:
    assert verdict(kernel, vast) == []


def test_faults_in_a_judged_segment_are_seen() -> None:
    assert verdict(WrapsAround(), SMALL) == ["forward_bits"]


def test_filler_is_none_of_the_judged_data() -> None:
    whole, part = SMALL.inputs(CPU)
    cut = SMALL.problem.cu_seqlens.tolist()
    assert same_bits(torch.cat([whole.kv[cut[s] : cut[s + 1]] for s in JUDGED]), part.kv)
    filler = whole.kv[cut[1] : cut[2]]
    assert float(filler.float().std()) > 0.5
    assert (part.seed, part.distribution) == (None, None)


def test_the_limit_is_met() -> None:
    """To the element where one column allows it, else to the last whole token; the last token is judged, in a tail."""
    sizes = {v.id: v.problem.total_tokens * v.problem.width for v in VAST}
    assert sizes["flat-r4c1-d1"] == sizes["flat-r1c1-d1"] == INT32_MAX
    assert next(v for v in VAST if v.id == "flat-r1c1-d1").problem.total_comp == INT32_MAX
    for v in VAST:
        p = v.problem
        if v.id.startswith("flat"):
            assert INT32_MAX - p.width < sizes[v.id] <= INT32_MAX
        assert p.lens[JUDGED[-1]] % p.ratio == p.ratio - 1
        assert v.part.total_tokens < 2000
        assert kernel.supports(p) is None


def test_past_the_limit_the_fused_kernels_decline() -> None:
    reason = "kv or out has more than 2147483647 elements"
    assert kernel.supports(Problem((2**23,), 4, 2, 128)) == reason
    assert kernel.supports(Problem((2**20,), 1, 1, 2**11)) == reason


def test_too_little_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is too small skips the tests, and nothing is made there."""
    gate = base.Gate(kernel, CPU, "", "")
    monkeypatch.setattr(gate, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    with pytest.raises(pytest.skip.Exception, match="needs 44 GiB of free device memory, there are 8"):
        scale.VastTrial(next(v for v in VAST if v.id == "flat-r4c1-d1")).run(gate)


def test_cases_for_cuda_are_skipped_elsewhere() -> None:
    gate = base.Gate(kernel, CPU, "", "")
    (case,) = (c for c in scale.SCALE if c.id == "tokens-1048576-r4c2")
    with pytest.raises(pytest.skip.Exception, match="needs a CUDA device"):
        gate.inputs(case)
