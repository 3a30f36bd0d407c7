"""The orders in which CUDA's eager region adds over a window, from shapes alone.

Derived from how PyTorch launches `softmax(dim=1)` and `sum(dim=1)` on a contiguous (rows, window, head_dim) fp32
tensor, and confirmed bit for bit on an H200 for windows 1 to 512, head_dim 2 to 512 and 1 to 257 rows. head_dim 1
takes another softmax kernel there, which these rules do not describe.
"""

from __future__ import annotations

_THREADS = 1024  # of a softmax block
_WARP = 32
_VALUES = 512  # that a block of the reduction spreads its threads over, vector loads counted
MANY_ROWS = 1 << 30


def softmax_lanes(window: int, head_dim: int) -> int:
    """D: the lanes over which the softmax's two sums (of exp, and of p * grad in its backward) are dealt.

    Lane x adds entries x, x + D, x + 2D, ... one after another from +0, then the lanes combine by a halving tree.
    """
    if head_dim > 64 or window < 64:
        return 1
    return min(_power_of_two(_THREADS // head_dim), _power_of_two(window))


def pool_lanes(window: int, head_dim: int, rows: int = MANY_ROWS) -> int:
    """Y: the lanes over which the pooling sum is dealt, in a call of `rows` rows, padding included.

    Lane y deals entries y, y + Y, y + 2Y, ... in turn to four accumulators from +0, its value is their sum from the
    first to the last; the lanes combine by a halving tree.
    """
    vector = next(v for v in (4, 2, 1) if head_dim % v == 0)
    threads = _VALUES // vector
    width = min(_power_of_two(rows * head_dim // vector), threads, _WARP)
    height = min(_power_of_two(window), threads, threads // width)
    return height if window >= min(16 * height, 256) else 1


def leaf_run(window: int) -> int:
    """Rows of a leaf of the dape tree that are added one after another before its halving tree.

    This is no order of PyTorch's: runs let a kernel sum long windows over rows without room for what waits in a tree.
    """
    return 4 if window > 8 else 1


def _power_of_two(n: int) -> int:
    """The largest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)
