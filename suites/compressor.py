"""`CompressorSuite`, all themes over one kernel."""

from __future__ import annotations

from .batch import BatchSuite
from .determinism import DeterminismSuite
from .memory import MemorySuite
from .numerics import NumericsSuite
from .padding import RowPaddingSuite, TokenPaddingSuite
from .replay import GraphSuite, ReplaySuite
from .streams import StreamsSuite
from .zeros import ZeroSlotsSuite


class CompressorSuite(
    NumericsSuite,
    DeterminismSuite,
    ZeroSlotsSuite,
    MemorySuite,
    RowPaddingSuite,
    TokenPaddingSuite,
    BatchSuite,
    ReplaySuite,
    GraphSuite,
    StreamsSuite,
):
    """The whole contract. To gate a kernel of your own, subclass it in a test file and say which kernel it is:

        class TestMine(CompressorSuite):
            kernel = MyKernel()

    Without the attribute (or a fixture `kernel`), the kernel is that of --csa-kernel.
    """
