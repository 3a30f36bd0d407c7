"""What the judge compares against, computed on first use and kept while its `Inputs` lives."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from torch import Tensor

from .inputs import Inputs, Result

_KEPT = 2  # Inputs whose references are kept: a suite judges one at a time, and compares with one more


def _eager(inputs: Inputs) -> Result:
    from .eager import eager

    return eager(inputs)


def _native(inputs: Inputs) -> Result:
    from .ordered import ordered

    return ordered(inputs, exp="native")


def _portable(inputs: Inputs) -> Result:
    from .ordered import ordered

    return ordered(inputs, exp="portable")


def _fp64(inputs: Inputs) -> Result:
    from .fp64 import fp64

    return fp64(inputs)


def _bound(inputs: Inputs) -> Result:
    from .bound import error_bound

    return error_bound(inputs)


ORACLES: dict[str, Callable[[Inputs], Result]] = {
    "eager": _eager,
    "native": _native,
    "portable": _portable,
    "fp64": _fp64,
    "bound": _bound,
}


@dataclass
class _Entry:
    inputs: weakref.ref[Inputs]
    versions: tuple[int, ...]
    results: dict[str, Result] = field(default_factory=dict)


_CACHE: OrderedDict[int, _Entry] = OrderedDict()


def reference(inputs: Inputs, name: str) -> Result:
    """What the oracle `name` (a key of `ORACLES`) makes of `inputs`; computed once for each Inputs object.

    The cache goes by the identity of the object and by the version counters of its tensors, so data written into
    the same tensors in place gets references of its own; it keeps no Inputs alive. Tensors made in torch's inference
    mode have no such counter, and their references are computed anew each time.
    """
    results = _results(inputs)
    if name not in results:
        results[name] = ORACLES[name](inputs)
    return results[name]


def _results(inputs: Inputs) -> dict[str, Result]:
    key = id(inputs)
    tensors = [v for f in fields(inputs) if isinstance(v := getattr(inputs, f.name), Tensor)]
    if any(t.is_inference() for t in tensors):
        return {}
    versions = tuple(t._version for t in tensors)
    entry = _CACHE.get(key)
    if entry is None or entry.inputs() is not inputs or entry.versions != versions:
        entry = _CACHE[key] = _Entry(weakref.ref(inputs, lambda _: _CACHE.pop(key, None)), versions)
    _CACHE.move_to_end(key)
    while len(_CACHE) > _KEPT:
        _CACHE.popitem(last=False)
    return entry.results
