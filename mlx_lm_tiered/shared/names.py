"""What objects are called. Names are digests under the team's key: who sees them, but not the key, learns nothing of the tokens.

    v1/TEAM/MODEL/pieces/SHA256    a piece of a segment file, named by its content
    v1/TEAM/MODEL/entries/NAME     a manifest; NAME is a keyed digest of the entry's tokens
    v1/TEAM/MODEL/rungs/DIGEST     a keyed digest of the first so many tokens, and in it the NAME of an entry that begins with them
    v1/TEAM/MODEL/uses/NAME        empty; when it was written last tells the day of the entry's last use
    v1/TEAM/cleaned                empty; when it was written last tells when what is old was last deleted
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

from ..index.keys import WIDTH

VERSION = "v1"
FOLDERS = PIECES, ENTRIES, RUNGS, USES = "pieces", "entries", "rungs", "uses"
# Lengths at which a prefix can be found. Each is a quarter more than the one before, so
# that few objects make an entry findable, and what a rung names shares at least four
# fifths of the longest prefix that could have been found.
LENGTHS = tuple(int(256 * 1.25**step) for step in range(38))
DIGITS = 32


class Team:
    """The namespace of those who share a key. `secret` is any text, the empty one for a store without teams."""

    def __init__(self, secret: str = ""):
        self._key = hashlib.blake2b(secret.encode(errors="surrogateescape"), digest_size=32, person=b"mlx-lm-tiered").digest()
        self.folder = f"{VERSION}/{self.digest('team', b'')}"
        self.cleaned = f"{self.folder}/cleaned"

    def digest(self, kind: str, data: bytes, size: int = DIGITS // 2) -> str:
        """A keyed digest, in hex digits. Of different kinds none is like another."""
        return self.hasher(kind, data, size).hexdigest()

    def hasher(self, kind: str, data: bytes = b"", size: int = DIGITS // 2) -> hashlib.blake2b:
        """The same, before its end."""
        return hashlib.blake2b(data, digest_size=size, key=self._key, person=kind.encode())

    def mac(self, data: bytes) -> bytes:
        """64 hex digits that only who has the key can make of `data`."""
        return self.digest("mac", data, 32).encode()

    def signed(self, data: bytes) -> bytes:
        """`data` behind its `mac`."""
        return self.mac(data) + b"\n" + data

    def opened(self, signed: bytes) -> bytes | None:
        """What was signed with this key; None for anything else."""
        mac, _, data = signed.partition(b"\n")
        return data if hmac.compare_digest(mac, self.mac(data)) else None


class Names:
    """The names of one model's objects."""

    def __init__(self, team: Team, fingerprint: str):
        self.team = team
        self.fingerprint = fingerprint
        self.folder = f"{team.folder}/{team.digest('model', fingerprint.encode())}"

    def place(self, folder: str, name: str) -> str:
        return f"{self.folder}/{folder}/{name}"

    def entry(self, key: bytes) -> str:
        """NAME of the entry of these tokens (see `index.keys`)."""
        return self.team.digest("entry", key)

    def rungs(self, key: bytes, above: int = 0, most: int | None = None) -> list[tuple[int, str]]:
        """(length, DIGEST) of the rungs of these tokens, those longer than `above` and of `most` tokens at most, shortest first."""
        most = len(key) // WIDTH if most is None else most
        return [(length, digest) for length, digest in self._rungs(key) if above < length <= most]

    def _rungs(self, key: bytes) -> Iterator[tuple[int, str]]:
        hasher, at = self.team.hasher("rung"), 0
        for length in LENGTHS:
            if length * WIDTH > len(key):
                return
            hasher.update(key[at * WIDTH : length * WIDTH])
            at = length
            yield length, hasher.copy().hexdigest()
