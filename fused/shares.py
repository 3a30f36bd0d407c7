"""A row's window shared by the threads of a block: each has every `threads_y`-th entry of one column group."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, L2PrefetchSize
from cutlass.memory import SmemAllocator

from .arith import NEG_INF, storage
from .config import WARP, Config
from .row import add_bias
from .window import Place, ape_entry, entry, fragments


class Block(NamedTuple):
    """A thread's place in its block, and the memory that the block shares: slots for `threads_x` column groups."""

    tx: Int32
    ty: Int32
    plane: cute.Tensor
    tops: cute.Tensor  # one slot a warp
    sums: cute.Tensor  # one slot a lane of the softmax sums
    accumulators: cute.Tensor  # one slot an accumulator of the pooling sum


def enter_block(config: Config) -> Block:
    """Where the thread is; allocates what is shared."""
    tx, ty, _ = cute.arch.thread_idx()
    smem, width = SmemAllocator(), config.schedule.threads_x

    def slots(count: int) -> cute.Tensor:
        layout = cute.make_layout((count * width, config.vec), stride=(config.vec, 1))
        return smem.allocate_tensor(Float32, layout, 16)

    return Block(
        tx,
        ty,
        plane=slots(plane_entries(config)),
        tops=slots(warps(config)),
        sums=slots(config.softmax_lanes),
        accumulators=slots(4 * config.pool_lanes),
    )


def own_entries(config: Config) -> int:
    """Window entries of one thread, at most."""
    return -(-config.window // config.schedule.threads_y)


def plane_entries(config: Config) -> int:
    """Entries of the plane: past the window's end they are 0, which changes no sum."""
    return own_entries(config) * config.schedule.threads_y


def warps(config: Config) -> int:
    return -(-config.schedule.threads // WARP)


def shared_evenly(config: Config) -> bool:
    """Whether every thread has as many entries of either half."""
    return config.ratio % config.schedule.threads_y == 0


def half_of(config: Config, i: int) -> int | None:
    """The half that every thread's i-th entry is in; None where it differs, or some have none."""
    first, after = i * config.schedule.threads_y, (i + 1) * config.schedule.threads_y
    if after <= config.ratio:
        return 0
    return 1 if first >= config.ratio and after <= config.window else None


def entry_of(config: Config, i: int, ty: Int32) -> tuple[int | Int32, int | Int32]:
    """Half and place in it of a thread's i-th entry, if it has one; the half at compile time where it can be."""
    w = i * config.schedule.threads_y
    if w >= config.ratio:
        return 1, w - config.ratio + ty
    if config.coff == 1 or half_of(config, i) == 0:
        return 0, w + ty
    return (w + ty) // config.ratio, (w + ty) % config.ratio


def runs(config: Config) -> list[range]:
    """A thread's entries in runs, whose entries exist together and lie in one half."""
    found = []
    for half, together in groupby(range(own_entries(config)), lambda i: half_of(config, i)):
        entries, most = list(together), 1 if half is None else config.schedule.longest_run
        found += [range(entries[k], entries[k : k + most][-1] + 1) for k in range(0, len(entries), most)]
    return found


def always_exists(config: Config, i: int) -> bool:
    """Whether every thread has an i-th entry, valid in every row."""
    return half_of(config, i) == config.coff - 1


def exists(config: Config, place: Place, i: int, ty: Int32) -> Boolean:
    """Whether a thread has an i-th entry, and it is valid."""
    exists = Boolean(True)
    if (i + 1) * config.schedule.threads_y > config.window:
        exists = i * config.schedule.threads_y + ty < config.window
    if config.coff == 2 and i * config.schedule.threads_y < config.ratio:
        half, _ = entry_of(config, i, ty)
        exists = exists & ((half == 1) | (place.first == Boolean(False)))
    return exists


@cute.jit
def load_own(
    config: Constexpr, memory: cute.Tensor, place: Place, ty: Int32, index: Constexpr, kind: Constexpr
) -> cute.Tensor:
    """The thread's entries of a window, (own, vec) of `kind`, found by `entry` or `bias_entry`; else 0."""
    own = fragments(own_entries(config), config, kind)
    # Either order lacks registers where the other does not.
    in_order = cutlass.const_expr(runs(config) if shared_evenly(config) else runs(config)[::-1])
    for run in in_order:
        if cutlass.const_expr(always_exists(config, run[0])):
            _load_run(config, memory, place, ty, index, run, own)
        elif exists(config, place, run[0], ty):
            _load_run(config, memory, place, ty, index, run, own)
        else:
            for i in cutlass.const_expr(run):
                own[i, None].fill(0)
    return own


def _load_run(
    config: Config,
    memory: cute.Tensor,
    place: Place,
    ty: Int32,
    index: Callable[..., Int32],
    run: range,
    own: cute.Tensor,
) -> None:
    source = entries_of(config, memory, place, ty, index, run)
    for i in run:
        _load(config, source[i - run[0], None], own[i, None])


def entries_of(
    config: Config, memory: cute.Tensor, place: Place, ty: Int32, index: Callable[..., Int32], run: range
) -> cute.Tensor:
    """A run of the thread's entries in memory, (len(run), vec).

    One address and constant steps from it: as indices of their own, entries would each take instructions and registers
    for an address, and loads would not all be on their way at once. Where a half is not shared evenly, runs are many,
    and all begin at a step from one address.
    """
    size, shares = place.groups * config.vec, config.schedule.threads_y
    half, k = entry_of(config, run[0], ty)
    if shared_evenly(config):
        first = memory[index(config, place, half, k), None].iterator
    else:
        # From half to half, window entries follow one another in tokens but not in columns, nor in rows of ape.
        later = 1 if index is entry else 1 - config.window
        entries = run[0] * shares * config.coff + half * later
        # From an address before the tensor, as that of a first row is, steps can be twice as long as offsets in it.
        offset = entries * size if config.head_dim is not None else Int64(entries) * Int64(size)
        first = memory[index(config, place, 0, ty), None].iterator + cute.assume(offset, divby=config.vec)
    step = cute.assume(shares * config.coff * size, divby=config.vec)
    return cute.make_tensor(first, cute.make_layout((len(run), config.vec), stride=(step, 1)))


def _load(config: Config, source: cute.Tensor, own: cute.Tensor) -> None:
    """Load one column group, of kv and score with the whole line of L2 around it, which a neighbour takes soon."""
    if own.element_type is not storage(config):
        cute.autovec_copy(source, own)
        return
    past = CacheEvictionPriority.NO_ALLOCATE if config.schedule.past_l1 else CacheEvictionPriority.EVICT_NORMAL
    atom = cute.make_copy_atom(
        CopyG2ROp(),
        own.element_type,
        num_bits_per_copy=own.element_type.width * config.vec,
        l2_prefetch_size=L2PrefetchSize.SIZE_128B,
        l1c_evict_priority=past,
    )
    cute.copy(atom, source, own)


def bias_entry(config: Config, place: Place, half: int | Int32, k: Int32) -> Int32:
    """As `entry`, of the position bias."""
    return ape_entry(config, place.group, place.groups, half, k)


def any_row(group: Int32, groups: Int32) -> Place:
    """The place of a row that is no first block, so that all entries count."""
    return Place(Int32(0), Int32(0), Boolean(False), group, groups)


def load_own_bias(config: Config, ape: cute.Tensor, group: Int32, groups: Int32, ty: Int32) -> cute.Tensor:
    """ape for the thread's entries, (own, vec) fp32; 0 where there is none."""
    return load_own(config, ape, any_row(group, groups), ty, bias_entry, Float32)


@cute.jit
def own_logits(config: Constexpr, scores: cute.Tensor, bias: cute.Tensor, place: Place, ty: Int32) -> cute.Tensor:
    """Logits of the thread's entries, (own, vec) fp32; −inf where there is none."""
    x = add_bias(config, 0, own_entries(config), scores, bias)
    for run in cutlass.const_expr(runs(config)):
        if cutlass.const_expr(not always_exists(config, run[0])):
            if exists(config, place, run[0], ty) == Boolean(False):
                for i in cutlass.const_expr(run):
                    x[i, None].fill(NEG_INF)
    return x
