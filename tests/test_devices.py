"""A GPU for each worker of xdist's, on a machine with as many as CUDA_VISIBLE_DEVICES says; none is needed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import execnet
import pytest
import torch

from csa_gate import _devices
from csa_gate._devices import VISIBLE, share_devices, visible_devices

from .test_plugin import BARE, KERNELS, MINE, SUITE


def shared(monkeypatch: pytest.MonkeyPatch, visible: str | None, specs: list[str], gpus: int = 0) -> list[str | None]:
    """What each worker gets as CUDA_VISIBLE_DEVICES; None where it inherits that of this process."""
    monkeypatch.setattr(_devices, "_device_count", lambda: gpus)
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    made = [execnet.XSpec(spec) for spec in specs]
    share_devices(made)
    return [spec.env.get(VISIBLE) for spec in made]


@pytest.mark.parametrize(
    ("visible", "gpus", "workers", "got"),
    [
        (None, 4, 2, ["0,1,2,3", "1,2,3,0"]),
        (None, 2, 5, ["0,1", "1,0", "0,1", "1,0", "0,1"]),
        (None, 1, 3, [None] * 3),
        (None, 0, 3, [None] * 3),
        ("5,2", 8, 3, ["5,2", "2,5", "5,2"]),
        ("GPU-7c3f, GPU-91aa,MIG-0b", 8, 2, ["GPU-7c3f,GPU-91aa,MIG-0b", "GPU-91aa,MIG-0b,GPU-7c3f"]),
        ("3", 8, 2, [None] * 2),
        ("", 8, 2, [None] * 2),
        ("-1", 8, 2, [None] * 2),
        ("NoDevFiles", 8, 2, [None] * 2),
        ("4,5,-1,6", 8, 2, ["4,5", "5,4"]),
        ("4,5,,6", 8, 2, ["4,5", "5,4"]),
    ],
)
def test_shares(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int, workers: int, got: list[str | None]
) -> None:
    """Each has its own first; who has more workers than devices shares them evenly; a list given is the list shared."""
    assert shared(monkeypatch, visible, ["popen"] * workers, gpus) == got


def test_workers_that_are_not_ours_to_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose environment was given keeps it; of another machine's devices nothing is known here."""
    specs = [f"popen//env:{VISIBLE}=7", "ssh=somewhere//python=python3", "popen//via=gateway", "popen"]
    assert shared(monkeypatch, "0,1", specs) == ["7", None, None, "1,0"]


def test_visible_devices_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no devices, no error."""
    monkeypatch.delenv(VISIBLE, raising=False)

    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_devices.ctypes, "CDLL", none)
    assert visible_devices() == []


@pytest.mark.parametrize(("fails", "count"), [((), 4), ((1, 3), 2), ((0, 1, 2, 3), 0), (("init",), 0)], ids=str)
def test_only_devices_that_open_count(
    fails: tuple[int | str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that knows four GPUs, some of which are somebody else's."""

    def init() -> int:
        return int("init" in fails)

    def get_count(there: Any) -> int:
        there._obj.value = 4
        return 0

    driver = SimpleNamespace(
        nvmlInit_v2=init,
        nvmlDeviceGetCount_v2=get_count,
        nvmlDeviceGetHandleByIndex_v2=lambda i, handle: 4 if i in fails else 0,
        nvmlShutdown=lambda: 0,
    )
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(_devices.ctypes, "CDLL", lambda name: driver)
    assert visible_devices() == [str(i) for i in range(count)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_are_counted() -> None:
    """As many as torch finds, in a process that has a variable of its own or none."""
    code = (
        "import torch; from csa_gate._devices import visible_devices as v; print(torch.cuda.device_count(), len(v()))"
    )
    for given in (os.environ.get(VISIBLE), None):
        environment = {k: v for k, v in os.environ.items() if k != VISIBLE} | ({VISIBLE: given} if given else {})
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        torchs, ours = done.stdout.split()
        assert torchs == ours


LOOK = """
import json, os, sys
from pathlib import Path

SEEN = {"torch": "torch" in sys.modules, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}

def pytest_sessionfinish():
    Path(os.environ.get("PYTEST_XDIST_WORKER", "main") + ".json").write_text(json.dumps(SEEN))
"""


def seen(folder: Path) -> dict[str, dict[str, Any]]:
    """What each process saw when its conftest was loaded."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_workers_of_a_session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set before torch is there; without workers nothing is touched; and both gates say the same."""
    monkeypatch.setenv(VISIBLE, "GPU-aa,GPU-bb")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # this may be a worker itself
    pytester.makepyfile(
        mine=KERNELS, suite=SUITE, test_gate="from suite import Suite\nclass TestGate(Suite):\n    pass\n"
    )
    pytester.makeini("[pytest]\npythonpath = .\n")
    pytester.makeconftest(LOOK)
    alone = pytester.runpytest_subprocess(*BARE, MINE, "-n0")
    assert seen(pytester.path) == {"main": {"torch": False, "visible": "GPU-aa,GPU-bb"}}
    shared = pytester.runpytest_subprocess(*BARE, MINE, "-n3")
    workers = ("GPU-aa,GPU-bb", "GPU-bb,GPU-aa", "GPU-aa,GPU-bb")
    want = {f"gw{i}": {"torch": False, "visible": visible} for i, visible in enumerate(workers)}
    assert seen(pytester.path) == want | {"main": {"torch": False, "visible": "GPU-aa,GPU-bb"}}
    last = "gate passed: mine on cpu (2 clauses)"
    summaries = [r.outlines[r.outlines.index("mine on cpu") : r.outlines.index(last)] for r in (alone, shared)]
    assert summaries[0] == summaries[1]
    assert alone.ret == shared.ret == 0


ON_CUDA = """
import json, os, torch
from pathlib import Path

def test_it():
    current = torch.cuda.current_device()
    found = {"current": current, "count": torch.cuda.device_count()}
    found["uuids"] = [str(torch.cuda.get_device_properties(i).uuid) for i in range(found["count"])]
    Path(os.environ["PYTEST_XDIST_WORKER"] + ".json").write_text(json.dumps(found))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_workers_on_cuda(pytester: pytest.Pytester) -> None:
    """Each worker's default device is its own, and all of them see all."""
    pytester.makepyfile(test_it=ON_CUDA)
    pytester.runpytest_subprocess(*BARE, "-n2", "--dist=each").assert_outcomes(passed=2)
    first, second = (json.loads((pytester.path / f"gw{i}.json").read_text()) for i in range(2))
    assert first["current"] == second["current"] == 0
    assert first["count"] == second["count"] == torch.cuda.device_count()
    assert first["uuids"][0] != second["uuids"][0]
    assert set(first["uuids"]) == set(second["uuids"])
