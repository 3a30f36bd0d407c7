"""A command in a process of its own, so that no kernel can end it as if all were well."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

_MARK = "CSA_GATE_SUPERVISED"  # in the environment of the child: where its verdict goes, and its parent's id
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def supervised(work: Callable[[], int]) -> int:
    """`work()` in a child of this process, which is started like this one; its exit status.

    The status is 0 only if `work` returned 0: a child that leaves with 0 before (`os._exit(0)`, a library's `exit(0)`)
    is an error, said in one line. SIGINT, SIGTERM and SIGHUP reach the child, and where it dies of a signal, so does
    this process. To be called by the program itself, at its start: the child is the same program, which calls it too.

    Returns:
        A status to exit with, both here and in the child.
    """
    mark = os.environ.pop(_MARK, None)
    return _watch() if mark is None else _deliver(work, *map(int, mark.split(":")))


def _watch() -> int:
    """Start the child, wait for it, and make sure that there is a verdict behind its exit status."""
    verdict, deliver = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the child's status with it
    watched = {*_PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, _MARK: f"{deliver}:{os.getpid()}"},
        pass_fds=[deliver],
    )
    os.close(deliver)
    while child.poll() is None:
        came = signal.sigwaitinfo(watched)
        # One of a terminal's keys the child gets without us, and twice would be once too often.
        if came.si_signo != signal.SIGCHLD and came.si_code <= 0:
            child.send_signal(came.si_signo)
    if child.returncode < 0:
        _die_of(-child.returncode)
    os.set_blocking(verdict, False)
    try:
        delivered = os.read(verdict, 1)
    except BlockingIOError:  # a process that the child left behind holds the other end
        delivered = b""
    if child.returncode or delivered:
        return child.returncode or delivered[0]
    print("csa-gate: the process was ended, with exit status 0, before there was a verdict", file=sys.stderr)
    return 1


def _deliver(work: Callable[[], int], deliver: int, parent: int) -> int:
    """In the child: work, and hand over what came of it."""
    os.set_inheritable(deliver, False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # or it would go on without anyone to pass signals on
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_PASSED_ON, signal.SIGCHLD})
    status = work()
    os.write(deliver, bytes([status]))
    return status


def _die_of(number: int) -> NoReturn:
    """End this process by a signal, as the child was."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)
