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

LEAF_COLUMNS = 32  # columns of grad_ape that one GPU block sums over the leaves


def leaf_groups(config: Config) -> int:
    """Column groups of grad_ape that one GPU block sums over the leaves."""
    return LEAF_COLUMNS // config.vec


@cute.jit
def sum_leaves(
    config: Constexpr,
    leaves: cute.Tensor,
    count: Int32,
    parts: Constexpr,
    deal: Constexpr,
    stride: Int32,
    at: Int32,
    thread: Int32,
    high: cute.Tensor,
    low: cute.Tensor,
    slot: Int32,
) -> None:
    """One running sum: leaves lane, lane + LEAF_LANES, ... below `count` at column group `at`, kept in slot `slot`.

    A leaf comes in `parts` parts of `stride` column groups: part j has its rows j, j + parts, ..., which is a single
    row or whole runs, so that the halving tree goes on over the parts. They are dealt to `deal` threads, all of which
    get their sum: lane is `thread` over their number. high and low are (slots, vec) fp32.
    """
    value = fragments(parts // deal, config)
    high[slot, None].fill(0.0)
    low[slot, None].fill(0.0)
    for leaf in cutlass.range(thread // deal, count, LEAF_LANES, unroll=config.schedule.leaves_ahead):
        first = leaf * parts + thread % deal
        for i in cutlass.range(parts // deal, unroll_full=config.on_gpu):
            cute.autovec_copy(leaves[(first + i * deal) * stride + at, None], value[i, None])
        leaf_sum(config, value, parts, deal, 1)
        _sum_over_threads(config, value, deal)
        accumulate(config, high, low, slot, (value, 0), None)


@cute.jit
def leaf_sum(config: Constexpr, values: cute.Tensor, parts: Constexpr, deal: Constexpr, each: Constexpr) -> None:
    """Add up every `deal`-th of a leaf's parts, of `each` column groups, into the first of them."""
    run = cutlass.const_expr(config.leaf_run if parts == LEAF_ROWS else 1)
    left = cutlass.const_expr(parts // deal // run * each)
    for i in cutlass.range_constexpr(1, run):
        for x in cutlass.range(left, unroll_full=config.on_gpu):
            apply(add, config, (values, x), (values, x), (values, i * left + x))
    halving_tree(config, values, parts // deal // run, each)


def _sum_over_threads(config: Config, value: cute.Tensor, deal: int) -> None:
    """The end of the halving tree, over `deal` threads of a warp, as far apart as a block is wide."""
    other = fragments(1, config)
    for step in range(1, deal.bit_length()):
        for c in config.columns:
            other[0, c] = cute.arch.shuffle_sync_bfly(value[0, c], (deal >> step) * leaf_groups(config))
        apply(add, config, (value, 0), (value, 0), (other, 0))


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
