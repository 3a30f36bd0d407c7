"""Programs of a CUDA toolkit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDERS = ("/usr/local/cuda",)
"""Where toolkits are by default, after those that `CUDA_HOME` and `CUDA_PATH` name."""


def find_tool(name: str) -> str | None:
    """The path of a toolkit's program: what the PATH has, else what is in `bin` of a toolkit; None if there is none."""
    named = [folder for variable in ("CUDA_HOME", "CUDA_PATH") if (folder := os.environ.get(variable))]
    folders = [str(Path(folder) / "bin") for folder in (*named, *FOLDERS)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
