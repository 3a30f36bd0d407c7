"""`parse_problem`: the inverse of `str(problem)`, so that a problem named in a message can be run again."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from typing import Any

from .problem import Problem

_REQUIRED = {f.name: f.default is MISSING for f in fields(Problem)}
_MAX_SEGMENTS = 2**24  # keeps `(0,) * 10**12` from eating the memory


def parse_problem(text: str) -> Problem:
    """The problem that `text` spells, as `str` or `repr` of a Problem do; nothing is evaluated.

    Accepted is a call of `Problem` with keyword arguments: tuples of integers, repeated by `* count` and joined by
    `+`, for `lens`; an integer for the others, or None for a capacity.

    Raises:
        ValueError: for anything else, for more than 2^24 segments, and for what `Problem` refuses.
    """
    wanted = "need Problem(lens=(...), ratio=..., coff=..., head_dim=...)"
    if not isinstance(text, str):
        raise ValueError(f"problem: got {text!r}, {wanted}")
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"problem: got {text!r}, {wanted}: {error}") from None
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name) or call.func.id != "Problem":
        raise ValueError(f"problem: got {text!r}, {wanted}")
    values: dict[str, Any] = {}
    for name, node in ((keyword.arg, keyword.value) for keyword in call.keywords):
        if name not in _REQUIRED:
            raise ValueError(f"problem: got the argument {name!r}, need {', '.join(_REQUIRED)}")
        if name == "lens":
            values[name] = _lens(node)
        elif _REQUIRED[name] or not (isinstance(node, ast.Constant) and node.value is None):
            values[name] = _integer(name, node)
    missing = [name for name, required in _REQUIRED.items() if required and name not in values]
    if missing:
        raise ValueError(f"problem: got {text!r}, need {', '.join(missing)} too")
    return Problem(**values)


def _lens(node: ast.expr) -> tuple[int, ...]:
    """A tuple of integers, or a sum of such, each perhaps repeated."""
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(node.right)
        node = node.left
    lens: list[int] = []
    for part in (node, *reversed(parts)):
        count = 1
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            count, part = _integer("lens", part.right), part.left
        if not isinstance(part, ast.Tuple):
            raise ValueError(f"lens: got {ast.unparse(part)}, need a tuple of integers")
        if len(lens) + count * len(part.elts) > _MAX_SEGMENTS:
            raise ValueError(f"lens: got more than {_MAX_SEGMENTS} segments, need at most that many")
        lens += [_integer("lens", element) for element in part.elts] * count
    return tuple(lens)


def _integer(name: str, node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(f"{name}: got {ast.unparse(node)}, need a non-negative integer")
