"""SIGTERM, which time limits send, taken for Ctrl-C, and both held back where they would do harm.

A run that either stops still says how far it came.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


def take_sigterm() -> bool:
    """From now on the first SIGTERM does what SIGINT does; a second one ends the process.

    Nothing changes where the program has a handler of its own, and in any thread but the main one. Returns whether
    something did: who took it leaves it, so that a session inside another does not undo what that one did.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _as_ctrl_c)
        return True
    return False


def leave_sigterm() -> None:
    """Undo `take_sigterm`."""
    if signal.getsignal(signal.SIGTERM) is _as_ctrl_c:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:  # a shell's background job is deaf to SIGINT
        raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let a SIGINT or SIGTERM that comes meanwhile take effect at the end, as if it had come then.

    The DSL calls back into Python from C++ code that no exception may cross: a KeyboardInterrupt there ends the process
    with `Fatal Python error: Aborted`: 8 of 60 did that were tried at random places of a compilation (4.8.1), against 0
    of 60 held back. An import of NumPy's or torch's that is broken off may swallow it, and leave half a module. Python
    runs signal handlers in the main thread alone; elsewhere nothing is done, nor about a signal for which Python has
    no handler to call.
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
