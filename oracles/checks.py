"""What the oracles say of an argument that is none of theirs: its name, what came and what is needed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def require(name: str, value: object, kind: type) -> None:
    """Raise ValueError if `value` is no `kind`, a class of the oracles."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: got {type(value).__name__}, need csa_gate.oracles.{kind.__name__}")


def require_tensor(name: str, value: object) -> None:
    """Raise ValueError if `value` is no tensor, or a nested one: torch gives no shape of that."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: got {type(value).__name__}, need a torch.Tensor")
    if value.is_nested:
        raise ValueError(f"{name}: got a nested tensor, need a strided tensor with memory")


def require_memory(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is strided and all of its elements lie in memory of its own."""
    if came := _instead_of_memory(tensor):
        raise ValueError(f"{name}: got {came}, need a strided tensor with memory")


def _instead_of_memory(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "device meta"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if isinstance(tensor, FakeTensor):
        return "a FakeTensor"
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:  # a zero tensor, a subclass's wrapper, one inside a transform of torch.func
        return f"a {type(tensor).__name__} that wraps others or has no memory of its own"
    steps = (step * (n - 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + sum(steps) + 1) * tensor.itemsize
    if tensor.numel() and storage.nbytes() < needed:
        return f"a storage of {storage.nbytes()} bytes for {needed}"
    return ""


def integer(name: str, value: object, least: int) -> int:
    """`value`, an integer of Python's or NumPy's, as a Python integer.

    Raises:
        ValueError: it is none (a bool is none), or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}: got {value!r}, need an integer >= {least}")
    return int(value)


def some_of(name: str, value: Any, known: Collection[str]) -> tuple[str, ...]:
    """`value`, a collection of names.

    Raises:
        ValueError: it is no collection, or a string, or a name in it is not in `known`.
    """
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"{name}: got {value!r}, need a collection of names")
    for one in value:
        if one not in known:
            raise ValueError(f"{name}: got {one!r}, need some of {', '.join(known)}")
    return tuple(value)


def one_of(name: str, value: object, known: Collection[object]) -> None:
    """Raise ValueError if `value`, of whatever type, is not among `known`."""
    if not any(type(value) is type(k) and value == k for k in known):
        raise ValueError(f"{name}: got {value!r}, need one of {', '.join(map(str, known))}")
