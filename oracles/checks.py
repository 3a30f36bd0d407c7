"""What the oracles say of an argument that is none of theirs: its name, what came and what is needed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np


def require(name: str, value: object, kind: type) -> None:
    """Raise ValueError if `value` is no `kind`, a class of the oracles."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: got {type(value).__name__}, need csa_gate.oracles.{kind.__name__}")


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
