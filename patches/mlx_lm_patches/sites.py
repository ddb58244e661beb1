"""Where the start-up file lies, and whether the interpreter takes it."""

from __future__ import annotations

import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import finder

NAME = "mlx_lm_tiered"
# Since 3.15 lines of code belong in a .start file (PEP 829).
SUFFIX = ".start" if sys.version_info >= (3, 15) else ".pth"
# st_flags of macOS: the interpreter skips start-up files that are hidden in the Finder.
UF_HIDDEN = 0x8000


def start_up(directories: list[Path] | None = None) -> Mapping[str, Any]:
    """``state`` (``ok``, ``missing``, ``hidden``), ``path``, ``detail``, and ``active``: whether it ran in this process."""
    active = any(type(f).__module__ == finder.__name__ for f in sys.meta_path)
    for directory in _site_directories() if directories is None else directories:
        path = directory / f"{NAME}{SUFFIX}"
        if not path.is_file():
            continue
        if getattr(path.lstat(), "st_flags", 0) & UF_HIDDEN:
            detail = f"the interpreter skips it because it is hidden; run: chflags nohidden '{path}'"
            return {"state": "hidden", "path": str(path), "detail": detail, "active": active}
        return {"state": "ok", "path": str(path), "detail": "", "active": active}
    detail = "--plugin is not known to mlx-lm's commands; reinstall mlx-lm-tiered, or start with mlx_lm.tiered serve"
    return {"state": "missing", "path": None, "detail": detail, "active": active}


def _site_directories() -> list[Path]:
    """Where the interpreter looks for start-up files."""
    found = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return [Path(directory) for directory in found]
