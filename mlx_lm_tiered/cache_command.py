"""``mlx_lm.tiered cache``: list, verify and clear the entries of a directory. No server is needed; one may be running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cold import listing
from .cold.directory import Directory
from .cold.family import DiskFile, leaves_first
from .settings import format_size


@dataclass(frozen=True)
class Listed:
    """One entry. `new_tokens` are those that its own file holds; `age_s` is seconds since its last use; `fault` says why it cannot be used, empty when it can."""

    file: str
    model: str
    tokens: int
    new_tokens: int
    bytes: int
    age_s: float
    fingerprint: str
    fault: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def entries(root: Path, verify: bool = False) -> Iterator[Listed]:
    """Every entry, the last used first. With `verify` every tensor is read and compared with its checksum. Raises OSError for the directory itself."""
    for found in listing.entries(root):
        fault = found.problem or (listing.check(found.path) if verify else "")
        model = str(found.meta.provenance.get("model") or "") if found.meta else ""
        tokens = found.meta.length if found.meta else 0
        new = found.meta.length - found.meta.start if found.meta else 0
        age = max(0.0, time.time() - found.used / 1e9)
        yield Listed(found.path.name, model, tokens, new, found.nbytes, age, found.fingerprint, fault)


def clear(root: Path, dry_run: bool) -> tuple[int, int]:
    """Delete every entry, damaged ones too; (files, bytes) that went or would go. Files that are not ours stay. Raises OSError."""
    directory = Directory(root, 0)
    if dry_run:
        doomed = _ours(directory)
        return len(doomed), sum(file.charge for file in doomed)
    with directory.locked():
        doomed = _ours(directory)
        for file in leaves_first(doomed, lambda f: f.used):
            file.path.unlink(missing_ok=True)
    return len(doomed), sum(file.charge for file in doomed)


def _ours(directory: Directory) -> list[DiskFile]:
    return [file for file in directory.files() if file.kind in ("entry", "bad")]


def table(listed: list[Listed]) -> str:
    """The list for people."""
    rows = [("last used", "tokens", "size", "model", "entry")]
    rows += [
        (_age(e.age_s), f"{e.tokens:,}", format_size(e.bytes), e.model or e.fingerprint[:12], e.file[:12] + (f"  {e.fault}" if e.fault else ""))
        for e in listed
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
