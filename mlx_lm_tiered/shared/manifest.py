"""An entry's manifest: its tokens, and the chain of files that must be read for it, each as pieces named by their content.

Signed with the team's key (see `names.Team.signed`), then a line of JSON, then the
tokens (see `index.keys.pack`). It is uploaded after its pieces, so who sees it sees a
whole entry. Read it is as untrusted input: nothing is believed of it before the
signature, and whoever has the key may still be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..cold.catalog import MAX_CHAIN
from ..cold.checking import BadEntry
from ..cold.family import NAME_DIGITS
from ..index.keys import WIDTH, common_tokens, pack, unpack
from .names import Names, Team

FORMAT = "mlx-lm-tiered-shared"
VERSION = 1
PIECE = 16 << 20  # bytes of a piece, except the last one of a file
MOST = 32 << 20  # bytes of a manifest: some million tokens
MOST_HEAD = 4 << 20  # bytes of its JSON, which takes many times that when it is read; some terabyte in pieces
MOST_BYTES = 1 << 44  # of a file

_FILE = re.compile(r"([0-9a-f]{32})(?:-([0-9a-f]{32}))?\.safetensors")
_FINGERPRINT = re.compile(r"[0-9a-f]{16,128}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_PIECE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Link:
    """One file of the chain, which is an entry itself: its name and header checksum as in the SSD tier, which tokens it holds, and its pieces."""

    file: str
    checksum: str
    start: int
    length: int
    nbytes: int
    cuttable: bool
    minimum_reusable: int
    pieces: tuple[str, ...]

    @property
    def name(self) -> str:
        """What those that continue it call it."""
        return self.file[:NAME_DIGITS]

    def serves(self, length: int) -> bool:
        """Whether its first `length` tokens can be used."""
        return length == self.length or (self.cuttable and 0 < length < self.length and length >= self.minimum_reusable)

    def sizes(self) -> list[int]:
        """The bytes of each piece."""
        return [min(PIECE, self.nbytes - at) for at in range(0, self.nbytes, PIECE)]


@dataclass(frozen=True)
class Manifest:
    """An entry: its tokens as a key, and its chain, the whole file first."""

    fingerprint: str
    key: bytes
    links: tuple[Link, ...]

    @property
    def nbytes(self) -> int:
        return sum(link.nbytes for link in self.links)

    def serving(self, key: bytes, most: int) -> tuple[int, int]:
        """How many links must be read, and how many of the first `most` tokens of `key` they serve then; (0, 0) for none."""
        common = min(most, common_tokens(self.key, key))
        best = 0, 0
        for count in range(len(self.links), 0, -1):
            link = self.links[count - 1]
            length = min(common, link.length)
            if link.serves(length) and length > best[1]:
                best = count, length
            elif best[1] and link.serves(best[1]) and link.length >= best[1]:
                best = count, best[1]  # fewer files do as well
            common = min(common, link.start)
        return best

    def encode(self, team: Team) -> bytes:
        """The object's bytes."""
        links = [vars(link) for link in self.links]
        head = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "length": len(self.key) // WIDTH, "links": links}
        return team.signed(json.dumps(head).encode() + b"\n" + pack(self.key))


def parse(data: bytes, team: Team, folder: str, name: str) -> Manifest:
    """What the object `name` in a model's folder says. Raises BadEntry."""
    signed = team.opened(data)
    if signed is None:
        raise BadEntry("It is not signed with the team's key.")
    line, _, packed = signed.partition(b"\n")
    if len(line) > MOST_HEAD:
        raise BadEntry("Its chain is described at too great a length.")
    try:
        head: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise BadEntry("It is not sound JSON.") from None
    if not isinstance(head, dict) or (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise BadEntry("It is of another version.")
    length = _number(head.get("length"), 1, MOST)
    if len(packed) not in (4 * length, WIDTH * length):
        raise BadEntry("It has another number of tokens than it says.")
    key = unpack(packed, length)
    fingerprint = head.get("fingerprint")
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise BadEntry("It does not say of which model it is.")
    names = Names(team, fingerprint)
    if names.folder != folder or names.entry(key) != name:
        raise BadEntry("It is another entry's.")
    links = head.get("links")
    if not isinstance(links, list) or not 0 < len(links) <= MAX_CHAIN:
        raise BadEntry("Its chain has no sensible length.")
    return Manifest(fingerprint, key, _chain([_link(one) for one in links], length))


def _chain(links: Sequence[Link], length: int) -> tuple[Link, ...]:
    if links[0].start or links[-1].length != length or _parent(links[0]) is not None:
        raise BadEntry("Its chain does not lead to its tokens.")
    for parent, child in pairwise(links):
        if _parent(child) != parent.name or not parent.start < child.start <= parent.length:
            raise BadEntry("Its chain does not hold together.")
    return tuple(links)


def _parent(link: Link) -> str | None:
    match = _FILE.fullmatch(link.file)
    return match[2] if match is not None else None


def _link(value: Any) -> Link:
    if not isinstance(value, dict) or value.keys() != Link.__dataclass_fields__.keys():
        raise BadEntry("A file of its chain is not described.")
    if not (_is(value["file"], _FILE) and _is(value["checksum"], _CHECKSUM) and isinstance(value["cuttable"], bool)):
        raise BadEntry("A file of its chain is not named as files are.")
    nbytes = _number(value["nbytes"], 1, MOST_BYTES)
    pieces = value["pieces"]
    if not isinstance(pieces, list) or len(pieces) != -(-nbytes // PIECE) or not all(_is(piece, _PIECE) for piece in pieces):
        raise BadEntry("A file of its chain has other pieces than its size calls for.")
    length = _number(value["length"], 1, MOST)
    start = _number(value["start"], 0, length - 1)
    least = _number(value["minimum_reusable"], 0, MOST)
    return Link(value["file"], value["checksum"], start, length, nbytes, value["cuttable"], least, tuple(pieces))


def _is(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _number(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadEntry("One of its numbers makes no sense.")
    return value
