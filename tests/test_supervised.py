"""`check` and `soak` as programs: a kernel that ends its process never passes, and signals do what they always did."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from csa_gate.__main__ import main

from .test_interrupted import WAIT, listen

PROBLEM = "Problem(lens=(9, 3), ratio=4, coff=2, head_dim=8)"
KERNELS = '''
import ctypes, os, signal, sys, time
from pathlib import Path
from csa_gate.fixtures.adapters.eager import EagerKernel

class Ends(EagerKernel):
    """Ends the process in the third call."""
    calls = 0

    def forward(self, *inputs, **outputs):
        self.calls += 1
        if self.calls == 3 or "check" in sys.argv:
            self.end()
        super().forward(*inputs, **outputs)

class Exits(Ends):
    def end(self):
        os._exit(0)

class ExitsInC(Ends):
    def end(self):
        ctypes.CDLL(None).exit(0)

class ExitsAndStays(Ends):
    """Its copy, with all that it has open, lives on for a while."""
    def end(self):
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(20)
        os._exit(0)

class Exits3(Ends):
    def end(self):
        os._exit(3)

class IsKilled(Ends):
    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Waits(Ends):
    def end(self):
        Path("met.new").write_text(str(os.getpid()))
        Path("met.new").rename("met")
        time.sleep(600)
'''
Start = Callable[..., subprocess.Popen[str]]
ENDED = "csa-gate: the process was ended, with exit status 0, before there was a verdict\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ends.py").write_text(KERNELS)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts the program, on the CPU and deaf to no signal; at the end it is killed where it still runs."""
    programs = []

    def start(command: str, kernel: str, *options: str, **more: Any) -> subprocess.Popen[str]:
        most = ["--problem", PROBLEM] if command == "check" else ["--minutes", "60", "--seed", "0"]
        argv = [sys.executable, "-m", "csa_gate", command, "--device", "cpu", "--kernel", kernel, *most, *options]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": listen}
        programs.append(subprocess.Popen(argv, cwd=folder, text=True, **streams | more))
        return programs[-1]

    yield start
    for program in programs:
        with program:
            program.kill()


def meet(folder: Path) -> int:
    """Wait for the kernel `Waits` to be called; the id of the process that it runs in."""
    deadline = time.monotonic() + WAIT
    while not (folder / "met").exists():
        assert time.monotonic() < deadline, "the kernel was never called"
        time.sleep(0.05)
    return int((folder / "met").read_text())


def is_gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("command", "kernel", "want"),
    [
        ("check", "Exits", 1),
        ("soak", "Exits", 1),
        ("check", "ExitsInC", 1),
        ("check", "ExitsAndStays", 1),
        ("check", "Exits3", 3),
        ("soak", "IsKilled", -signal.SIGKILL),
    ],
)
def test_a_kernel_that_ends_the_process(command: str, kernel: str, want: int, start: Start) -> None:
    """An exit status of 0 becomes 1; another, or a signal, is what it would be without anyone looking on."""
    program = start(command, f"ends.py:{kernel}")
    out, err = program.communicate(timeout=WAIT)
    assert program.returncode == want, err
    assert err == (ENDED if want == 1 else "")
    assert "kept" not in out and "passed" not in out


def test_statuses_and_outputs(start: Start) -> None:
    """A verdict, a help and a mistake come through as they are."""
    for options, want, text in (
        (("check", "eager"), 0, "contract kept\n"),
        (("check", "eager", "--help"), 0, "usage: python -m csa_gate check"),
        (("check", "nosuch"), 2, "python -m csa_gate check: error: kernel 'nosuch': need "),
    ):
        program = start(*options)
        out, err = program.communicate(timeout=WAIT)
        assert program.returncode == want
        assert (err if want else out).startswith(text)
        assert not (out if want else err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_another_process(number: signal.Signals, start: Start, folder: Path) -> None:
    """It reaches the kernel's process: the soak ends with its counts and its file."""
    program = start("soak", "ends.py:Waits", "--json", "soak.json")
    worker = meet(folder)
    assert worker != program.pid
    program.send_signal(number)
    out, err = program.communicate(timeout=WAIT)
    assert (program.returncode, err) == (130, "")
    assert out.endswith("stopped before its end\n")
    assert json.loads((folder / "soak.json").read_text())["stopped"] is True


def test_sigint_of_a_terminal(start: Start, folder: Path) -> None:
    """A key reaches both processes, and counts once."""

    def take_terminal() -> None:
        listen()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    leader, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    program = start("soak", "ends.py:Waits", **streams, preexec_fn=take_terminal, start_new_session=True)
    os.close(terminal)
    meet(folder)
    os.write(leader, b"\x03")
    text = b""
    while piece := _read(leader):
        text += piece
    os.close(leader)
    assert program.wait(WAIT) == 130
    assert text.decode().endswith("stopped before its end\r\n")
    assert b"Traceback" not in text


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 4096)
    except OSError:  # the terminal's other end is closed
        return b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_both_processes(number: signal.Signals, start: Start, folder: Path) -> None:
    """What stops or kills the one leaves none of the other, and shows in the status."""
    program = start("check", "ends.py:Waits")
    worker = meet(folder)
    program.send_signal(number)
    program.communicate(timeout=WAIT)
    assert program.returncode == (-number if number == signal.SIGKILL else 130)
    assert is_gone(worker)


def test_exit_in_the_kernels_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sys.exit(0)` where the command loads the kernel is no success, in whatever process."""
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert main(["check", "--kernel", f"{folder}/leaves.py:kernel", "--problem", PROBLEM]) == 1
    assert re.search(r"csa_gate check: ended by SystemExit: 0$", capsys.readouterr().err, re.MULTILINE)
