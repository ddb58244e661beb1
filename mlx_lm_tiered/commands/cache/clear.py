"""``cache clear``: delete every entry, damaged ones too. Files that are not ours stay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...cold.directory import Directory
from ...cold.family import DiskFile, leaves_first
from ...settings import format_size
from .entries import counted


def run(args: argparse.Namespace, root: Path) -> int:
    """Delete, or say what would go."""
    count, size = clear(root, args.dry_run)
    if args.json:
        print(json.dumps({"entries": count, "bytes": size, "dry_run": args.dry_run}))
    else:
        print(f"{counted(count)}, {format_size(size)}: {'would be deleted' if args.dry_run else 'deleted'}")
    return 0


def clear(root: Path, dry_run: bool) -> tuple[int, int]:
    """(files, bytes) that went or would go. Raises OSError."""
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
