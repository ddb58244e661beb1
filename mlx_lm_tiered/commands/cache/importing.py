"""``cache import``: take in what `export` wrote, which may be anybody's file.

First everything is checked without writing: the archive's form, the manifest, every
header, every tensor's checksum, that each entry is what its name says and that what it
continues is there. Then entries are put in place one by one, under the directory's
lock, as a server does it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...cold import format as fmt
from ...cold.catalog import Catalog
from ...cold.checking import BadEntry
from ...cold.directory import Directory, blocks
from ...cold.files import key_at, open_file
from ...cold.limits import affordable
from ...cold.meta import Header
from ...cold.scan import Segment, catalog_of
from ...cold.writer import full_sync
from ...settings import format_size
from ..terminal import bytes_bar, say, usage
from .archive import BadArchive, Member, checksums, members, read
from .entries import columns, counted
from .options import setting

PIECE = 1 << 20
REMEASURE = 64  # entries after which the directory is measured again: others may write, too


@dataclass(frozen=True)
class Item:
    """What becomes of one member. `verdict` is ``new``, ``there`` or why it is refused."""

    member: Member
    path: Path
    parent: Path | None
    verdict: str

    @property
    def charge(self) -> int:
        return blocks(self.member.size)


def run(args: argparse.Namespace, root: Path) -> int:
    """Import; 1 when something was refused or did not fit, 2 when the file is not sound."""
    limit, _ = affordable(root, setting(args, "ssd_cache_max"))
    try:
        fd = os.open(Path(args.file).expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        usage(f"{args.file}: {error.strerror}")
    try:
        try:
            items = plan(fd, root, limit)
        except BadArchive as error:
            usage(f"{args.file} is not taken: {error}")
        directory = Directory(root, limit)
        need = sum(item.charge for item in items if item.verdict == "new")
        used = directory.usage() if root.is_dir() else 0
        if need and used + need + directory.side_room > directory.max_bytes:
            what = f"{format_size(need)} beside {format_size(used)} are more than the {format_size(directory.max_bytes)}"
            return say(f"{what} that the directory may take; prune it, or see --ssd-cache-max", 1)
        if not args.dry_run and need:
            items = take(fd, directory, items)
    finally:
        os.close(fd)
    return _tell(args, items)


def plan(fd: int, root: Path, limit: int) -> list[Item]:
    """What is to become of every member, none of more than `limit` bytes, after everything has been checked. Raises BadArchive."""
    found = members(fd)
    if too_large := [member.name for member in found if member.size > limit]:
        raise BadArchive(f"{too_large[0]} is larger than the directory may be")
    sums = checksums(fd, found)
    there = Directory(root, 0).files() if root.is_dir() else []
    catalog = catalog_of(there, {member.place[0] for member in found[:-1]})
    items: list[Item] = []
    refused: set[str] = set()
    total, done = sum(member.size for member in found), 0
    with bytes_bar("checking") as bar:
        for member in found[:-1]:
            bar(done, total)
            done += member.size
            try:
                items.append(_item(fd, member, sums[member.name], root, catalog, refused))
            except BadEntry as error:
                raise BadArchive(f"{member.name}: {error}") from error
    return items


def _item(fd: int, member: Member, checksum: str, root: Path, catalog: Catalog, refused: set[str]) -> Item:
    folder, name = member.place
    length = fmt.header_length(read(fd, member, min(8, member.size)), member.size)
    header = fmt.parse(read(fd, member, length), member.size)
    meta = header.meta
    if header.checksum != checksum:
        raise BadEntry("It is not what the manifest says.")
    if meta.fingerprint != folder:
        raise BadEntry("It is of another model than its name says.")
    own = _check_tensors(fd, member, header)
    path = root / "v1" / folder / name
    parent = catalog.parent_for(folder, meta.parent, meta.parent_checksum) if meta.start else None
    there = catalog.at(path)
    if there is not None and there.checksum == checksum:
        return Item(member, path, None, "there")
    if meta.start and parent is None and meta.parent_checksum in refused:
        refused.add(checksum)
        return Item(member, path, None, "what it continues is refused")
    segment = Segment(path, meta, own, checksum, member.size, (0, 0))
    entry = segment.entry(parent)
    if entry is None:
        raise BadEntry("It is not what its name says, or what it continues is missing.")
    if os.path.lexists(path) and not _same(path, checksum):
        refused.add(checksum)
        return Item(member, path, None, "there is another file of this name")
    if not catalog.add(entry):
        raise BadEntry("Its chain has too many files.")
    if os.path.lexists(path):  # it waited there for what it continues
        return Item(member, path, None, "there")
    return Item(member, path, parent.path if parent is not None else None, "new")


def _same(path: Path, checksum: str) -> bool:
    """Whether a file is the entry with this checksum."""
    try:
        with open_file(path) as reader:
            return reader.header.checksum == checksum
    except (BadEntry, OSError):
        return False


def _check_tensors(fd: int, member: Member, header: Header) -> bytes:
    """Compare every tensor with its checksum; returns the file's tokens as a key. Raises BadEntry."""
    for spec, offset, checksum in zip(header.meta.all_tensors, header.offsets, header.checksums, strict=True):
        hasher = xxhash.xxh3_64()
        for at in range(header.body + offset, end := header.body + offset + spec.nbytes, PIECE):
            hasher.update(read(fd, member, min(PIECE, end - at), at))
        if hasher.hexdigest() != checksum:
            raise BadEntry(f"Tensor {spec.name[:80]!r} does not match its checksum.")
    return key_at(fd, member.at + header.body, header.meta, header.checksums[0])


def take(fd: int, directory: Directory, items: list[Item]) -> list[Item]:
    """Put the new ones in place; returns all with what became of them. Raises OSError."""
    done: list[Item] = []
    total = sum(item.member.size for item in items if item.verdict == "new")
    directory.prepare()
    try:
        with bytes_bar("importing") as bar:
            copied, used, since = 0, 0, REMEASURE
            for item in items:
                if item.verdict == "new":
                    bar(copied, total)
                    if since >= REMEASURE:
                        used, since = directory.usage(), 0
                    verdict = _put(fd, directory, item, used)
                    since += 1
                    copied += item.member.size
                    used += item.charge if verdict == "new" else 0
                    item = Item(item.member, item.path, item.parent, verdict)
                done.append(item)
    finally:
        directory.close()
    return done


def _put(fd: int, directory: Directory, item: Item, used: int) -> str:
    """Copy one entry into a temporary file, and that into place; returns the verdict."""
    if used + item.charge + directory.side_room > directory.max_bytes:
        return "the directory is full"
    with directory.locked():
        partial, out = directory.create_partial(item.member.size)
    try:
        try:
            for at in range(0, item.member.size, PIECE):
                piece = memoryview(read(fd, item.member, min(PIECE, item.member.size - at), at))
                while piece:
                    count = os.pwrite(out, piece, at)
                    piece, at = piece[count:], at + count
            # A time in the future would keep the entry for good.
            used_ns = min(item.member.mtime * 10**9, time.time_ns())
            os.utime(out, ns=(used_ns, used_ns))
            full_sync(out)
        finally:
            os.close(out)
        with directory.locked():
            if os.path.lexists(item.path):
                return "another process wrote it meanwhile"
            if item.parent is not None and not item.parent.exists():
                return "what it continues went meanwhile"
            directory.publish(partial, item.path)
            return "new"
    finally:
        partial.unlink(missing_ok=True)


def _tell(args: argparse.Namespace, items: list[Item]) -> int:
    new, there = ([item for item in items if item.verdict == verdict] for verdict in ("new", "there"))
    refused = [item for item in items if item.verdict not in ("new", "there")]
    size = sum(item.member.size for item in new)
    if args.json:
        told = {"entries": len(new), "bytes": size, "dry_run": args.dry_run, "already_there": len(there)}
        told["files"] = [item.member.name for item in new]
        told["refused"] = [{"file": item.member.name, "why": item.verdict} for item in refused]
        print(json.dumps(told, indent=2))
    else:
        if args.dry_run and new:
            print(columns([(format_size(item.member.size), item.member.name) for item in new]))
        verb = "would be imported" if args.dry_run else "imported"
        print(f"{counted(len(new))}, {format_size(size)}: {verb}; {len(there)} there already")
        for item in refused:
            say(f"{item.member.name} is refused: {item.verdict}", 1)
    return 1 if refused else 0

