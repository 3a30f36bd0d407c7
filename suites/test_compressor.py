"""The contract, held against the kernel of --csa-kernel."""

from __future__ import annotations

from csa_gate.suites import CompressorSuite


class TestCompressor(CompressorSuite):
    """Everything."""
