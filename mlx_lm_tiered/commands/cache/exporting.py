"""``cache export``: entries and what they continue, into one file."""

from __future__ import annotations

import argparse
import errno
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...cold import listing
from ...cold.checking import BadEntry
from ...cold.family import NAME_DIGITS
from ...cold.files import EntryFile, open_file
from ...cold.listing import Listed
from ...cold.writer import full_sync
from ...settings import format_size
from ..terminal import bytes_bar, say, usage
from . import archive
from .entries import chain_of, chosen, columns, counted, is_of, known, moment, relative

PIECE = 1 << 20


def run(args: argparse.Namespace, root: Path) -> int:
    """Write the file; 1 when entries went or turned out damaged meanwhile."""
    if bool(args.entry) == args.all:
        usage("which entry? give the beginning of its file name, or --all")
    if args.model and not args.all:
        usage("--model goes with --all")
    output = args.output.expanduser().absolute()
    if os.path.lexists(output):
        usage(f"{output} is there already")
    if not output.parent.is_dir():
        usage(f"{output.parent} is not a directory")
    entries = list(listing.entries(root))
    wanted = [chosen(entries, args.entry)] if args.entry else [e for e in entries if is_of(e, args.model) and e.state == "sound"]
    if args.entry and wanted[0].problem:
        return say(f"{relative(wanted[0].path)}: {wanted[0].problem}", 1)
    there = known(entries)
    # Each after what it continues, each once.
    ordered = list(dict.fromkeys(link.path for entry in wanted for link in chain_of(entry, there)))
    by_path = {entry.path: entry for entry in entries}
    plan = [by_path[path] for path in ordered]
    left_out = [] if args.dry_run else write(output, plan)
    absent = {path for path, _ in left_out}
    done = [entry for entry in plan if entry.path not in absent]
    size = sum(entry.nbytes for entry in done)
    if args.json:
        missing = [{"file": relative(path), "why": why} for path, why in left_out]
        told = {"entries": len(done), "bytes": size, "dry_run": args.dry_run, "files": [relative(e.path) for e in done], "left_out": missing}
        print(json.dumps(told, indent=2))
    else:
        if args.dry_run and done:
            print(columns([(format_size(entry.nbytes), relative(entry.path)) for entry in done]))
        print(f"{counted(len(done))}, {format_size(size)}: {'would be written' if args.dry_run else 'written'} to {output}")
        for path, why in left_out:
            say(f"{relative(path)} is left out: {why}", 1)
    return 1 if left_out else 0


def write(output: Path, plan: list[Listed]) -> list[tuple[Path, str]]:
    """Write an archive of these entries, each after what it continues; returns what had to be left out, and why. Raises OSError."""
    written: list[tuple[str, int, str]] = []
    left_out: list[tuple[Path, str]] = []
    total, done = sum(entry.nbytes for entry in plan), 0
    whole = set()  # the written ones, by what others call them
    with _new_file(output) as out, bytes_bar("exporting") as bar:
        for entry in plan:
            assert entry.meta is not None
            bar(done, total)
            done += entry.nbytes
            if entry.meta.start and (entry.meta.parent, entry.meta.parent_checksum) not in whole:
                left_out.append((entry.path, "what it continues is left out"))
                continue
            try:
                with open_file(entry.path) as reader:
                    if reader.header.checksum != entry.checksum:
                        raise BadEntry("it was replaced meanwhile")
                    reader.check()
                    _copy(reader, relative(entry.path), entry.used, out)
            except FileNotFoundError:
                left_out.append((entry.path, "it went meanwhile"))
            except BadEntry as error:
                left_out.append((entry.path, str(error)))
            else:
                written.append((relative(entry.path), entry.nbytes, entry.checksum))
                whole.add((entry.path.name[:NAME_DIGITS], entry.checksum))
        text = archive.manifest(written, moment(time.time_ns()))
        out.write(archive.header(archive.MANIFEST, len(text), int(time.time())) + text + bytes(archive.padding(len(text))) + archive.END)
    return left_out


def _copy(reader: EntryFile, name: str, used: int, out: BinaryIO) -> None:
    size = reader.status.st_size
    out.write(archive.header(name, size, used // 10**9))
    for at in range(0, size, PIECE):
        piece = os.pread(reader.fd, min(PIECE, size - at), at)
        if len(piece) != min(PIECE, size - at):
            raise OSError(f"{name} became shorter while it was read")
        out.write(piece)
    out.write(bytes(archive.padding(size)))


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name once it is whole and on disk. Only its owner can read it: it holds conversations."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            yield out
            out.flush()
            full_sync(fd)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "It is there already", str(path))
        os.rename(partial, path)
    finally:
        partial.unlink(missing_ok=True)
