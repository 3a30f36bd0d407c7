"""A GPU for each worker of xdist's. Imports neither torch nor anything that opens CUDA."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_devices(specs: Iterable[Any]) -> None:
    """Give every worker on this machine its own first CUDA device, by its environment.

    The others stay visible, after it in a ring: a test about a device that is not current finds one, and whatever takes
    the default device takes the worker's own. More workers than devices take turns. Workers whose specification sets
    the variable keep it; with fewer than two devices nothing is done.

    Args:
        specs: of xdist's workers, `execnet.XSpec`, before any is started.
    """
    local = [spec for spec in specs if spec.popen and not spec.via]
    devices = visible_devices() if local else []
    if len(devices) < 2:
        return
    for number, spec in enumerate(local):
        first = number % len(devices)
        spec.env.setdefault(VISIBLE, ",".join(devices[first:] + devices[:first]))


def visible_devices() -> list[str]:
    """The CUDA devices that processes started from here can use, each as CUDA_VISIBLE_DEVICES names it."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return [str(number) for number in range(_device_count())]
    # As CUDA reads it: a name that can be none ends the list.
    return list(takewhile(lambda name: name and not name.startswith("-"), map(str.strip, given.split(","))))


def _device_count() -> int:
    """GPUs that the driver's own library for management lets this process open, 0 where there is none.

    It counts those of other people's too, which CUDA gives no number: naming one would hide all after it.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if library.nvmlInit_v2():
        return 0
    count, handle = ctypes.c_uint(), ctypes.c_void_p()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    opened = [library.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle)) == 0 for i in range(count.value)]
    library.nvmlShutdown()
    return sum(opened)
