"""SIGTERM, which time limits send, taken for Ctrl-C: a run that either stops still says how far it came."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def take_sigterm() -> None:
    """From now on the first SIGTERM does what SIGINT does; a second one ends the process.

    Nothing changes where the program has a handler of its own, and in any thread but the main one.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _as_ctrl_c)


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
