"""The file that carries entries from one machine to another: a plain tar (POSIX ustar) of entry files and a manifest.

Members, each a regular file of mode 0600: ``FINGERPRINT/NAME.safetensors`` or
``FINGERPRINT/NAME-PARENT.safetensors``, those that others continue first; then
``manifest.json``, which names them with size and header checksum. The header's checksum
covers those of the tensors, so it stands for the whole file (see `cold.format`).

Any tar program reads it. Read it is as untrusted input: nothing is taken but headers
byte for byte as they are written here, so there are no links, no paths, no extensions.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...cold.checking import BadEntry
from ...cold.files import read_at

BLOCK = 512
END = bytes(2 * BLOCK)
MANIFEST = "manifest.json"
FORMAT = "mlx-lm-tiered-cache"
VERSION = 1
MAX_MANIFEST = 64 << 20
MAX_MEMBERS = 1 << 18

_NAME = re.compile(r"([0-9a-f]{16,128})/([0-9a-f]{32}(?:-[0-9a-f]{32})?\.safetensors)")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_FIELDS = (("name", 100), ("mode", 8), ("uid", 8), ("gid", 8), ("size", 12), ("mtime", 12), ("checksum", 8), ("type", 1), ("link", 100),
           ("magic", 8), ("uname", 32), ("gname", 32), ("major", 8), ("minor", 8), ("prefix", 155), ("pad", 12))  # fmt: skip
_LARGEST_OCTAL = 8**11 - 1  # larger sizes are written in base 256, an extension that GNU tar, bsdtar and Python read


class BadArchive(Exception):
    """A file is not what `export` writes; its text is one sentence."""


@dataclass(frozen=True)
class Member:
    """A file in the archive: its name, where its bytes are, and its time in seconds since 1970."""

    name: str
    at: int
    size: int
    mtime: int

    @property
    def place(self) -> tuple[str, str]:
        """Fingerprint and file name of an entry."""
        folder, _, file = self.name.partition("/")
        return folder, file


def header(name: str, size: int, mtime: int) -> bytes:
    """The block before a member's bytes."""
    folder, _, file = name.rpartition("/") if len(name) > 100 else ("", "", name)
    values = {
        "name": file.encode(),
        "prefix": folder.encode(),
        "mode": b"0000600\0",
        "uid": b"0000000\0",
        "gid": b"0000000\0",
        "size": b"%011o\0" % size if size <= _LARGEST_OCTAL else b"\x80" + size.to_bytes(11, "big"),
        "mtime": b"%011o\0" % min(max(mtime, 0), _LARGEST_OCTAL),
        "checksum": b" " * 8,
        "type": b"0",
        "magic": b"ustar\x0000",
    }
    if any(len(values.get(field, b"")) > width for field, width in _FIELDS):
        raise ValueError(f"{name} does not fit into a tar header")
    block = b"".join(values.get(field, b"").ljust(width, b"\0") for field, width in _FIELDS)
    total = b"%06o\0 " % sum(block)
    return block[:148] + total + block[156:]


def padding(size: int) -> int:
    """Bytes behind a member, up to the next block."""
    return -size % BLOCK


def manifest(entries: Iterable[tuple[str, int, str]], created: str) -> bytes:
    """The last member's bytes, from (name, size, header checksum)."""
    listed = [{"file": name, "bytes": size, "checksum": checksum} for name, size, checksum in entries]
    return json.dumps({"format": FORMAT, "version": VERSION, "created": created, "entries": listed}, indent=1).encode() + b"\n"


def members(fd: int) -> list[Member]:
    """Every member of an archive, the manifest last. Reads headers only. Raises BadArchive or OSError."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadArchive("it is not a regular file")
    found: dict[str, Member] = {}
    at = 0
    while any(block := _block(fd, at)):
        member = _member(block, at, status.st_size, len(found) + 1)
        if member.name in found:
            raise BadArchive(f"it holds {member.name} twice")
        if MANIFEST in found:
            raise BadArchive("there is something behind its manifest")
        if len(found) >= MAX_MEMBERS:
            raise BadArchive(f"it has more than {MAX_MEMBERS:,} members")
        found[member.name] = member
        at = member.at + member.size + padding(member.size)
    if status.st_size != at + len(END) or any(os.pread(fd, len(END), at)):
        raise BadArchive("it does not end as a tar does")
    if MANIFEST not in found:
        raise BadArchive("it has no manifest")
    return list(found.values())


def _block(fd: int, at: int) -> bytes:
    block = os.pread(fd, BLOCK, at)
    if len(block) < BLOCK:
        raise BadArchive("it ends too early")
    return block


def _member(block: bytes, at: int, end: int, number: int) -> Member:
    """A member of an archive of `end` bytes from the block at `at`."""
    values, offset = {}, 0
    for field, width in _FIELDS:
        values[field] = block[offset : offset + width]
        offset += width
    if values["type"] != b"0":
        raise BadArchive(f"member {number} is no regular file")
    try:
        file, folder = (values[field].rstrip(b"\0").decode("ascii") for field in ("name", "prefix"))
        name = f"{folder}/{file}" if folder else file
        size, mtime = _number(values["size"]), _number(values["mtime"])
    except ValueError:
        raise BadArchive(f"member {number} has a header that `export` does not write") from None
    if name != MANIFEST and not _NAME.fullmatch(name):
        raise BadArchive(f"member {number} is called {name[:80]!r}, which is no entry's name")
    if header(name, size, mtime) != block:
        raise BadArchive(f"member {number} has a header that `export` does not write")
    if size > end - at - BLOCK - len(END) or (name == MANIFEST and size > MAX_MANIFEST):
        raise BadArchive(f"member {number} claims {size:,} bytes, more than there are")
    return Member(name, at + BLOCK, size, mtime)


def _number(text: bytes) -> int:
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    if not re.fullmatch(rb"[0-7]{11}\0", text):
        raise ValueError(text)
    return int(text[:-1], 8)


def checksums(fd: int, found: list[Member]) -> dict[str, str]:
    """The header checksum of every entry from the manifest, which must name what is there and nothing else. Raises BadArchive."""
    last = found[-1]
    try:
        value: Any = json.loads(os.pread(fd, last.size, last.at))
    except (ValueError, RecursionError):
        raise BadArchive("its manifest is not sound JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BadArchive("its manifest is not one that `export` writes")
    if value.get("version") != VERSION:
        raise BadArchive(f"it was written by another version: {str(value.get('version'))[:20]}")
    listed = value.get("entries")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise BadArchive("its manifest has no list of entries")
    there = [(member.name, member.size) for member in found[:-1]]
    if [(entry.get("file"), entry.get("bytes")) for entry in listed] != there:
        raise BadArchive("its manifest names other files or sizes than it holds")
    sums = [entry.get("checksum") for entry in listed]
    if not all(isinstance(text, str) and _CHECKSUM.fullmatch(text) for text in sums):
        raise BadArchive("its manifest lacks a checksum")
    return {name: text for (name, _), text in zip(there, sums, strict=True)}


def read(fd: int, member: Member, length: int, at: int = 0) -> bytes:
    """Bytes of a member. Raises BadEntry when they are not there."""
    if at + length > member.size:
        raise BadEntry("The file ends too early.")
    return read_at(fd, length, member.at + at)
