"""`CompressorSuite`, all themes over one kernel."""

from __future__ import annotations

from .batch import BatchSuite
from .determinism import DeterminismSuite
from .golden import GoldenSuite
from .memory import MemorySuite
from .numerics import NumericsSuite
from .padding import RowPaddingSuite, TokenPaddingSuite
from .properties import PropertySuite
from .replay import GraphSuite, ReplaySuite
from .scale import ScaleSuite
from .static import StaticSuite
from .streams import StreamsSuite
from .zeros import ZeroSlotsSuite


# Pytest runs the tests of the last base first: values, before what only shows that values are stale.
class CompressorSuite(
    StaticSuite,
    PropertySuite,
    GoldenSuite,
    StreamsSuite,
    GraphSuite,
    ReplaySuite,
    BatchSuite,
    TokenPaddingSuite,
    RowPaddingSuite,
    MemorySuite,
    ZeroSlotsSuite,
    DeterminismSuite,
    ScaleSuite,
    NumericsSuite,
):
    """The whole contract. To gate a kernel of your own, subclass it in a test file and say which kernel it is:

        class TestMine(CompressorSuite):
            kernel = MyKernel()

    Without the attribute (or a fixture `kernel`), the kernel is that of --csa-kernel.
    """
