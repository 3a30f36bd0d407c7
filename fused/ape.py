"""The deterministic sum behind grad_ape: a tree over the rows that neither capacity nor device enters.

A leaf has `LEAF_ROWS` consecutive rows: `Config.leaf_run` rows as far apart as can be are added one after the other,
and these sums by a halving tree. `LEAF_LANES` running sums take the leaves in turn, each gathering its rounding errors
beside it, and combine by a halving tree.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .arith import Group, Lane, add, apply, lanes_of, put_lanes, two_sum, unless_nan
from .config import LEAF_LANES, LEAF_ROWS, Config
from .row import halving_tree
from .window import fragments


@cute.jit
def sum_leaves(
    config: Constexpr,
    leaves: cute.Tensor,
    count: Int32,
    parts: Constexpr,
    stride: Int32,
    at: Int32,
    lane: Int32,
    high: cute.Tensor,
    low: cute.Tensor,
    slot: Int32,
) -> None:
    """Running sum `lane`: leaves lane, lane + LEAF_LANES, ... below `count` at column group `at`, kept in slot `slot`.

    A leaf comes in `parts` parts of `stride` column groups: part j has its rows j, j + parts, ..., which is a single
    row or whole runs, so that the halving tree goes on over the parts. high and low are (slots, vec) fp32.
    """
    value = fragments(parts, config)
    high[slot, None].fill(0.0)
    low[slot, None].fill(0.0)
    for leaf in cutlass.range(lane, count, LEAF_LANES, unroll=config.schedule.leaves_ahead):
        for part in cutlass.range(parts, unroll_full=config.on_gpu):
            cute.autovec_copy(leaves[(leaf * parts + part) * stride + at, None], value[part, None])
        leaf_sum(config, value, parts, 1)
        accumulate(config, high, low, slot, (value, 0), None)


@cute.jit
def leaf_sum(config: Constexpr, values: cute.Tensor, parts: Constexpr, each: Constexpr) -> None:
    """Add a leaf's parts of `each` column groups up, into the first of them."""
    run = cutlass.const_expr(config.leaf_run if parts == LEAF_ROWS else 1)
    left = cutlass.const_expr(parts // run * each)
    for i in cutlass.range_constexpr(1, run):
        for x in cutlass.range(left, unroll_full=config.on_gpu):
            apply(add, config, (values, x), (values, x), (values, i * left + x))
    halving_tree(config, values, parts // run, each)


def accumulate(
    config: Config, high: cute.Tensor, low: cute.Tensor, slot: int | Int32, value: Group, value_low: Group | None
) -> None:
    """Add a value, or another running sum, to the running sum in `slot`."""
    sums = [two_sum(a, b) for a, b in zip(lanes_of(high, slot, config), lanes_of(*value, config), strict=True)]
    rest = lanes_of(low, slot, config)
    if value_low is not None:
        rest = [add(a, b) for a, b in zip(rest, lanes_of(*value_low, config), strict=True)]
    put_lanes(high, slot, [total for total, _ in sums], config)
    put_lanes(low, slot, [add(a, error) for a, (_, error) in zip(rest, sums, strict=True)], config)


def total_of(high: Lane, low: Lane) -> Lane:
    """The sum; the high part alone where an infinity has made the low part NaN."""
    return unless_nan(add(high, low), high)
