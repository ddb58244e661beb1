"""The RAM tier: whole prefix entries in least-recently-used order under a byte cap."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm_hooks import Companion

from .. import caches as kinds
from ..index.keys import WIDTH
from ..index.prefixes import PrefixIndex


def usable_length(tokens: Sequence[int], common: int, length: int, can_cut: Callable[[int], bool]) -> int:
    """How many of the first `common` tokens an entry of `length` tokens can serve.

    Always fewer than ``len(tokens)``: something must be left to forward. A prefix
    that needs the entry cut must be one the entry can be cut to, and must not end
    inside an image (its ids are negative and equal): the image would be half in the
    cache and half in the input.
    """
    limit = min(common, len(tokens) - 1)
    if length <= limit:
        return length
    while limit > 0 and tokens[limit] < 0 and tokens[limit] == tokens[limit - 1]:
        limit -= 1
    return limit if limit > 0 and can_cut(limit) else 0


def usable_by(tokens: Sequence[int]) -> Callable[[Any, int], int]:
    """`usable_length` for these tokens: of an entry, in whichever tier, and the number of tokens it has in common with them."""
    return lambda entry, common: usable_length(tokens, common, entry.length, entry.serves)


@dataclass(eq=False)
class Entry:
    """One stored prefix. `caches` hold exactly the tokens of `key` and are never written to again; `companion` goes with all of them, never with fewer."""

    namespace: Hashable
    source: Any
    key: bytes
    length: int
    caches: list[Any]
    role: str
    companion: Companion | None = None
    settled: bool = False  # whether its arrays are computed
    last_used: float = field(default_factory=time.monotonic)
    created: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=itertools.count(1).__next__)  # names it to people; never the same twice
    nbytes: int = field(init=False)
    shared: dict[Hashable, int] = field(init=False, repr=False)  # of these, what other entries may hold as well

    def __post_init__(self) -> None:
        self.shared = kinds.shared(self.caches)
        beside = self.companion.tensors.values() if self.companion is not None else ()
        self.nbytes = kinds.nbytes(self.caches) + sum(array.nbytes for array in beside)

    @property
    def own_nbytes(self) -> int:
        """Of these bytes, what leaves memory with it: blocks go back to their pool, which stays."""
        return self.nbytes - sum(self.shared.values())

    def serves(self, length: int) -> bool:
        """Whether its first `length` tokens can be reused."""
        return length == self.length or (length < self.length and kinds.can_cut(self.caches, length))


class RamTier:
    """Entries of all namespaces. Belongs to the generation thread; the counts may be read from anywhere.

    `on_evict` gets every entry that leaves for want of room; `max_entries` is None for
    no limit but the bytes.
    """

    def __init__(self, max_bytes: int, max_entries: int | None = None):
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.evictions = 0
        self.on_evict: Callable[[Entry], None] = lambda entry: None
        self._order: OrderedDict[Entry, None] = OrderedDict()  # least recently used first
        self._indexes: defaultdict[Hashable, PrefixIndex[Entry]] = defaultdict(PrefixIndex)
        self._nbytes = 0
        self._holders: Counter[Hashable] = Counter()  # entries, of each part that several may hold

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._order

    def __iter__(self) -> Iterator[Entry]:
        """All entries, least recently used first; the tier may change meanwhile."""
        return iter(list(self._order))

    @property
    def nbytes(self) -> int:
        """Bytes of all entries. Blocks that entries share count once; buffers that they share, once for each."""
        return self._nbytes

    def find(self, namespace: Hashable, tokens: Sequence[int], key: bytes) -> tuple[Entry, int] | None:
        """The entry that serves the longest prefix of `tokens`, and its length."""
        if namespace not in self._indexes:
            return None
        best = self._indexes[namespace].best(key, usable_by(tokens))
        if best is not None and best[0].length > best[1] and (exact := self._indexes[namespace].exact(key[: best[1] * WIDTH])) is not None:
            return exact, best[1]  # need not be cut, and may have companion state
        return best

    def closest(self, namespace: Hashable, key: bytes) -> tuple[Entry, int] | None:
        """The entry that shares most leading tokens with `key`, usable or not, and how many."""
        return self._indexes[namespace].closest(key) if namespace in self._indexes else None

    def index_of(self, namespace: Hashable) -> PrefixIndex[Entry]:
        """The entries of a namespace at this moment. Any thread; entries are not to be changed, nor their arrays touched."""
        index = self._indexes.get(namespace)
        return index.copy() if index is not None else PrefixIndex()

    def touch(self, entry: Entry) -> None:
        """Make an entry the most recently used one."""
        entry.last_used = time.monotonic()
        self._order.move_to_end(entry)

    def covering(self, namespace: Hashable, key: bytes, length: int) -> Entry | None:
        """An entry from which exactly these tokens can be served, without companion state."""
        if namespace not in self._indexes:
            return None
        return next((e for e in self._indexes[namespace].descendants(key) if e.serves(length)), None)

    def put(self, entry: Entry) -> bool:
        """Store an entry as the most recently used. False when it alone is over the cap.

        It replaces the entry of the same tokens, and the entries of its prefixes that
        it can serve itself: an entry that cannot be cut must leave them, and companion
        state is never served by another.
        """
        if entry.nbytes > self.max_bytes or self.max_entries == 0:
            return False
        index = self._indexes[entry.namespace]
        if (same := index.exact(entry.key)) is not None:
            if same.companion is not None and entry.companion is None:
                self.touch(same)
                return True
            self.remove(same)
        for ancestor in index.ancestors(entry.key):
            if ancestor.companion is None and entry.serves(ancestor.length):
                self.remove(ancestor)
        self._indexes[entry.namespace].add(entry)
        self._order[entry] = None
        self._count(entry, 1)
        self.trim(self.max_entries, self.max_bytes)
        return True

    def trim(self, max_entries: int | None, max_bytes: int | None) -> None:
        """Evict the least recently used entries until at most that many and that much is left."""
        while self._order and (
            (max_entries is not None and len(self._order) > max_entries)
            or (max_bytes is not None and self._nbytes > max_bytes)
        ):
            entry = next(iter(self._order))
            self.remove(entry)
            self.evictions += 1
            self.on_evict(entry)

    def remove(self, entry: Entry) -> None:
        """Let go of an entry, without telling `on_evict`."""
        del self._order[entry]
        index = self._indexes[entry.namespace]
        index.remove(entry)
        if not len(index):
            del self._indexes[entry.namespace]
        self._count(entry, -1)

    def _count(self, entry: Entry, by: int) -> None:
        self._nbytes += by * entry.own_nbytes
        for part, size in entry.shared.items():
            held = self._holders[part]
            self._holders[part] = held + by
            if min(held, held + by) == 0:
                self._nbytes += by * size
            if held + by == 0:
                del self._holders[part]

    def by_role(self) -> dict[str, tuple[int, int]]:
        """(entries, bytes) per role."""
        totals = {"assistant": (0, 0), "user": (0, 0), "system": (0, 0)}
        for entry in list(self._order):
            count, size = totals.get(entry.role, (0, 0))
            totals[entry.role] = count + 1, size + entry.nbytes
        return totals
