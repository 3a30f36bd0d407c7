"""`Contract`: what a kernel claims, clause by clause, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from .checks import one_of

Bits = Literal["eager", "portable"]
Exp = Literal["native", "portable"]


@dataclass(frozen=True)
class Contract:
    """One field a clause; a clause left at None or False is not claimed and is not held against the kernel.

    forward_bits: out equals this reference in every bit: `eager` (fp32-intermediate PyTorch on the same device) or
        `portable` (`ordered(exp="portable")`, the same on every machine).
    gradient_bits: the same for grad_kv and grad_score.
    dape_bits: grad_ape equals `ordered` with this exp on the same device in every bit (PyTorch's own order depends on
        the GPU's size, so there are no bits of `eager` to match).
    error_bound: every finite element of all four outputs within its derived bound around fp64.
    dape_accuracy: the root mean square error of grad_ape against fp64 is at most the eager reference's, chance aside.
    deterministic: out, grad_kv and grad_score have the same bits from run to run.
    dape_deterministic: grad_ape has the same bits from run to run.
    zero_slots: gradients of unconsumed slots are exact +0, whatever the buffer held.
    row_padding: rows past cu_seqlens_comp[-1] pool token 0's block; their incoming gradient changes no bit.
    token_padding: tokens past cu_seqlens[-1] change no bit of anything.
    nonfinite: Inf and NaN come out where the reference has them, and nowhere else.
    memory: inputs and torch's global state are unchanged, and nothing is written outside the outputs, or after a call.
    batch_invariance: a segment's rows do not depend on its neighbours.
    replay: the same buffers serve new data and other lengths.
    graph_replay: a captured CUDA graph follows new data, other lengths and fewer rows.
    streams: side streams and tensors on a device that is not current are handled.
    static: as compiled for every architecture, whatever device is at hand, the code spills nothing, keeps no stack,
        pins all fp32 arithmetic and has no atomics on global memory.
    """

    forward_bits: Bits | None = None
    gradient_bits: Bits | None = None
    dape_bits: Exp | None = None
    error_bound: bool = False
    dape_accuracy: bool = False
    deterministic: bool = False
    dape_deterministic: bool = False
    zero_slots: bool = False
    row_padding: bool = False
    token_padding: bool = False
    nonfinite: bool = False
    memory: bool = False
    batch_invariance: bool = False
    replay: bool = False
    graph_replay: bool = False
    streams: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        for clause in CLAUSES:
            value, values = getattr(self, clause), _VALUES.get(clause, (False, True))
            if not any(value is v or (isinstance(v, str) and value == v) for v in values):
                raise ValueError(f"{clause}: got {value!r}, need one of {', '.join(map(repr, values))}")

    def claims(self, clause: str) -> bool:
        """Whether `clause` is claimed. Raises ValueError for a name that is no clause."""
        one_of("clause", clause, CLAUSES)
        return bool(getattr(self, clause))


_VALUES: dict[str, tuple[object, ...]] = {
    "forward_bits": (None, "eager", "portable"),
    "gradient_bits": (None, "eager", "portable"),
    "dape_bits": (None, "native", "portable"),
}
CLAUSES: tuple[str, ...] = tuple(f.name for f in fields(Contract))
