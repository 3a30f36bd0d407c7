"""The files that commands are asked to write."""

from __future__ import annotations

from pathlib import Path


def require_writable(option: str, path: Path | None) -> None:
    """Raises ValueError if `path`, which came with `option`, is a folder or lies in none; None was not asked for."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{option}: got {path}, need a file in a folder that exists")
