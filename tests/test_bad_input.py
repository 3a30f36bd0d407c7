"""Malformed arguments of the fused kernels, over every way in: named, refused before anything is written, forgotten.

On CUDA, what only the values or the addresses show is refused in debug mode, in which these rows run there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from csa_gate.fused import checks, compress_thd
from csa_gate.fused.streams import torch_stream
from csa_gate.oracles.bits import same_bits

from .entry_points import DEVICES, ENTRIES, GRADIENTS, TENSORS, Arguments, call, specified, tensors_in


class Row(NamedTuple):
    """One mistake.

    argument: the one that it is in, and that the message names; entry points that do not take it are left out.
    spoil: from the good value, the bad one.
    text: of the message, a regular expression.
    but: entry points for which this is no mistake, or one of which another row tells.
    """

    argument: str
    spoil: Callable[[Any], Any]
    text: str
    but: tuple[str, ...] = ()


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def _misaligned(t: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(t.numel() * t.itemsize + 1), dtype=t.dtype, offset=1).view(t.shape)


def freed(t: Tensor) -> Tensor:
    """`t` without its memory, as FSDP leaves parameters that it has resharded."""
    t = t.detach().clone()
    t.untyped_storage().resize_(0)
    return t


def freed_part(t: Tensor) -> Tensor:
    """The same as part of a larger storage, of which torch gives the offset for an address."""
    t = torch.stack([t.detach()] * 2)[1]
    t.untyped_storage().resize_(0)
    return t


def _cut_short(t: Tensor) -> Tensor:
    """The last element is missing."""
    t = t.detach().clone()
    t.untyped_storage().resize_(t.nbytes - t.itemsize)
    return t


def zeros(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)


def _offsets(*values: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.tensor(values, dtype=torch.int32, device=t.device)


def _fake(t: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(t)


_FLOATS = ("kv", "score", "ape")
_CLASSES = ("forward class", "backward class")  # where meta tensors stand for others, and others have no memory either

NO_TENSORS = [
    Row(name, spoil, rf"{name}: got {came}, need a torch\.Tensor")
    for name in (*TENSORS, "grad_out", "out", *GRADIENTS)
    for spoil, came in (
        (lambda t: None, "NoneType"),
        (lambda t: t.tolist(), "list"),
        (lambda t: np.zeros(t.shape, dtype=np.float32), "ndarray"),
    )
]
LAYOUTS = [
    Row("kv", lambda t: t.float(), r"kv: got dtype torch\.float32, need torch\.bfloat16"),
    Row("kv", lambda t: t[None], r"kv: got shape \(1, 12, 12\), need (2 dimensions|\(12, 12\), the sample's)"),
    Row("kv", lambda t: t[0], r"kv: got shape \(12,\), need (2 dimensions|\(12, 12\), the sample's)"),
    Row("kv", lambda t: t[:, :11].clone(), r"kv: got (11 columns, need a positive multiple|shape \(12, 11\))",
        but=("forward wrapper", "backward wrapper")),
    Row("kv", lambda t: t[:, :0], r"kv: got (0 columns, need a positive multiple of coff = 2|shape \(12, 0\))",
        but=("forward wrapper", "backward wrapper")),
    Row("kv", _strided, r"kv: got strides \(24, 2\), need contiguous ones"),
    Row("kv", lambda t: t.t().contiguous().t(), r"kv: got strides \(1, 12\), need contiguous ones"),
    Row("kv", lambda t: t.to("meta"), r"kv: got device meta, need (cpu or cuda|\w+(:0)?, where the samples are)",
        but=(*_CLASSES, "compress_thd")),
    Row("kv", lambda t: t.to("meta"), r"score: got device \w+(:0)?, need meta, where kv is",
        but=tuple(name for name in ENTRIES if name != "compress_thd")),
    Row("kv", _fake, r"kv: got a FakeTensor, need one with memory", but=("compress_thd", *_CLASSES)),
    Row("kv", lambda t: torch.zeros(1, dtype=t.dtype, device=t.device).expand(2**28, 12),
        r"kv: got (3221225472 elements, need at most 2147483647 \(int32 offsets\)|shape \(268435456, 12\))"),
    Row("score", lambda t: torch.zeros(1, dtype=t.dtype, device=t.device).expand(2**28, 12),
        r"score: got (3221225472 elements, need at most 2147483647 \(int32 offsets\)|shape \(268435456, 12\))"),
    Row("score", lambda t: t.half(), r"score: got dtype torch\.float16, need torch\.bfloat16"),
    Row("score", lambda t: t[1:], r"score: got shape \(11, 12\), need \(12, 12\)"),
    Row("score", lambda t: t.to("meta"), r"score: got device meta, need \w+(:0)?, where (kv is|the samples are)",
        but=_CLASSES),
    Row("score", lambda t: t.to_sparse(), r"score: got torch\.sparse_coo, need torch\.strided"),
    Row("score", lambda t: t.to_sparse_csr(), r"score: got torch\.sparse_csr, need torch\.strided"),
    *(
        Row(name, lambda t: torch.nested.nested_tensor([t, t]), rf"{name}: got a nested tensor, need torch\.strided")
        for name in (*TENSORS, "out", "grad_kv")
    ),
    Row("ape", lambda t: t.bfloat16(), r"ape: got dtype torch\.bfloat16, need torch\.float32"),
    Row("ape", lambda t: t[1:], r"ape: got shape \(3, 12\), need \(4, 12\)"),
    Row("ape", lambda t: t.t().contiguous().t(), r"ape: got strides \(1, 4\), need contiguous ones"),
    Row("cu_seqlens", lambda t: t.long(), r"cu_seqlens: got dtype torch\.int64, need torch\.int32"),
    Row("cu_seqlens", lambda t: t[:0], r"cu_seqlens: got (0 offsets, need the number of segments \+ 1|shape \(0,\))"),
    Row("cu_seqlens", lambda t: t[None], r"cu_seqlens: got shape \(1, 3\), need (1 dimensions|\(3,\))"),
    Row("cu_seqlens", lambda t: t.repeat_interleave(2)[::2], r"cu_seqlens: got strides \(2,\), need contiguous ones"),
    Row("cu_seqlens_comp", lambda t: t[1:], r"cu_seqlens_comp: got shape \(2,\), need \(3,\)"),
    Row("cu_seqlens_comp", lambda t: t.float(), r"cu_seqlens_comp: got dtype torch\.float32, need torch\.int32"),
    Row("grad_out", lambda t: t[:, 1:], r"grad_out: got shape \(3, 5\), need \(3, 6\)"),
    Row("grad_out", lambda t: t.float(), r"(grad_out|out): got dtype torch\.float32, need torch\.bfloat16"),
    Row("grad_out", _strided, r"(grad_out|out): got strides \(12, 2\), need contiguous ones"),
    Row("out", lambda t: t[:, :5], r"out: got shape \(3, 5\), need \(3, 6\)"),
    Row("out", lambda t: t.float(), r"out: got dtype torch\.float32, need torch\.bfloat16"),
    Row("out", lambda t: t[0], r"out: got shape \(6,\), need (2 dimensions|\(3, 6\), the sample's)"),
    Row("out", lambda t: t.to("meta"), r"out: got device meta, need \w+(:0)?, where (kv is|the samples are)",
        but=_CLASSES),
    Row("grad_kv", lambda t: t[1:], r"grad_kv: got shape \(11, 12\), need \(12, 12\)"),
    Row("grad_kv", lambda t: t.float(), r"grad_kv: got dtype torch\.float32, need torch\.bfloat16"),
    Row("grad_score", _strided, r"grad_score: got strides \(24, 2\), need contiguous ones"),
    Row("grad_ape", lambda t: t.double(), r"grad_ape: got dtype torch\.float64, need torch\.float32"),
    *(
        Row(name, lambda t: t.detach().requires_grad_(), rf"{name}: got a tensor that requires grad, need one that")
        for name in ("out", *GRADIENTS)
    ),
    *(
        Row(name, torch._neg_view, rf"(out|{name}): got a view with torch's negative bit, need its values in memory",
            but=("compress_thd",))
        for name in (*_FLOATS, "grad_out", "out", *GRADIENTS)
    ),
]  # fmt: skip
MEMORY = [
    *(
        Row(name, spoil, rf"{name}: got a storage of 0 bytes, need \d+ \(freed or resized\?\)")
        for name in (*TENSORS, "grad_out", "out", *GRADIENTS)
        for spoil in (freed, freed_part)
    ),
    *(
        Row(name, zeros, rf"{name}: got (a Tensor that wraps others or has no memory of its own|strides \(0.*\))")
        for name in (*TENSORS, "grad_out", "out", *GRADIENTS)
    ),
    *(
        Row(name, lambda t: TwoTensor(t, t), rf"{name}: got a TwoTensor that wraps others or has no memory of its own",
            but=("compress_thd",))
        for name in (*TENSORS, "grad_out", "out", *GRADIENTS)
    ),
]  # fmt: skip
MISALIGNED = [  # memory of Python's own
    Row(name, _misaligned, rf"{name}: got address 0x[0-9a-f]+, need one aligned to \d bytes")
    for name in ("kv", "ape", "cu_seqlens", "grad_out", "out", "grad_ape")
]
_NO_INTEGERS = (True, np.True_, 4.0, np.float32(4), "4", [4], torch.tensor(4), -1)
NUMBERS = [
    *(
        Row("ratio", lambda r, v=v: v, r"ratio: got .+, need an integer from 1 to 256")
        for v in (*_NO_INTEGERS, None, 0, 257)
    ),
    *(Row("coff", lambda c, v=v: v, r"coff: got .+, need 1 or 2") for v in (*_NO_INTEGERS, None, 0, 3, 2.0)),
    *(
        Row("head_dim", lambda d, v=v: v, r"head_dim: got .+, need 6: kv has 12 columns, coff is 2")
        for v in (*_NO_INTEGERS, 0, 5, 12, 6.0)
    ),
    *(
        Row("total_comp", lambda n, v=v: v, r"total_comp: got .+, need a number of rows or None")
        for v in (*_NO_INTEGERS, 3.0)
    ),
    Row("total_comp", lambda n: 2**30, r"total_comp: got 1073741824 rows of 6, need at most 2147483647 elements"),
    Row("total_comp", lambda n: 2**70, r"total_comp: got \d+ rows, need at most 2147483647"),
    *(Row("exp", lambda e, v=v: v, r"exp: got .+, need 'native' or 'portable'") for v in ("fast", ["native"], 1, b"")),
]
NO_STREAMS = (True, False, np.True_, 1.0, np.float32(1), torch.tensor(1), "1")
CPU_ONLY = [
    *MISALIGNED,
    # On CUDA a repeated call does not look.
    *(
        Row(name, torch._neg_view, rf"{name}: got a view with torch's negative bit", but=("compress_thd",))
        for name in ("cu_seqlens", "cu_seqlens_comp")
    ),
    *(
        Row(name, _cut_short, rf"{name}: got a storage of \d+ bytes, need \d+ \(freed or resized\?\)")
        for name in (*TENSORS, "grad_out", "out", *GRADIENTS)
    ),
    Row("exp", lambda e: "native", r"exp: got 'native' for tensors on cpu, need 'portable' there"),
    *(
        Row(name, lambda s: 0, r"stream: got 0 for tensors on cpu, need None there")
        for name in ("stream", "current_stream")
    ),
]
CUDA_ONLY = [
    *(
        Row(name, lambda t: t.cpu(), rf"{name}: got device cpu, need cuda:0, where (kv is|the samples are)", _CLASSES)
        for name in ("score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out", "out", "grad_kv")
    ),
    *(
        Row(name, lambda s: 2, r"stream: got the per-thread default stream \(2\)")
        for name in ("stream", "current_stream")
    ),
    *(
        Row(name, lambda s, v=v: v, r"stream: got .+, need a torch\.cuda\.Stream or the handle of a CUDA stream")
        for name in ("stream", "current_stream")
        for v in NO_STREAMS
    ),
]
CONTENTS = [
    Row("cu_seqlens", _offsets(1, 9, 12), r"cu_seqlens\[0\]: got 1, need 0"),
    Row("cu_seqlens", _offsets(-1, 9, 12), r"cu_seqlens\[0\]: got -1, need 0"),
    Row("cu_seqlens", _offsets(0, 9, 13), r"cu_seqlens\[-1\]: got 13, need at most 12"),
    Row("cu_seqlens", _offsets(0, 2**31 - 1, 12), r"cu_seqlens: got 2147483647 tokens and 2 rows in segment 0"),
    Row("cu_seqlens", _offsets(0, -1, 12), r"cu_seqlens: got -1 tokens and 2 rows in segment 0, need at least 0"),
    Row("cu_seqlens", _offsets(0, 9, 8), r"cu_seqlens: got -1 tokens and 0 rows in segment 1, need at least 0 tokens"),
    Row("cu_seqlens", _offsets(0, 12, 12), r"cu_seqlens: got 12 tokens and 2 rows in segment 0, need 3 rows of 4"),
    Row("cu_seqlens_comp", _offsets(1, 2, 2), r"cu_seqlens_comp\[0\]: got 1, need 0"),
    Row("cu_seqlens_comp", _offsets(0, 2, 4), r"cu_seqlens_comp\[-1\]: got 4, need at most 3"),
    Row("cu_seqlens_comp", _offsets(0, 1, 1), r"cu_seqlens: got 9 tokens and 1 rows in segment 0, need 2 rows"),
    Row("cu_seqlens_comp", _offsets(0, 2, 3), r"cu_seqlens: got 3 tokens and 1 rows in segment 1, need 0 rows"),
    Row("cu_seqlens_comp", _offsets(0, 2, 1), r"cu_seqlens: got 3 tokens and -1 rows in segment 1, need 0 rows"),
]


def _cases(*tables: list[Row]) -> list[Any]:
    return [
        pytest.param(entry, row, id=f"{entry.name}-{row.argument}-{at}".replace(" ", "-"))
        for entry in ENTRIES.values()
        for table in tables
        for at, row in enumerate(table)
        if row.argument in (*TENSORS, *entry.takes) and entry.name not in row.but
    ]


def is_refused(entry: Any, spoil: Callable[[Arguments], Arguments], text: str, device: str) -> None:
    """A call with `spoil(arguments)` in the place of some raises ValueError, writes nothing and leaves nothing behind.

    A good call comes before, so that there is one to repeat, and another after.
    """
    for turn in ("before", "bad", "after"):
        arguments, canaries = entry.arguments(device=device)
        if turn == "bad":
            kept = {name: tensor.clone() for name, tensor in tensors_in(arguments)}
            with pytest.raises(ValueError, match=f"^{text}"):
                call(entry, arguments | spoil(arguments), device)
            for name, tensor in tensors_in(arguments):
                assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (tensor, kept[name]))), (
                    f"{name}: written"
                )
        else:
            want = specified(device=device)
            for name, tensor in call(entry, arguments, device).items():
                assert same_bits(tensor, getattr(want, name)), f"{name} of the call {turn}"
        assert [fault for canary in canaries if (fault := canary.fault())] == []


# Two of the layouts are prototypes, which torch says once.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("entry", "row"), _cases(NO_TENSORS, LAYOUTS, MEMORY, NUMBERS))
def test_refused(entry: Any, row: Row, device: str) -> None:
    is_refused(entry, lambda good: {row.argument: row.spoil(good[row.argument])}, row.text, device)


@pytest.mark.parametrize(("entry", "row"), _cases(CPU_ONLY))
def test_refused_on_the_cpu(entry: Any, row: Row) -> None:
    is_refused(entry, lambda good: {row.argument: row.spoil(good[row.argument])}, row.text, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("entry", "row"), _cases(CUDA_ONLY))
def test_refused_on_cuda(entry: Any, row: Row) -> None:
    is_refused(entry, lambda good: {row.argument: row.spoil(good[row.argument])}, row.text, "cuda")


@pytest.mark.parametrize("name", ["kv", "cu_seqlens_comp"])
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
@pytest.mark.parametrize("entry", [e for e in ENTRIES.values() if e.name != "compress_thd"], ids=lambda e: e.name)
def test_inside_a_transform(entry: Any, transform: Any, name: str) -> None:
    """torch.func hands wrappers to what it transforms."""

    def spoil(good: Arguments) -> Arguments:
        spoilt = good[name][None] if transform is torch.func.vmap else good[name]

        def inside(tensor: Tensor) -> Tensor:
            call(entry, good | {name: tensor}, "cpu")
            return tensor

        transform(inside)(spoilt)
        raise AssertionError("taken")

    is_refused(entry, spoil, rf"{name}: got a Tensor that wraps others or has no memory of its own", "cpu")


def test_transforms_of_the_operator() -> None:
    """`compress_thd` is torch's to transform; only the number of rows cannot be read inside vmap."""
    good, _ = ENTRIES["compress_thd"].arguments()
    offsets = good["cu_seqlens_comp"]
    want = specified().out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is slow so
        results = torch.func.vmap(lambda kv: compress_thd(**good | {"kv": kv}))(torch.stack([good["kv"]] * 2))
    assert all(same_bits(result, want) for result in results)
    for rows in (3, None):
        given = good | {"total_comp": rows}
        alike = torch.func.functionalize(lambda c, given=given: compress_thd(**given | {"cu_seqlens_comp": c}))
        assert same_bits(alike(offsets), want[: rows or 2])
    with pytest.raises(ValueError, match=r"^cu_seqlens_comp: got one inside torch\.func\.vmap, need one to read"):
        torch.func.vmap(lambda c: compress_thd(**good | {"cu_seqlens_comp": c, "total_comp": None}))(offsets[None])


@pytest.mark.parametrize("entry", ["compress_thd", "forward wrapper"])
@pytest.mark.parametrize("spoil", [freed, _cut_short])
def test_rows_are_not_read_from_no_memory(entry: str, spoil: Any) -> None:
    """Without a total_comp the last offset is read first."""

    def bad(good: Arguments) -> Arguments:
        return {"cu_seqlens_comp": spoil(good["cu_seqlens_comp"]), "total_comp": None}

    is_refused(ENTRIES[entry], bad, r"cu_seqlens_comp: got a storage of \d bytes, need 12 \(freed", "cpu")


@pytest.mark.parametrize("bad", NO_STREAMS, ids=repr)
def test_no_stream(bad: Any) -> None:
    """What would pass for an integer is refused before a device is asked."""
    with pytest.raises(ValueError, match=r"^stream: got .+, need a torch\.cuda\.Stream or the handle of a CUDA stream"):
        torch_stream(bad, torch.device("cuda", 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("entry", "row"), _cases(CONTENTS))
def test_contents_refused(entry: Any, row: Row, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", device == "cuda")
    is_refused(entry, lambda good: {row.argument: row.spoil(good[row.argument])}, row.text, device)
