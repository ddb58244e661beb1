"""``cache verify``: read every entry, compare checksums, and on request set damaged files aside or delete them."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from ...cold import listing
from ...cold.directory import Directory
from ...cold.family import DiskFile, leaves_first
from ...cold.listing import Listed
from ...settings import format_size
from ..terminal import bytes_bar, usage
from .entries import chain_of, columns, counted, known, relative
from .ls import row_of, table, totals
from . import DEFAULT_COLUMNS


def run(args: argparse.Namespace, root: Path) -> int:
    """Check all; 1 when something is damaged, also when it was put away."""
    if args.dry_run and not (args.quarantine or args.delete):
        usage("--dry-run goes with --quarantine or --delete")
    found, checked = list(listing.entries(root)), []
    total, done = sum(entry.nbytes for entry in found), 0
    with bytes_bar("checking") as bar:
        for entry in found:
            bar(done, total)
            checked.append(check(entry))
            done += entry.nbytes
    rows = [row_of(entry) for entry, _ in checked]
    damaged = any(row.fault for row in rows)
    if args.quarantine:
        gone = put_away(root, [c for c in checked if c[0].state == "damaged"], [], args.dry_run)
        what = "set aside"
    elif args.delete:
        bad = [c for c in checked if c[0].state in ("damaged", "orphan")]
        gone = put_away(root, [], bad + continuing(checked), args.dry_run)
        what = "deleted"
    else:
        gone, what = [], ""
    if args.json:
        names = {relative(entry.path) for entry in gone}
        done_with = [{"removed": f"{row.fingerprint}/{row.file}" in names} if what and not args.dry_run else {} for row in rows]
        print(json.dumps([row.as_json() | more for row, more in zip(rows, done_with, strict=True)], indent=2))
    else:
        print(f"{table(rows, DEFAULT_COLUMNS.split(','))}\n{totals(rows)}")
        if what:
            if gone:
                print(columns([(relative(entry.path), format_size(entry.nbytes)) for entry in gone]))
            print(f"{counted(len(gone))} {'would be ' if args.dry_run else ''}{what}")
    return 1 if damaged else 0


Checked = tuple[Listed, tuple[int, int] | None]  # an entry, and which file was read


def check(entry: Listed) -> Checked:
    """The entry with what is wrong with its tensors, too, and the file that this is said of."""
    try:
        status = os.stat(entry.path, follow_symlinks=False)
    except FileNotFoundError:
        return entry, None
    problem = listing.check(entry.path) if not entry.problem else ""
    if problem and entry.path.exists():
        entry = replace(entry, problem=problem, state="damaged")
    return entry, (status.st_dev, status.st_ino)


def continuing(checked: list[Checked]) -> list[Checked]:
    """Sound entries whose chain leads to a damaged one."""
    there = known(entry for entry, _ in checked)
    damaged = {entry.path for entry, _ in checked if entry.state == "damaged"}
    return [c for c in checked if c[0].state == "sound" and any(link.path in damaged for link in chain_of(c[0], there))]


def put_away(root: Path, aside: list[Checked], away: list[Checked], dry_run: bool) -> list[Listed]:
    """Set aside and delete what is still the file that was checked; returns what went or would go. Raises OSError."""
    if dry_run:
        return [entry for entry, _ in aside + away]
    directory = Directory(root, 0)
    gone = []
    with directory.locked():
        for entry, inode in aside:
            if (status := _still(entry.path, inode)) is not None and directory.quarantine(entry.path, status):
                gone.append(entry)
        checked = {entry.path: (entry, inode) for entry, inode in away}
        files = [DiskFile(entry.path, "entry", entry.fingerprint, entry.nbytes, entry.nbytes, entry.used) for entry, _ in away]
        for file in leaves_first(files, lambda f: f.used):
            entry, inode = checked[file.path]
            if _still(file.path, inode) is not None:
                file.path.unlink(missing_ok=True)
                gone.append(entry)
    return gone


def _still(path: Path, inode: tuple[int, int] | None) -> os.stat_result | None:
    """The file's status, if it is the one that was checked."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if (status.st_dev, status.st_ino) == inode else None
