"""The pytest plugin: chooses kernel and device, holds each kernel to its own claims, and sums up clause by clause.

A gate test is a test that carries the marker `clause("name")`. It uses the fixtures `kernel` and `device`. Until one
is collected, or an option of this plugin stands on the command line, only pytest and the standard library are
imported.

A session in which gate tests took part fails, whatever pytest thinks of it,
- if none of them passed or failed, of any kernel under test;
- if a kernel claims a clause of which no test passed or failed, unless the selection was narrowed, in which case the
  summary says that this was no gate;
- if it was stopped before its end, or if a test took a worker of xdist's with it; the summary says what did not run.
  A worker that is lost while it starts is replaced, and leaves nothing out. SIGTERM stops a session as Ctrl-C does,
  from the start where the command line names a kernel, a device or our own suites, else once there is a gate test;
- if the command line names a kernel or a device and no gate test took part. Tests that -m deselects take no part;
  where it deselects everything, pytest's own exit status says so.

Workers of xdist's each get a CUDA device of their own, whatever tests they run (see `_devices.share_devices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ._gate import LEVELS, Gate
from ._items import CLAIM_FIXTURE, CLAUSE_KEY, class_kernel, describe, subject_of
from ._summary import CLAIMS

if TYPE_CHECKING:
    import torch

    from csa_gate.fixtures.kernels import Kernel

_GATE = pytest.StashKey[Gate]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --csa-kernel and --csa-device."""
    group = parser.getgroup("csa-gate", "the kernel under test")
    group.addoption(
        "--csa-kernel",
        default="fused",
        metavar="KERNEL",
        help="fused, eager, package.module:attr or path/to/file.py:attr (default: fused)",
    )
    group.addoption(
        "--csa-device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where it runs (default: auto, which is cuda if there is one and the kernel runs there, else cpu)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers and begin to watch, before others take their time."""
    for level, what in LEVELS.items():
        config.addinivalue_line("markers", f"{level}: gate test of {what}")
    config.addinivalue_line("markers", "clause(name): gate test of this clause of a kernel's contract")
    config.stash[_GATE] = Gate(config)
    config.pluginmanager.register(config.stash[_GATE], "csa_gate_session")


@pytest.fixture(scope="class")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """The kernel under test: that of --csa-kernel, unless the test class has an attribute `kernel`.

    The attribute is what `make_kernel` takes, or a string as --csa-kernel takes it. A class, module or conftest may
    override this fixture instead, in any scope.
    """
    from csa_gate.fixtures.kernels import KernelError, load_kernel, make_kernel

    own = class_kernel(request.cls)
    try:
        if own is None:
            return request.config.stash[_GATE].kernel
        return load_kernel(own) if isinstance(own, str) else make_kernel(own, f"{request.cls.__name__}.kernel")
    except KernelError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.fixture
def device(kernel: Kernel, pytestconfig: pytest.Config) -> torch.device:
    """The device of --csa-device; `auto` is cuda where there is one and `kernel` runs there, else cpu."""
    from csa_gate.fixtures.kernels import KernelError, check_kernel, choose_device

    try:
        return choose_device(pytestconfig.getoption("csa_device"), check_kernel(kernel, "fixture 'kernel'"))
    except KernelError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.fixture(name=CLAIM_FIXTURE)
def _claim(request: pytest.FixtureRequest) -> None:
    """Note which kernel a gate test is of, and skip the test if that kernel does not claim its clause.

    Where there is no such kernel, one test of a class fails, for all of them.
    """
    from csa_gate.fixtures.kernels import KernelError

    clause, why = request.node.stash[CLAUSE_KEY], None
    try:
        kernel, device = request.getfixturevalue("kernel"), request.getfixturevalue("device")
        subject = subject_of(kernel, device)
    except (KernelError, pytest.fail.Exception) as error:
        why = str(error)
    if why is not None:
        request.config.stash[_GATE].refuse(request.node, why)
    describe(request.node, subject)
    if clause not in subject[CLAIMS].split():
        pytest.skip(f"{kernel.name} does not claim {clause} on {device.type}")
