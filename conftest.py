"""The house's own test session: plugins, and a word to those who name a room instead of the link to it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse `pytest suites/...`: those files are modules of csa_gate only under src/csa_gate."""
    for arg in config.invocation_params.args:
        path = Path(config.invocation_params.dir, str(arg).partition("::")[0])
        if path.is_relative_to(config.rootpath / "suites"):
            raise pytest.UsageError(f"{arg}: name it as {Path('src/csa_gate') / path.relative_to(config.rootpath)}")
