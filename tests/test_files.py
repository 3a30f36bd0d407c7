"""Files that commands are asked to write."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import IO, Any

import pytest

from csa_gate._files import require_outputs, require_writable, write_whole


def test_what_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that exists or not, in a folder that does, a link or a device; a bare name is in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("missing.json")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for path in (None, Path("new.json"), tmp_path / "old.json", Path("link.json"), Path("pipe"), Path("/dev/null")):
        require_writable("--json", path)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old.json").read_text() == "old"


def test_what_cannot(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "new.json"):
        with pytest.raises(ValueError, match=rf"--html: got {path}, need a file in a folder that exists"):
            require_writable("--html", path)


def test_what_only_an_attempt_shows(tmp_path: Path) -> None:
    """Files that nobody may write or create, not even root, whatever the modes say."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "astray").symlink_to("missing/new.json")
    busy = tmp_path / "busy"
    shutil.copy(shutil.which("sleep") or "", busy)
    before = sorted(tmp_path.iterdir())
    with subprocess.Popen([busy, "60"]) as running:
        try:
            for path in (
                Path("/proc/self/x.json"),
                tmp_path / ("x" * 300),
                tmp_path / "loop",
                tmp_path / "astray",
                busy,
            ):
                with pytest.raises(ValueError, match=rf"^--json: got {path}, need a file that can be written: [A-Z]"):
                    require_writable("--json", path)
        finally:
            running.kill()
    assert sorted(tmp_path.iterdir()) == before


def test_two_outputs_in_one_file(tmp_path: Path) -> None:
    """Also by another name, which a link or a dot gives it; two files may be asked for, or one, or none."""
    json, html, link = (tmp_path / name for name in ("x.json", "x.html", "link"))
    link.symlink_to(json)
    require_outputs({"--json": json, "--html": html})
    require_outputs({"--json": json, "--html": None})
    require_outputs({"--json": None, "--html": None})
    for other in (json, link, tmp_path / "." / ".." / tmp_path.name / "x.json"):
        with pytest.raises(ValueError, match=f"^--html: got {other}, need another file than that of --json$"):
            require_outputs({"--json": json, "--html": other})


def test_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file has the usual mode and an old one keeps its own; a link stays one; nothing else is left."""
    monkeypatch.chdir(tmp_path)
    Path("usual").touch()
    old, link = Path("old"), Path("link")
    old.write_text("longer than what follows")
    old.chmod(0o640)
    link.symlink_to("target")
    for path in (Path("new"), old, link):
        write_whole(path, "é\n")
        assert path.read_bytes() == "é\n".encode()
    usual, new, kept = (stat.S_IMODE(Path(name).stat().st_mode) for name in ("usual", "new", "old"))
    assert new == usual and kept == 0o640
    assert link.is_symlink() and not Path("target").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "new", "old", "target", "usual"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
def test_never_half_there(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks while it is written, or after that has failed, sees the old file, or none."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    opened = Path.open

    def open_failing(path: Path, *args: Any, **kwargs: Any) -> IO[Any]:
        file = opened(path, *args, **kwargs)
        write = file.write

        def write_half(text: str) -> int:
            write(text[: len(text) // 2])
            file.flush()
            with opened(old) as there:
                assert there.read() == "old" and not new.exists()
            raise error

        file.write = write_half  # type: ignore[method-assign]
        return file

    monkeypatch.setattr(Path, "open", open_failing)
    for path in (old, new):
        with pytest.raises(type(error)):
            write_whole(path, "some text")
    monkeypatch.undo()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "old")]


def test_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a device is not replaced, nor a file whose folder does not let it be."""
    pipe, mounted = tmp_path / "pipe", tmp_path / "mounted"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        write_whole(pipe, "text")
        assert reader.communicate(timeout=60)[0] == "text"
    write_whole(Path("/dev/null"), "text")
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    mounted.write_text("longer than what follows")

    def busy(self: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    write_whole(mounted, "text")
    assert mounted.read_text() == "text"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mounted", "pipe"]
