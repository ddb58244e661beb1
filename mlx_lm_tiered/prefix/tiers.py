"""Take and put over both tiers: what stands in for the server's prompt cache."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from mlx_lm_hooks import ModelSource, Taken

from .. import caches as kinds
from ..statistics import Statistics
from .ssd import SsdTier
from .index import token_key
from .ram import Entry, RamTier

logger = logging.getLogger("mlx_lm_tiered")


class TieredPrefixCache:
    """The contract's `PrefixCache` over a RAM tier and, with `ssd`, an SSD tier.

    Lives on the generation thread. A fault inside is counted, warned about once per
    kind, and acts as a miss or as nothing stored.
    """

    def __init__(
        self,
        ram: RamTier,
        ssd: SsdTier | None,
        statistics: Statistics,
        namespace: Callable[[ModelSource], Hashable],
        writebehind: bool = True,
    ):
        self.ram = ram
        self._ssd = ssd
        self._statistics = statistics
        self._namespace = namespace
        self._writebehind = writebehind and ssd is not None
        self._unsaved: deque[Entry] = deque()  # evicted or put before their model's fingerprint was known
        ram._on_evict = self._evicted

    # The contract

    def owns(self, caches: Sequence[Any]) -> bool:
        try:
            kinds.check(caches)
        except kinds.UnknownCacheClass as error:
            self._statistics.fault("unknown_cache_class", f"{error}; upstream's prompt cache serves this model")
            return False
        return True

    def take(self, source: ModelSource, tokens: Sequence[int]) -> Taken | None:
        taken = None
        if len(tokens) > 1:
            try:
                taken = self._take(source, tokens)
            except Exception as error:
                self._statistics.fault("take", f"looking for a stored prefix failed ({error!r})")
        self._statistics.looked_up(len(tokens), taken.length if taken else 0)
        return taken

    def put(self, source: ModelSource, tokens: Sequence[int], caches: list[Any], *, role: str = "assistant") -> None:
        try:
            self._put(source, tokens, caches, role)
        except Exception as error:
            self._statistics.fault("put", f"storing a prefix failed ({error!r})")

    def snapshot(self, source: ModelSource, tokens: Sequence[int], caches: list[Any], *, role: str = "user") -> None:
        try:
            # A sequence that stays cuttable serves its prefixes itself, once it is put.
            if source.kv_scheme != "plain" or not kinds.stay_cuttable(caches):
                self._put(source, tokens, kinds.lend(caches), role)
        except Exception as error:
            self._statistics.fault("put", f"storing a prefix failed ({error!r})")

    def observe(self, caches: list[Any]) -> None:
        kinds.observe(caches)

    def trim(self, *, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        self.ram.trim(max_entries, max_bytes)

    def by_role(self) -> Mapping[str, tuple[int, int]]:
        return self.ram.by_role()

    @property
    def nbytes(self) -> int:
        return self.ram.nbytes

    def __len__(self) -> int:
        return len(self.ram)

    # Saving, in idle turns

    def unsaved_turn(self) -> bool:
        """Hand one entry that waited for its fingerprint to the writer. True when more can go now."""
        if self._ssd is None or not self._unsaved or not self._ssd.offer(self._unsaved[0]):
            return False
        self._unsaved.popleft()
        return bool(self._unsaved)

    def unsaved_entries(self) -> list[Entry]:
        """The entries that the SSD tier does not have yet, for a flush."""
        if self._ssd is None:
            return []
        return [entry for entry in self.ram if not self._ssd.covers(entry)] + list(self._unsaved)

    # Inside

    def _take(self, source: ModelSource, tokens: Sequence[int]) -> Taken | None:
        key = token_key(tokens)
        namespace = self._namespace(source)
        found = self.ram.find(namespace, tokens, key)
        ram_length = found[1] if found else 0
        if self._ssd is not None:
            restored = self._ssd.take(source, tokens, key, longer_than=ram_length)
            if restored is not None:
                return self._keep_restored(namespace, source, tokens, restored)
        if found is None:
            return None
        entry, length = found
        self.ram.touch(entry)
        self._statistics.hit("ram", length)
        return Taken(kinds.lend(entry.caches, length), length)

    def _keep_restored(self, namespace: Hashable, source: ModelSource, tokens: Sequence[int], restored: Taken) -> Taken:
        """Restored caches go to the request, which then writes in place. Only those that a longer entry will not be able to serve stay here as well."""
        self._statistics.hit("ssd", restored.length)
        if kinds.stay_cuttable(restored.caches):
            return restored
        key = token_key(tokens[: restored.length])
        self.ram.put(Entry(namespace, source, key, restored.length, restored.caches, "user"))
        return Taken(kinds.lend(restored.caches), restored.length)

    def _put(self, source: ModelSource, tokens: Sequence[int], caches: list[Any], role: str) -> None:
        held = self._held(tokens, caches)
        if held == 0:
            return
        if held < len(tokens):
            caches = kinds.lend(caches, held)
        key = token_key(tokens[:held])
        namespace = self._namespace(source)
        if (covering := self.ram.covering(namespace, key, held)) is not None and covering.length > held:
            self.ram.touch(covering)
            return
        entry = Entry(namespace, source, key, held, caches, role)
        self._statistics.count("puts")
        if not self.ram.put(entry):
            self._statistics.count("larger_than_ram_tier")
            self._save(entry)
        elif self._writebehind:
            self._save(entry)

    def _held(self, tokens: Sequence[int], caches: list[Any]) -> int:
        """How many of `tokens` the caches hold: the door where key length and cache offset must agree.

        Upstream's speculative path stores a key that is one longer than its cache. The
        caches hold the key's first tokens, so what they agree on is stored under that
        many tokens; caches that cannot be cut to it are refused.
        """
        lengths = [n for n in map(kinds.length_of, caches) if n is not None]
        held = min([len(tokens), *lengths])
        if held == len(tokens) and all(n == held for n in lengths):
            return held
        if held == 0 or not kinds.can_cut(caches, held):
            self._statistics.fault("length_mismatch", f"a cache of {lengths[:1]} tokens came with a key of {len(tokens)}; not stored")
            return 0
        self._statistics.count("keys_shortened")
        return held

    def _evicted(self, entry: Entry) -> None:
        if self._ssd is not None and not self._ssd.covers(entry):
            self._statistics.count("spills")
            self._save(entry)

    def _save(self, entry: Entry) -> None:
        if self._ssd is not None and not self._ssd.offer(entry):
            self._unsaved.append(entry)
