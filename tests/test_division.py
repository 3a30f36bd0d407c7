"""The claim behind the fused kernels' fast division, and that its proof could fail."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch


def test_every_hard_case_of_the_fast_division(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case in which `div_by` could differ from the IEEE division does; without its last step many do."""
    path = Path(__file__).parents[1] / "benchmarks" / "division_hard_cases.py"
    spec = importlib.util.spec_from_file_location("division_hard_cases", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main() == 0
    assert "0 of 34,887,893 hard cases are wrong" in capsys.readouterr().out

    def uncorrected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * (1.0 / b.double()).float()

    monkeypatch.setattr(script, "division", uncorrected)
    assert script.main(end=(1 << 23) + script.CHUNK) == 1


def test_a_quotient_in_fp64_is_rounded_as_one_in_fp32() -> None:
    """What `quotient` relies on: rounding to fp64 first changes no fp32 quotient of a power by a sum, subnormal or not.

    Divisors whose quotients are ties of the subnormal grid, or next to ties, are among them.
    """
    generator = torch.Generator().manual_seed(0)
    sums = torch.cat([1 + 255 * torch.rand(1000, generator=generator), torch.tensor([1.0, 2.0, 3.0, 255.5, 256.0])])
    powers = torch.exp(-105 * torch.rand(1000, generator=generator, dtype=torch.float64)).float()
    ties = (torch.arange(1, 1001, dtype=torch.float64) - 0.5) * 2.0**-149
    checked = 0
    for a, b in [*zip(powers, sums, strict=False), *_beside(ties, sums)]:
        exact = Fraction(float(a)) / Fraction(float(b))
        assert float((a.double() / b.double()).float()) == nearest(exact), (float(a), float(b))
        checked += 1
    assert checked == 1000 + 3 * 1000


def _beside(ties: torch.Tensor, sums: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Dividends around tie * sum, and their divisors."""
    for tie, b in zip(ties, sums, strict=False):
        middle = (tie * b.double()).float()
        for a in (torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, torch.tensor(1.0))):
            yield a, b


def nearest(exact: Fraction) -> float:
    """The fp32 number nearest to 0 <= exact <= 1, ties to even."""
    exponent = max(-149, math.frexp(float(exact))[1] - 24)
    units = exact / Fraction(2) ** exponent
    return float(round(units) * Fraction(2) ** exponent)
