"""What the threads of a block share, and the sum of grad_ape over the leaves."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.base_dsl import Arch
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.memory import SmemAllocator

from .ape import accumulate, leaf_groups, sum_leaves, total_of
from .arith import apply, ceil_div
from .config import LEAF_LANES, LEAF_ROWS, Config
from .gaps import zero_rowless
from .window import fragments, locate


def known_groups(config: Config, groups: Int32) -> Int32:
    """Column groups of a row, as a constant where head_dim is compiled in."""
    return groups if config.head_dim is None else Int32(config.head_dim // config.vec)


def known_column_blocks(config: Config, column_blocks: Int32) -> Int32:
    """Blocks that share out a row's columns, likewise: a division by a constant costs little."""
    if config.head_dim is None:
        return column_blocks
    return Int32(-(-config.head_dim // (config.vec * config.schedule.threads_x)))


def first_row(config: Config, part: Int32) -> Int32:
    """The first row of one part of a leaf; the others follow `leaf_parts` apart."""
    parts = config.schedule.leaf_parts
    return part // parts * LEAF_ROWS + part % parts


def launches_overlap() -> bool:
    """Whether a kernel may be launched while the one before it ends, for which it then waits: from sm_90 on."""
    arch = BaseDSL._get_dsl().get_arch_enum()  # the DSL has no public name for what it compiles for
    return bool(arch >= Arch.sm_90)


def let_next_launch() -> None:
    """Let the next kernel be launched as soon as every block has come here."""
    if launches_overlap():
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def locate_rows(
    config: Constexpr, cu_seqlens: cute.Tensor, cu_seqlens_comp: cute.Tensor, segments: Int32, start: Int32, step: int
) -> tuple[cute.Tensor, cute.Tensor]:
    """`locate` for the rows of the block, start, start + step, ..., in shared memory; the block must synchronise."""
    tx, ty, _ = cute.arch.thread_idx()
    thread = ty * config.schedule.threads_x + tx
    smem = SmemAllocator()
    layout = cute.make_layout(config.schedule.rows)
    codes, ends = smem.allocate_tensor(Int32, layout, 16), smem.allocate_tensor(Int32, layout, 16)
    if thread < config.schedule.rows:
        code, end = locate(config, cu_seqlens, cu_seqlens_comp, segments, start + thread * step)
        codes[thread] = code
        ends[thread] = end
    return codes, ends


@cute.jit
def clear_rowless(
    config: Constexpr,
    cu_seqlens: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    segments: Int32,
    total_tokens: Int32,
    groups: Int32,
    number: Int32,
    blocks: Int32,
) -> None:
    """`zero_rowless` by block `number` of `blocks`, each row of whose threads is a worker."""
    shape = config.schedule
    tx, ty, _ = cute.arch.thread_idx()
    worker, workers = number * shape.threads_y + ty, blocks * shape.threads_y
    lanes = Int32(shape.threads_x)
    zero_rowless(config, cu_seqlens, grad_kv, grad_score, segments, total_tokens, groups, worker, workers, tx, lanes)


@cute.kernel
def grad_ape_kernel(
    cu_seqlens_comp: cute.Tensor,
    leaves: cute.Tensor,
    grad_ape: cute.Tensor,
    segments: Int32,
    total_comp: Int32,
    size: Int32,
    parts: Constexpr,
    deal: Constexpr,
    config: Constexpr,
) -> None:
    """One block sums `LEAF_COLUMNS` columns of grad_ape; a leaf comes in `parts` parts, and `deal` threads share it.

    These are of one warp, which is all theirs, and the block has them for as many leaves as there are at most; or else
    a leaf has one thread, and the block `LEAF_LANES` of them.
    """
    tx, thread, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    threads = cute.arch.block_dim()[1] if deal > 1 else Int32(LEAF_LANES)
    width = cutlass.const_expr(leaf_groups(config))
    at = block * width + tx
    slots = cutlass.const_expr(LEAF_LANES * width)
    layout = cute.make_layout((slots, config.vec), stride=(config.vec, 1))
    smem = SmemAllocator()
    high, low = smem.allocate_tensor(Float32, layout, 16), smem.allocate_tensor(Float32, layout, 16)
    own_high, own_low = fragments(1, config), fragments(1, config)
    # Before the wait: what came before both kernels has ended, or the first would not have begun.
    rows = cutlass.min(cu_seqlens_comp[segments], total_comp)
    if cutlass.const_expr(launches_overlap()):
        cute.arch.griddepcontrol_wait()
    # Threads past the last column work on it too: those of a warp may need each other.
    column, count = cutlass.min(at, size - 1), ceil_div(rows, LEAF_ROWS)
    sum_leaves(config, leaves, count, parts, deal, size, column, thread, own_high, own_low, Int32(0))
    # Of the threads that share a leaf, the first has its running sum.
    lanes, lane = threads // deal, thread // deal + thread % deal * LEAF_LANES
    slot = lane * width + tx
    if lane < lanes:
        cute.autovec_copy(own_high[0, None], high[slot, None])
        cute.autovec_copy(own_low[0, None], low[slot, None])
    for step in cutlass.range_constexpr(1, LEAF_LANES.bit_length()):
        half = LEAF_LANES >> step
        # Lanes that are left out have no leaf, and +0 changes no running sum.
        if half < lanes:
            cute.arch.sync_threads()
            if lane < half:
                other = slot + half * width
                accumulate(config, high, low, slot, (high, other), (low, other))
    if lane == 0 and at < size:
        apply(total_of, config, (grad_ape, at), (high, slot), (low, slot))
