"""``cache prune``: delete entries that are old, of one model or stale; the least recently used first, none before those that continue it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...cold import listing
from ...cold.directory import Directory
from ...cold.family import DiskFile, leaves_first, rootless
from ...settings import format_size, parse_size
from ..terminal import usage
from .entries import age, columns, counted, is_of, model_of, parse_age, printable, relative
from .staleness import Staleness


def run(args: argparse.Namespace, root: Path) -> int:
    """Delete, or say what would go."""
    older = parse_age(args.older_than) if args.older_than is not None else None
    size = _size(args.to)
    if not (args.stale or args.model or older is not None or size is not None):
        usage("what should go? say --older-than, --model, --stale or --to; `clear` deletes everything")
    found = list(listing.entries(root))
    reasons = Staleness(root).reasons(found) if args.stale else {}
    names = {entry.path: printable(model_of(entry)) for entry in found}
    wanted = {entry.path for entry in found if is_of(entry, args.model) and (not args.stale or entry.fingerprint in reasons)}
    before = time.time_ns() - int(older * 1e9) if older is not None else None
    any_model = not args.model and not args.stale

    def doomed(file: DiskFile) -> bool:
        fits = file.path in wanted if file.kind == "entry" else any_model
        return fits and (before is None or file.used < before)

    gone = prune(Directory(root, 0), doomed, size, args.dry_run)
    if args.json:
        rows = [{"file": f.path.name, "fingerprint": f.owner, "bytes": f.charge, "why": reasons.get(f.owner, "")} for f in gone]
        print(json.dumps({"entries": len(gone), "bytes": sum(f.charge for f in gone), "dry_run": args.dry_run, "files": rows}, indent=2))
        return 0
    if gone:
        print(columns([(age(time.time() - f.used / 1e9), format_size(f.charge), names.get(f.path, ""), relative(f.path)) for f in gone]))
    for fingerprint, why in reasons.items():
        print(f"{fingerprint[:12]}: {why}")
    print(f"{counted(len(gone))}, {format_size(sum(f.charge for f in gone))}: {'would be deleted' if args.dry_run else 'deleted'}")
    return 0


def prune(directory: Directory, doomed: Callable[[DiskFile], bool], size: int | None, dry_run: bool) -> list[DiskFile]:
    """Delete the files that are `doomed` and that nothing needs which is not, until everything takes no more than `size`; returns them. Raises OSError."""
    if dry_run:
        return _victims(directory, doomed, size)
    with directory.locked():
        gone = _victims(directory, doomed, size)
        for file in gone:
            file.path.unlink(missing_ok=True)
    return gone


def _victims(directory: Directory, doomed: Callable[[DiskFile], bool], size: int | None) -> list[DiskFile]:
    files = [file for file in directory.files() if file.kind in ("entry", "bad")]
    pinned = frozenset(_needed(files, [file for file in files if not doomed(file)]))
    used = directory.usage() if size is not None else 0
    adrift = rootless(files)
    gone = []
    for file in leaves_first(files, lambda f: (f.kind != "bad", f.path not in adrift, f.used), pinned, adrift):
        if size is not None and used <= size:
            break
        used -= file.charge
        gone.append(file)
    return gone


def _needed(files: list[DiskFile], kept: Iterable[DiskFile]) -> set[Path]:
    """The files that are kept, and those that they continue, judged by their names."""
    names: dict[tuple[Path, str], list[DiskFile]] = {}
    for file in files:
        if file.kind == "entry":
            names.setdefault((file.path.parent, file.name), []).append(file)
    needed: set[Path] = set()
    level = list(kept)
    while level:
        level = [file for file in level if file.path not in needed]
        needed.update(file.path for file in level)
        level = [parent for file in level if file.parent for parent in names.get((file.path.parent, file.parent), ())]
    return needed


def _size(text: str | None) -> int | None:
    try:
        return parse_size(text) if text is not None else None
    except ValueError as error:
        usage(f"--to: {error}")
