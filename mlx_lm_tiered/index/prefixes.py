"""An index of token sequences that finds the longest reusable prefix.

Sequences are kept sorted. In that order the neighbours of a query share its
longest prefixes, and the shared length only falls on the way outward, so a search
is one bisection and a short walk. Comparisons are of the tokens themselves
(`memcmp` over fixed-width big-endian integers); nothing is hashed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .keys import WIDTH, common_tokens


E = TypeVar("E")


class PrefixIndex(Generic[E]):
    """Entries of one namespace, at most one per token sequence. Not thread-safe.

    `attribute` is where an entry has its key, of `width` bytes a token. Keys do not change.
    """

    def __init__(self, attribute: str = "key", width: int = WIDTH) -> None:
        self._attribute = attribute
        self._width = width
        self._keys: list[bytes] = []
        self._entries: dict[bytes, E] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[E]:
        """All entries, in the order of their tokens; the index may change meanwhile."""
        return iter([self._entries[key] for key in self._keys])

    def copy(self) -> PrefixIndex[E]:
        """The entries of this moment, for another thread to search: both copies are made in one step each."""
        other: PrefixIndex[E] = PrefixIndex(self._attribute, self._width)
        other._entries = self._entries.copy()
        other._keys = [key for key in self._keys.copy() if key in other._entries]
        return other

    def add(self, entry: E) -> None:
        """Add an entry; one with the same tokens is replaced."""
        key = getattr(entry, self._attribute)
        if key not in self._entries:
            insort(self._keys, key)
        self._entries[key] = entry

    def remove(self, entry: E) -> None:
        """Remove this very entry. Does nothing when it is not (or no longer) here."""
        key = getattr(entry, self._attribute)
        if self._entries.get(key) is not entry:
            return
        del self._entries[key]
        del self._keys[bisect_left(self._keys, key)]

    def exact(self, key: bytes) -> E | None:
        """The entry with exactly these tokens."""
        return self._entries.get(key)

    def ancestors(self, key: bytes) -> list[E]:
        """The entries whose tokens are a strict prefix of these, shortest first."""
        place = bisect_left(self._keys, key)
        return [self._entries[k] for k in self._keys[:place] if key.startswith(k)]

    def descendants(self, key: bytes) -> list[E]:
        """The entries that start with these tokens, the exact one included."""
        found = []
        for k in self._keys[bisect_left(self._keys, key) :]:
            if not k.startswith(key):
                break
            found.append(self._entries[k])
        return found

    def best(self, key: bytes, usable: Callable[[E, int], int]) -> tuple[E, int] | None:
        """The entry that serves the longest prefix of `key`, and that length in tokens.

        `usable(entry, common)` says how many of the `common` shared leading tokens
        the entry can serve (0 for none).
        """
        best: tuple[E, int] | None = None
        place = bisect_left(self._keys, key)
        for walk in (range(place, len(self._keys)), range(place - 1, -1, -1)):
            for i in walk:
                common = common_tokens(self._keys[i], key, self._width)
                if common == 0 or (best is not None and common <= best[1]):
                    break
                entry = self._entries[self._keys[i]]
                length = usable(entry, common)
                if length > 0 and (best is None or length > best[1]):
                    best = entry, length
        return best

    def closest(self, key: bytes) -> tuple[E, int] | None:
        """The entry that shares most leading tokens with `key`, usable or not, and how many."""
        return self.best(key, lambda entry, common: common)
