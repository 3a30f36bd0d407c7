"""Work on a CUDA stream that the caller names, and the memory that it holds on to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import SupportsInt, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .checks import is_integer

StreamLike: TypeAlias = torch.cuda.Stream | SupportsInt
"""A torch stream, or the handle of a CUDA stream: a `cuda.bindings.driver.CUstream` or an integer."""

_LEGACY = (0, 1)  # the handles by which CUDA knows the default stream
_PER_THREAD = 2  # stands for another stream in every host thread


def call_on(
    stream: StreamLike | None, tensors: Sequence[Tensor], launch: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """`launch()` with `stream` as torch's current stream.

    Nothing orders an explicit stream before or after the current one: that is up to the caller. What is recorded is
    the use of memory: `tensors` are not handed out again before the stream is done with them. What `launch` returns
    was allocated on the stream, and is held for the caller's current stream too.

    Args:
        stream: None for the current stream of the tensors' device, where torch's usual rules do.
        tensors: all that the work reads or writes and the caller owns, the first on the device in question.
        launch: enqueues the work and returns what it allocated.

    Raises:
        ValueError: `stream` is no stream, one of another device or one that differs from thread to thread.
    """
    if stream is None:
        return launch()
    device = tensors[0].device
    target = torch_stream(stream, device)
    caller = torch.cuda.current_stream(device)
    with torch.cuda.stream(target):
        results = launch()
    for tensor in tensors:
        tensor.record_stream(target)
    for result in results:
        result.record_stream(caller)
    return results


def torch_stream(stream: StreamLike, device: torch.device) -> torch.cuda.Stream:
    """The torch stream that `stream` stands for on `device`. Raises ValueError as `call_on`."""
    if device.type != "cuda":
        raise ValueError(f"stream: got {stream!r} for tensors on {device}, need None there")
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            raise ValueError(f"stream: got one of {stream.device}, need one of {device}, where kv is")
        return stream
    # True and 1.0 would pass for 1, a handle of the default stream.
    unlike = isinstance(stream, Number | np.generic | Tensor) and not is_integer(stream)
    if unlike or not isinstance(stream, SupportsInt):
        raise ValueError(f"stream: got {stream!r}, need a torch.cuda.Stream or the handle of a CUDA stream")
    handle = int(stream)
    if handle == _PER_THREAD:
        raise ValueError("stream: got the per-thread default stream (2), need one that is the same in every thread")
    # torch's own objects where it has one: an external stream made of handle 0 would be a new one.
    default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    if handle in _LEGACY or handle == default.cuda_stream:
        return default
    if handle == current.cuda_stream:
        return current
    external: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    return external
