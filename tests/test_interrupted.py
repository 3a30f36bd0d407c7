"""Runs that do not come to their end: whatever stops them, the summary says what did not run, and they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from csa_gate._stops import leave_sigterm, take_sigterm

from .test_plugin import BARE, KERNELS, MINE, SUITE

WAIT = 240  # seconds for what takes a few: a machine may be busy

# `met` is there once a test has begun; the process that runs it waits for what comes, or fails.
SLOW = """
import os, signal, time
from pathlib import Path
import pytest
from suite import Suite, clause

class TestGate(Suite):
    @clause("memory")
    def test_memory(self, kernel):
        Path("met").write_text(str(os.getpid()))
        HERE

    @clause("memory")
    def test_memory_again(self, kernel):
        pass
"""
STOPPED = "no gate: the run stopped before its end"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Kernels and a suite, as for the plugin's other tests, whose `test_zero` and `test_replay` come first."""
    (tmp_path / "mine.py").write_text(KERNELS)
    (tmp_path / "suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return tmp_path


def start(
    folder: Path, here: str, *args: str, deaf: bool = False, named: tuple[str, ...] = (MINE,)
) -> subprocess.Popen[str]:
    """A session whose test of `memory` runs `here`; `deaf` to SIGINT, as what runs in a shell's background."""
    (folder / "test_gate.py").write_text(SLOW.replace("HERE", here))
    command = [sys.executable, "-m", "pytest", *BARE, *named, *args]
    hears = ignore if deaf else listen
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hears
    )


def listen() -> None:
    """In a new process, which is else as deaf to SIGINT as this one: these tests may run in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignore() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end(session: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its exit status and its lines."""
    text, _ = session.communicate(timeout=WAIT)
    return session.returncode, text.splitlines()


def meet(folder: Path) -> int:
    """Wait for the test of `memory` to begin; the id of its process."""
    deadline = time.monotonic() + WAIT
    while not (folder / "met").exists() or not (folder / "met").read_text():
        assert time.monotonic() < deadline, "the test never began"
        time.sleep(0.05)
    return int((folder / "met").read_text())


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    ("number", "deaf"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["SIGINT", "SIGTERM", "SIGTERM-in-the-background"],
)
def test_stopped_in_a_test(folder: Path, number: signal.Signals, deaf: bool, workers: list[str]) -> None:
    """Ctrl-C, and what a time limit sends."""
    session = start(folder, "time.sleep(600)", *workers, deaf=deaf)
    worker = meet(folder)
    session.send_signal(number)
    if workers:
        os.kill(worker, number)  # as a terminal does, and whoever ends a group of processes
    status, lines = end(session)
    assert status == pytest.ExitCode.INTERRUPTED
    assert lines.count("not run: 2 of 6 tests") == 1
    assert lines.count("not run: every test of memory, which mine on cpu claims") == 1
    assert lines.count(STOPPED) == 1
    assert not [line for line in lines if "gate passed" in line]


def test_ctrl_c_before_the_first_test(folder: Path) -> None:
    """SIGINT while tests are collected: which kernel was to be gated is known all the same."""
    (folder / "test_slow.py").write_text(
        "import os, time\nfrom pathlib import Path\nPath('met').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    session = start(folder, "pass")
    meet(folder)
    session.send_signal(signal.SIGINT)
    status, lines = end(session)
    assert status == pytest.ExitCode.INTERRUPTED
    assert "not run: all tests; the run stopped before they were collected" in lines
    assert STOPPED in lines


# Where a session may be before a test is collected, and what of it waits there.
MEET = "Path('met').write_text(str(os.getpid()))\n    time.sleep(600)\n"
EARLY = {
    "configured": ([], f"def pytest_configure():\n    {MEET}"),
    "started": ([], f"def pytest_sessionstart():\n    {MEET}"),
    "collecting": ([], f"def pytest_collection():\n    {MEET}"),
    "bringing-up-nodes": (["-n2"], f"def pytest_configure_node():\n    {MEET}"),
    "workers-collecting": (
        ["-n1"],
        f"def pytest_collection(session):\n    if not hasattr(session.config, 'workerinput'): return\n    {MEET}",
    ),
}
NAMED = [
    *((where, (MINE,)) for where in EARLY),
    ("started", ("--csa-device=cpu",)),
    ("bringing-up-nodes", ("--pyargs", "csa_gate.suites")),
]
# Ctrl-C is pytest's own matter wherever it comes, so that two places do.
STOPS = [(*place, signal.SIGTERM) for place in NAMED] + [
    (where, (MINE,), signal.SIGINT) for where in ("started", "bringing-up-nodes")
]


@pytest.mark.parametrize(("where", "named", "number"), STOPS)
def test_stopped_before_collection(folder: Path, where: str, number: signal.Signals, named: tuple[str, ...]) -> None:
    """From its first hook on, a session whose command line names a gate says what did not run, once."""
    options, conftest = EARLY[where]
    (folder / "conftest.py").write_text(f"import os, time\nfrom pathlib import Path\n{conftest}")
    session = start(folder, "pass", *options, named=named)
    waiting = meet(folder)
    session.send_signal(number)
    status, lines = end(session)
    assert status == pytest.ExitCode.INTERRUPTED
    assert lines.count("not run: all tests; the run stopped before they were collected") == 1
    assert lines.count(STOPPED) == 1
    is_gone(waiting)


def is_gone(process: int) -> None:
    """Wait for a process to end."""
    deadline = time.monotonic() + WAIT
    while (Path("/proc") / str(process)).exists():
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.05)


def test_exit_before_collection(folder: Path) -> None:
    """A conftest that ends the session as it starts, as if all were well: nothing was gated."""
    (folder / "conftest.py").write_text(
        "import pytest\ndef pytest_sessionstart(): pytest.exit('done', returncode=0)\n"
    )
    status, lines = end(start(folder, "pass"))
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "not run: all tests; the run stopped before they were collected" in lines
    assert STOPPED in lines


@pytest.mark.parametrize("where", ["configured", "started", "bringing-up-nodes"])
def test_other_sessions_die_of_sigterm(folder: Path, where: str) -> None:
    """Where nothing names a gate, what SIGTERM does is left as it was."""
    options, conftest = EARLY[where]
    (folder / "conftest.py").write_text(f"import os, time\nfrom pathlib import Path\n{conftest}")
    session = start(folder, "pass", *options, named=())
    meet(folder)
    session.send_signal(signal.SIGTERM)
    status, lines = end(session)
    assert status == -signal.SIGTERM
    assert not [line for line in lines if "gate:" in line or "not run" in line]


def test_imports_are_not_broken_off(folder: Path) -> None:
    """A stop that comes while torch is imported waits for the import, which could swallow it."""
    (folder / "conftest.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'numpy.exceptions':\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "            print('it came', file=sys.__stderr__, flush=True)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    for named in ((MINE,), ("--pyargs", "csa_gate.suites")):
        status, lines = end(start(folder, "pass", "-s", named=named))
        assert "it came" in lines
        assert status == pytest.ExitCode.INTERRUPTED
        assert lines.count(STOPPED) == 1


def test_worker_lost_while_it_starts(folder: Path) -> None:
    """It is replaced, and every test runs: that is a gate like any other."""
    (folder / "conftest.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        "def pytest_sessionstart(session):\n"
        "    if hasattr(session.config, 'workerinput') and not Path('met').exists():\n"
        "        Path('met').write_text('')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, lines = end(start(folder, "pass", "-n1"))
    assert (folder / "met").exists()
    assert status == pytest.ExitCode.OK
    assert [line for line in lines if line.startswith("gate passed")]


def test_sessions_inside_another_leave_its_handler() -> None:
    """One that did not take SIGTERM does not give it back."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert take_sigterm() and not take_sigterm()
        handler = signal.getsignal(signal.SIGTERM)
        assert handler is not signal.SIG_DFL
        pytest.main(["--version", "-p", "no:cacheprovider", MINE])
        assert signal.getsignal(signal.SIGTERM) is handler
        leave_sigterm()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_worker_killed(folder: Path) -> None:
    """SIGKILL takes one test and its worker; the others run in another worker, and the gate has failed."""
    session = start(folder, "time.sleep(600)", "-n1")
    os.kill(meet(folder), signal.SIGKILL)
    status, lines = end(session)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "gate failed: 1 tests took their worker process with them: test_gate.py::TestGate::test_memory" in lines
    assert not [line for line in lines if line.startswith(("no gate", "gate passed", "not run"))]


def test_worker_killed_and_not_replaced(folder: Path) -> None:
    """Where no worker takes over, what was left for it counts as not run."""
    session = start(folder, "time.sleep(600)", "-n1", "--max-worker-restart=0")
    os.kill(meet(folder), signal.SIGKILL)
    status, lines = end(session)
    assert status != 0
    assert "not run: 1 of 6 tests" in lines
    assert [line for line in lines if line.startswith("gate failed: 1 tests took their worker process with them")]


@pytest.mark.parametrize("options", [["-x"], ["--maxfail=1"], ["-x", "-n1"]], ids=" ".join)
def test_first_failure_ends_the_run(folder: Path, options: list[str]) -> None:
    """What comes after the failure is named; the failure itself is what the gate says last."""
    status, lines = end(start(folder, "assert 0", *options))
    assert status == (pytest.ExitCode.INTERRUPTED if "-n1" in options else pytest.ExitCode.TESTS_FAILED)
    assert "not run: 1 of 6 tests" in lines
    assert "gate failed: 1 tests failed" in lines


@pytest.mark.parametrize("status", [0, 1])
def test_exit_from_within(folder: Path, status: int) -> None:
    """A kernel or a test that ends the session, as if all were well: it is not."""
    code, lines = end(start(folder, f"pytest.exit('done', returncode={status})"))
    assert code == (status or pytest.ExitCode.TESTS_FAILED)
    assert "not run: 2 of 6 tests" in lines
    assert "not run: every test of memory, which mine on cpu claims" in lines
    assert STOPPED in lines


def test_other_sessions_are_left_alone(folder: Path) -> None:
    """Without a gate test there is nothing to say, whatever stops the run."""
    (folder / "test_other.py").write_text(
        "import pytest\ndef test_a(): pytest.exit('x', returncode=0)\ndef test_b(): 0"
    )
    command = [sys.executable, "-m", "pytest", *BARE, "test_other.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0
    assert "gate" not in done.stdout.replace("csa-gate-", "")


COMPILING = """
import os, signal, sys, threading, time
from csa_gate._stops import held_back

came = []
signal.signal(signal.SIGINT, lambda *_: came.append(time.monotonic()))
with held_back():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    inside = list(came)
assert not inside and len(came) == 1, (inside, came)

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda *_: came.append("terminated"))
try:
    with held_back():
        os.kill(os.getpid(), signal.SIGINT)
        finished = True
except KeyboardInterrupt:
    print("interrupted, finished =", finished)

with held_back():
    os.kill(os.getpid(), signal.SIGTERM)
    assert "terminated" not in came
assert came.pop() == "terminated"

with held_back():
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

failed = []
def elsewhere():
    try:
        with held_back():
            pass
    except BaseException as error:
        failed.append(error)
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
assert not failed
"""


def test_ctrl_c_waits_for_the_compiler() -> None:
    """An interrupt inside takes effect at the end, once, and where no handler can be set nothing is done."""
    done = subprocess.run([sys.executable, "-c", COMPILING], capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stdout) == (0, "interrupted, finished = True\n"), done.stderr


INTERRUPTED = """
import os, signal, sys, traceback
from csa_gate.fused import compiled, config

signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(frame, event, arg):  # as Ctrl-C would, in the middle of building the code
    if event == "call" and frame.f_code.co_name == "locate":
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(interrupt)
try:
    compiled.compile_function("forward", config.Config(4, 2, 2, 1, 1, "portable", config.LOOP, None))
except KeyboardInterrupt as error:
    print(sys.getprofile(), [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)])
"""


def test_ctrl_c_inside_the_compiler() -> None:
    """An interrupt while the DSL builds code is raised after that: no frame of the DSL's is in its traceback."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=WAIT)
    frames = ["<string>", "contextlib.py", "contextlib.py", "_stops.py"]
    assert (done.returncode, done.stdout) == (0, f"None {frames}\n"), done.stderr
