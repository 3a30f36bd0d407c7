"""The files that commands are asked to write."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

_NO_PLACE_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
"""The errors of a folder that takes no other file, or does not let one take the place of this: not those of a full
disk, where writing in place would lose the old file too."""


def require_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Raises ValueError if one of the paths, by option, cannot be written or is another's as well.

    None was not asked for.
    """
    options: dict[str, str] = {}
    for option, path in outputs.items():
        require_writable(option, path)
        if path is not None:
            other = options.setdefault(os.path.realpath(path), option)
            if other != option:
                raise ValueError(f"{option}: got {path}, need another file than that of {other}")


def require_writable(option: str, path: Path | None) -> None:
    """Raises ValueError if `path`, which came with `option`, cannot be written; None was not asked for.

    Tries it, for a mode says little about root, a read-only disk or /proc. Changes no file and leaves none behind.
    """
    if path is None:
        return
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{option}: got {path}, need a file in a folder that exists")
        _try_to_open(path)
    except OSError as error:
        raise ValueError(f"{option}: got {path}, need a file that can be written: {error.strerror}") from None


def _try_to_open(path: Path) -> None:
    if path.is_file():
        path.open("ab").close()
    elif path.exists():  # a pipe, perhaps: opening it could wait for its reader, or end its work
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    else:
        target = Path(os.path.realpath(path))  # where a dangling link points
        target.open("xb").close()
        target.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that a run that is killed leaves the old file or the new one, never half of it.

    The text goes into a file beside it, which then takes its place. It is written in place where that cannot be: into
    a device or a pipe, and into a file whose folder takes no other. Raises OSError if it cannot be written at all.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))  # so that a link stays one
    beside = target.with_name(f".csa-gate-{secrets.token_hex(8)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except OSError as error:
        if error.errno not in _NO_PLACE_BESIDE:
            raise
        target.write_text(text, encoding="utf-8")
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
