"""The claim behind the fused kernels' fast division, and that its proof could fail."""

from __future__ import annotations

import importlib.util
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
    assert script.main() == 1
