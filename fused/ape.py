"""The deterministic sum behind grad_ape: a tree over the rows that neither capacity nor device enters.

Leaves of `LEAF_ROWS` consecutive rows are summed by a halving tree. `LEAF_LANES` running sums take the leaves in
turn, each gathering its rounding errors beside it, and combine by a halving tree.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .arith import add, lanes_of, put_lanes, two_sum, unless_nan
from .config import LEAF_LANES, Config
from .window import fragments


@cute.jit
def sum_leaves(
    config: Constexpr, leaves: cute.Tensor, count: Int32, stride: Int32, at: Int32, lane: Int32,
    high: cute.Tensor, low: cute.Tensor, slot: Int32,
) -> None:
    """Running sum `lane`: leaves lane, lane + LEAF_LANES, ... below `count` at column group `at`, kept in slot `slot`.

    One leaf holds `stride` column groups. high and low are (slots, vec) fp32.
    """
    value = fragments(1, config)
    high[slot, None].fill(0.0)
    low[slot, None].fill(0.0)
    for leaf in cutlass.range(lane, count, LEAF_LANES):
        cute.autovec_copy(leaves[leaf * stride + at, None], value[0, None])
        accumulate(config, high, low, slot, (value, 0), None)


def accumulate(
    config: Config, high: cute.Tensor, low: cute.Tensor, slot: int | Int32, value: tuple, value_low: tuple | None
) -> None:
    """Add a value, or another running sum, to the running sum in `slot`; values are (tensor, k) pairs."""
    sums = [two_sum(a, b) for a, b in zip(lanes_of(high, slot, config), lanes_of(*value, config), strict=True)]
    rest = lanes_of(low, slot, config)
    if value_low is not None:
        rest = [add(a, b) for a, b in zip(rest, lanes_of(*value_low, config), strict=True)]
    put_lanes(high, slot, [total for total, _ in sums], config)
    put_lanes(low, slot, [add(a, error) for a, (_, error) in zip(rest, sums, strict=True)], config)


def total_of(high, low):
    """The sum; the high part alone where an infinity has made the low part NaN."""
    return unless_nan(add(high, low), high)
