"""Whether an entry may continue a stored one, so that only its new tokens are written.

It may when its values for the stored tokens are those on disk, bit for bit: the same
tokens computed in other chunks round differently, and both tiers must agree. That is
proven, not inferred: what is written passes through here, and the part that the
chain's files hold is hashed and compared with the checksums in their headers.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from .catalog import MAX_CHAIN, Catalog, ColdEntry, Found
from .checking import BadEntry
from .health import logger
from .meta import DTYPES, Header, Meta, TensorSpec
from .reader import EntryReader, open_entry, shared


class NotIdentical(Exception):
    """The chain holds other numbers for the tokens from `since` on, or no longer holds them: the entry may only continue what is before."""

    def __init__(self, reason: str, since: int):
        super().__init__(reason)
        self.since = since


class Stale(Exception):
    """The file of `entry` is not the one that the catalog knows."""

    def __init__(self, entry: ColdEntry):
        super().__init__(f"{entry.path.name} was replaced.")
        self.entry = entry


class ChainFull(Exception):
    """What would be continued has as many files as a chain may have."""


@dataclass(frozen=True, eq=False)
class _Link:
    """One file of the chain: the entry takes its tokens from its start up to `until`. `numbers` are those of the entry's tensors in it, 0 for those that are not parts."""

    entry: ColdEntry
    header: Header
    until: int
    numbers: tuple[int, ...]


class Continuation:
    """Proves one entry against the chain it would continue. Writer thread; see `writer.Proof`."""

    def __init__(self, found: Found, meta: Meta):
        """`meta` is that of the whole entry, `found` what it continues and from which token on. Raises BadEntry (also for tensors that do not fit), Stale, OSError."""
        self._links: list[_Link] = []
        self._readers: dict[_Link, EntryReader] = {}
        self._files = ExitStack()
        self._bounds: list[int] = []
        self._hashers: list[xxhash.xxh3_64] = []
        self._at = 0
        try:
            chain = found.entry.chain
            for entry, until in zip(chain, [*(e.start for e in chain[1:]), found.length], strict=True):
                self._open(entry, until, meta)
        except BaseException:
            self.close()
            raise
        self.meta = replace(
            meta,
            start=found.length,
            parent=found.entry.name,
            parent_checksum=self._links[-1].header.checksum,
            parts=meta.by_token,
            tensors=tuple(
                spec.resized(meta.length - found.length) if part else spec
                for spec, part in zip(meta.tensors, meta.by_token, strict=True)
            ),
        )

    @property
    def chain(self) -> list[ColdEntry]:
        """The entries that are continued, the whole one first."""
        return [link.entry for link in self._links]

    def start(self, spec: TensorSpec) -> None:
        assert spec.grow_axis is not None
        slot = math.prod(spec.shape[spec.grow_axis + 1 :]) * DTYPES[spec.dtype]
        self._bounds = [*(link.until * slot for link in self._links), self.meta.length * slot]
        self._hashers = [xxhash.xxh3_64() for _ in self._links]
        self._at = 0  # in the current row: the tokens of one index of the axes before

    def take(self, data: memoryview) -> memoryview:
        ours: list[memoryview] = []
        while len(data):
            place = bisect_right(self._bounds, self._at)
            piece = data[: self._bounds[place] - self._at]
            if place < len(self._hashers):
                self._hashers[place].update(piece)
            else:
                ours.append(piece)
            self._at = (self._at + len(piece)) % self._bounds[-1]
            data = data[len(piece) :]
        return ours[0] if len(ours) == 1 else memoryview(b"".join(ours))

    def check(self, number: int) -> None:
        for link, hasher in zip(self._links, self._hashers, strict=True):
            since = link.entry.start
            try:
                expected = self._expected(link, link.numbers[number])
            except (BadEntry, OSError) as error:
                raise NotIdentical(f"Tokens {since} to {link.until} cannot be read ({error}).", since) from error
            if hasher.hexdigest() != expected:
                raise NotIdentical(f"Tokens {since} to {link.until} have other numbers on disk.", since)

    def _expected(self, link: _Link, number: int) -> str:
        if (reader := self._readers.get(link)) is not None:
            return reader.digest_of_first(number, link.until - link.entry.start)
        return link.header.checksums[number]

    def confirm(self) -> None:
        """Check that the chain's files are in place. Raises NotIdentical, OSError. Call with the directory locked, so that they stay."""
        for entry in self.chain:
            if inode(entry.path) != entry.inode:
                raise NotIdentical(f"{entry.path.name} is no longer there.", entry.start)

    def close(self) -> None:
        self._files.close()

    def _open(self, entry: ColdEntry, until: int, meta: Meta) -> None:
        with ExitStack() as files:
            reader = files.enter_context(open_entry(entry.path))
            if reader.header.checksum != entry.checksum:
                raise Stale(entry)
            link = _Link(entry, reader.header, until, tuple(shared(meta, reader.header.meta)))
            self._links.append(link)
            if until < entry.length:
                # What is continued within a file has no checksum there: it is read again, tensor by tensor.
                self._readers[link] = reader
                self._files.push(files.pop_all())


def continuation(catalog: Catalog, meta: Meta, key: bytes, limit: int) -> Continuation | None:
    """How the entry of `meta` can continue a stored one, of which it uses `limit` tokens at most; None when there is none. Raises ChainFull, OSError.

    Entries whose files turn out to be gone or replaced leave the catalog.
    """
    if not any(meta.by_token):
        return None
    while (found := catalog.continued(meta.fingerprint, meta.namespace, key, limit)) is not None:
        if meta.cuttable and found.length < meta.minimum_reusable:
            return None
        chain = found.entry.chain
        if len(chain) >= MAX_CHAIN:
            raise ChainFull
        gone = next((one for one in chain if inode(one.path) != one.inode), None)
        try:
            if gone is None:
                return Continuation(found, meta)
        except Stale as error:
            gone = error.entry
        except FileNotFoundError:
            continue  # only just: the next look says which
        except BadEntry as error:
            logger.debug("SSD cache: %d tokens are not continued: %s", found.length, error)
            return None
        catalog.forget(gone.path, gone)
    return None


def inode(path: Path) -> tuple[int, int] | None:
    """What tells the file at `path` from any other; None when there is none. Raises OSError."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
