"""Files that commands are asked to write."""

from pathlib import Path

import pytest

from csa_gate._files import require_writable


def test_what_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that exists or not, in a folder that does; a bare name is in the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    for path in (None, Path("new.json"), tmp_path / "old.json"):
        require_writable("--json", path)
    assert not Path("new.json").exists()


def test_what_cannot(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "new.json"):
        with pytest.raises(ValueError, match=rf"--html: got {path}, need a file in a folder that exists"):
            require_writable("--html", path)
