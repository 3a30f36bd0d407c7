"""What do the bits cost? The shipped GPU kernels, and the same ones with the contract taken out step by step.

    python benchmarks/price_of_bits.py    # a minute, a GPU

`approximate` has ex2.approx(x * log2(e)) for the power and e * rcp.approx(sum) for the quotient: two instructions and
one in place of seven and three. `any order` adds to that fused multiply-adds in the pooling sum, gradients whose -0
stays, and softmax sums that every thread of a block shares, so that no warp adds serially while the others wait. Lines
marked `apart` have the largest differences of out, grad_kv and grad_score from the shipped ones, in parts of the
largest value, to show that what is measured still computes the operator.

What `any order` takes above the floor is not the price of the bits: it is what this way to cut the work leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32
from torch import Tensor

from csa_gate._bench_clock import CudaClock
from csa_gate._bench_packs import Pack, choose, floor_us
from csa_gate._bench_subjects import Buffers, KernelSubject
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.fused import compiled, row, streamed, sums
from csa_gate.fused.arith import LOG2_E, add, apply, fma, mul, storage
from csa_gate.fused.config import WARP, Config
from csa_gate.fused.shares import Block, load_own, own_entries, own_logits, warps
from csa_gate.fused.sums import block_highest, take, to_plane
from csa_gate.fused.window import Place, entry, fragments

Patch = tuple[ModuleType, str, object]


def approximate_exp(x: Float32) -> tuple[Float32, Int32]:
    """As `exp_near`, right to a few ulp; none is far."""
    return cute.arch.exp2(mul(x, Float32(LOG2_E))), Int32(0)


def approximate_division(a: Float32, b: Float32, r: Float32) -> Float32:
    return mul(a, r)


def contracted_pool_sum(config: Config, weights: cute.Tensor, values: cute.Tensor, start: int) -> cute.Tensor:
    """As `row.pool_sum`, in one sum of fused multiply-adds."""
    total = fragments(1, config)
    total.fill(0.0)
    for k in range(start, config.window):
        apply(lambda s, p, v: fma(p, v, s), config, (total, 0), (total, 0), (weights, k), (values, k))
    return total


def contracted_product(
    config: Config, total: cute.Tensor, at: int, weight: tuple[cute.Tensor, int], value: tuple[cute.Tensor, int]
) -> None:
    apply(lambda s, p, v: fma(p, v, s), config, (total, at), (total, at), weight, value)


@cute.jit
def share_sum(config: Constexpr, own: cute.Tensor, block: Block, first: Constexpr) -> None:
    """Add the thread's entries up, then its warp's; a slot a warp from `first` on."""
    total, other = fragments(1, config), fragments(1, config)
    total.fill(0.0)
    for i in cutlass.range_constexpr(own_entries(config)):
        apply(add, config, (total, 0), (total, 0), (own, i))
    width = config.schedule.threads_x
    for step in cutlass.range_constexpr((WARP // width).bit_length() - 1):
        for c in cutlass.range_constexpr(config.vec):
            other[0, c] = cute.arch.shuffle_sync_bfly(total[0, c], width << step)
        apply(add, config, (total, 0), (total, 0), (other, 0))
    thread = block.ty * width + block.tx
    if thread % WARP < width:
        cute.autovec_copy(total[0, None], block.accumulators[(first + thread // WARP) * width + block.tx, None])


@cute.jit
def shared_sum(config: Constexpr, block: Block, first: Constexpr) -> cute.Tensor:
    """What `share_sum` has left, added up."""
    cute.arch.sync_threads()
    total, other = fragments(1, config), fragments(1, config)
    total.fill(0.0)
    for warp in cutlass.range(warps(config), unroll=2):
        at = (first + warp) * config.schedule.threads_x + block.tx
        cute.autovec_copy(block.accumulators[at, None], other[0, None])
        apply(add, config, (total, 0), (total, 0), (other, 0))
    return total


@cute.jit
def unordered_powers(
    config: Constexpr, score: cute.Tensor, ape: cute.Tensor, bias: cute.Tensor, place: Place, block: Block
) -> tuple[cute.Tensor, Int32]:
    """As `streamed.powers_to_plane`; forward nobody reads the plane."""
    scores = load_own(config, score, place, block.ty, entry, storage(config))
    x = own_logits(config, scores, bias, place, block.ty)
    top = block_highest(config, x, block)
    far = streamed.own_powers(config, x, top, score, ape, place, block.ty)
    share_sum(config, x, block, 0)
    if cutlass.const_expr(not config.schedule.past_l1):
        to_plane(config, x, block)
    return x, far


@cute.jit
def unordered_divisor(
    config: Constexpr, block: Block, far: Int32, powers: cute.Tensor | None
) -> tuple[cute.Tensor, cute.Tensor]:
    """As `streamed.divisor`."""
    total, r = shared_sum(config, block, 0), fragments(1, config)
    apply(lambda a: cute.arch.rcp_approx(a), config, (r, 0), (total, 0))
    return total, r


@cute.jit
def unordered_terms(config: Constexpr, block: Block) -> cute.Tensor:
    """As `softmax_sum`, of the second sum of the backward."""
    own = fragments(own_entries(config), config)
    for i in cutlass.range_constexpr(own_entries(config)):
        take(config, i, block, own, i)
    share_sum(config, own, block, warps(config))
    return shared_sum(config, block, warps(config))


APPROXIMATE: list[Patch] = [
    (row, "exp_near", approximate_exp),
    (row, "div_by", approximate_division),
    (sums, "div_by", approximate_division),
    (row, "reciprocal", cute.arch.rcp_approx),
    (streamed, "reciprocal", cute.arch.rcp_approx),
]
ANY_ORDER: list[Patch] = [
    *APPROXIMATE,
    (row, "not_negative_zero", lambda a: a),
    (row, "pool_sum", contracted_pool_sum),
    (sums, "_add_product", contracted_product),
    (streamed, "powers_to_plane", unordered_powers),
    (streamed, "divisor", unordered_divisor),
    (streamed, "softmax_sum", unordered_terms),
]
VARIANTS: dict[str, list[Patch]] = {"shipped": [], "approximate": APPROXIMATE, "any order": ANY_ORDER}


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """Kernels compiled meanwhile are the patched ones, and are forgotten at the end."""
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    compiled._FUNCTIONS.clear()
    compiled._PLANS.clear()
    try:
        for module, name, value in patches:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        compiled._FUNCTIONS.clear()
        compiled._PLANS.clear()


def apart(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, in parts of the largest value."""
    wanted = wanted.float()
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def measure(pack: Pack, clock: CudaClock, bandwidth: float, device: torch.device) -> None:
    """Print a line for each direction and variant."""
    buffers = [Buffers.make(pack.problem, device, seed) for seed in range(clock.sets(pack.traffic("forward")))]
    subject = KernelSubject(load_kernel("fused"))
    shipped: list[Tensor] = []
    for name, patches in VARIANTS.items():
        with patched(patches):
            calls = [subject.calls(each) for each in buffers]
            for direction in ("forward", "backward"):
                us = clock.kernel_us([each[direction] for each in calls])
                floor = floor_us(pack.traffic(direction), bandwidth)
                line = f"{us:7.1f} us  {us / floor:5.2f} of the floor"
                print(f"{pack.id:<24} {direction:<9} {name:<12} {line}", flush=True)
            first = [buffers[0].out, buffers[0].grad_kv, buffers[0].grad_score]
            shipped = shipped or [tensor.clone() for tensor in first]
            parts = ", ".join(f"{apart(got, wanted):.1e}" for got, wanted in zip(first, shipped, strict=True))
            print(f"{'':<24} {'apart':<9} {name:<12} {parts}", flush=True)


def main() -> int:
    """Measure the packs of the table."""
    device = torch.device("cuda")
    clock = CudaClock(device, 20)
    bandwidth = clock.bandwidth()
    print(f"{torch.cuda.get_device_name()}, add at {bandwidth / 1e12:.2f} TB/s")
    for pack in choose(["table"], "cuda"):
        measure(pack, clock, bandwidth, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
