"""Gate tests, one by one: which clause a test is of, which kernel it gets, and what its reports say of both."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ._summary import CLAIMS, CLAUSE, DEVICE, KERNEL, MACHINE

if TYPE_CHECKING:
    import torch

    from csa_gate.fixtures.kernels import Kernel

CLAIM_FIXTURE = "csa_claim"
"""The fixture that skips a test of an unclaimed clause."""

CLAUSE_KEY = pytest.StashKey[str]()
"""The clause of a gate test; other tests have none."""

_FIXTURE = type(pytest.fixture(lambda: None))


def enrol(items: list[pytest.Item]) -> None:
    """Note the clause of every gate test and give it the claim fixture.

    Raises:
        ValueError: a marker names no clause.
    """
    for item in items:
        marker = item.get_closest_marker("clause")
        if marker is None:
            continue
        from csa_gate.oracles import CLAUSES

        name = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
        if name not in CLAUSES:
            got = ", ".join(map(repr, marker.args))
            raise ValueError(f"{item.nodeid}: got the marker clause({got}), need clause(name), {', '.join(CLAUSES)}")
        item.stash[CLAUSE_KEY] = name
        item.user_properties.append((CLAUSE, name))
        # Before the other fixtures, so that an unclaimed clause costs none of their work.
        if isinstance(item, pytest.Function) and CLAIM_FIXTURE not in item.fixturenames:
            item.fixturenames.insert(0, CLAIM_FIXTURE)


def gate_items(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that are gate tests."""
    return [item for item in items if CLAUSE_KEY in item.stash]


def describe(item: pytest.Item, subject: dict[str, str]) -> None:
    """Let the reports of `item` say which kernel it tests."""
    kept = [(key, value) for key, value in item.user_properties if key not in subject]
    item.user_properties[:] = [*kept, *subject.items()]


def subject_of(kernel: Kernel, device: torch.device) -> dict[str, str]:
    """Kernel, device and claims, as properties of a test.

    Raises:
        KernelError: `kernel` is no kernel, or does not run on `device`.
    """
    from csa_gate.fixtures.kernels import KernelError, check_kernel, contract_on
    from csa_gate.oracles import CLAUSES

    contract = contract_on(check_kernel(kernel, "fixture 'kernel'"), device)
    if contract is None:
        raise KernelError(f"kernel {kernel.name!r} does not run on {device.type}")
    claims = " ".join(clause for clause in CLAUSES if contract.claims(clause))
    return {KERNEL: kernel.name, DEVICE: device.type, MACHINE: _machine(device), CLAIMS: claims}


def class_kernel(cls: type | None) -> object:
    """A test class's attribute `kernel`, or None if it has none or it is a fixture."""
    own = getattr(cls, "kernel", None)
    return None if isinstance(own, _FIXTURE) else own


def uses_common_kernel(item: pytest.Item) -> bool:
    """Whether nothing puts another kernel in the place of the one on the command line."""
    parametrized = "kernel" in getattr(getattr(item, "callspec", None), "params", ())
    definitions = item.session._fixturemanager.getfixturedefs("kernel", item) or ()
    return class_kernel(getattr(item, "cls", None)) is None and not parametrized and len(definitions) == 1


@functools.cache
def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()
