"""Take and put over both tiers: what stands in for the server's prompt cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_lm_hooks import Companion, ModelSource, Taken

from .. import caches as kinds
from ..index.keys import token_key
from ..statistics import Statistics
from .agreeing import agreeing
from .demotion import Demotion
from .lookup import Lookup, Nearest, parting, why_not_more
from .preparing import Preparation, Preparations
from .ram import Entry, RamTier, usable_by, usable_length
from .telling import Telling
from .together import Together
from .unsaved import Unsaved

# With several ranks: what one restore may take, and after one that took longer none is begun for so long.
RESTORE_SECONDS = 30.0
REST_SECONDS = 60.0

if TYPE_CHECKING:
    from ..cold.restoring import Restorer
    from ..cold.spill import SpillQueue
    from .choice import Decision
    from .ssd import SsdTier


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
        min_tokens: int = 1,
        max_unsaved_bytes: int = 2 << 30,
        demote_idle: float = 0.0,
        restorer: Restorer | None = None,
    ):
        self.ram = ram
        self._ssd = ssd
        self._statistics = statistics
        self._namespace = namespace
        self._writebehind = writebehind and ssd is not None
        self._min_tokens = max(1, min_tokens)
        self.is_clients: Callable[[Sequence[int]], bool] = lambda tokens: True  # whether a lookup counts
        self.on_lookup: Callable[[Lookup], None] = lambda lookup: None  # told of each that counts
        self.inspected = False  # whether a lookup keeps tokens of the place where prompt and stored sequence part
        # Seconds that prefilling so many tokens would take, None: not measured.
        self.estimate: Callable[[ModelSource, int], float | None] = lambda source, tokens: None
        # Caches of any tier as a source's requests have theirs, restored ones given what is in memory of their prefix; None when there is no room for them.
        self.adopted: Callable[[ModelSource, list[Any], tuple[Entry, int] | None], list[Any] | None] = lambda source, caches, lender: caches
        self.together: Together | None = None  # with several ranks, who agree on each lookup
        self._resting_until = 0.0  # after a restore that took too long
        self._telling = Telling()
        self.unsaved = Unsaved(max_unsaved_bytes, ram.__contains__)
        ram.on_evict = self._evicted
        self.demotion = None if ssd is None else Demotion(ram, ssd, statistics, demote_idle)
        self.preparations = None if ssd is None or restorer is None else Preparations(ssd, restorer)

    # The contract

    def owns(self, caches: Sequence[Any]) -> bool:
        try:
            kinds.check(caches)
        except kinds.UnknownCacheClass as error:
            self._statistics.fault("unknown_cache_class", f"{error}; upstream's prompt cache serves this model")
            return False
        return True

    def take(self, source: ModelSource, tokens: Sequence[int]) -> Taken | None:
        taken, tier, decision, key = self._looked_up(source, tokens)
        if self.is_clients(tokens):
            try:
                self._told(source, tokens, key, tier, taken.length if taken else 0, decision)
            except Exception as error:
                self._statistics.fault("lookup", f"saying what a request reused failed ({error!r})")
        return taken

    def retake(self, source: ModelSource, tokens: Sequence[int]) -> Taken | None:
        return self._looked_up(source, tokens)[0]

    def prepare(self, source: ModelSource, tokens: Sequence[int]) -> Preparation | None:
        if self.preparations is None or len(tokens) <= 1:
            return None
        try:
            key = token_key(tokens)
            found, _ = self._in_memory(self._namespace(source), source, tokens, key)
            return self.preparations.prepare(source, tokens, key, max(found[1] if found is not None else 0, self._min_tokens - 1))
        except Exception as error:
            self._statistics.fault("prepare", f"restoring a prefix ahead failed ({error!r})")
            return None

    def take_prepared(self, source: ModelSource, tokens: Sequence[int], prepared: Preparation | None) -> Taken | None:
        """As `take`, of what is in memory and what was `prepared`, for what is no request: it counts as no lookup."""
        try:
            return self._best(source, tokens, token_key(tokens), lambda longer_than: prepared.taken() if prepared is not None else None)[0]
        except Exception as error:
            self._statistics.fault("take", f"looking for a stored prefix failed ({error!r})")
            return None

    def put(
        self, source: ModelSource, tokens: Sequence[int], caches: list[Any], *, role: str = "assistant", companion: Companion | None = None
    ) -> None:
        try:
            self._put(source, tokens, caches, role, companion)
        except Exception as error:
            self._statistics.fault("put", f"storing a prefix failed ({error!r})")

    def snapshot(self, source: ModelSource, tokens: Sequence[int], caches: list[Any], *, role: str = "user") -> None:
        try:
            # A sequence that stays cuttable serves its prefixes itself, once it is put. After a reply nothing is put any more.
            converts = source.kv_scheme != "plain" and not kinds.quantized(caches)
            if role == "assistant" or converts or not kinds.stay_cuttable(caches):
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

    # In idle turns

    def idle_turn(self) -> bool:
        """One bounded step: compute an entry's arrays, queue one that waited for its model's fingerprint, or demote one. Whether there was something to do."""
        self._telling.turn()
        if (entry := next((e for e in self.ram if not e.settled), None)) is not None:
            # Rows come out of upstream's batch as graphs that keep the whole batch's buffers alive.
            mx.eval([cache.state for cache in entry.caches])
            entry.settled = True
            return True
        if self.unsaved.offer_one(self._offer):
            return True
        return self.demotion is not None and self.demotion.turn()

    def entries(self) -> list[Entry]:
        """All entries of the RAM tier, and those that wait to be queued; least recently used first."""
        return list(self.unsaved) + [entry for entry in self.ram if entry not in self.unsaved]

    # For relief of memory

    def lender(self, source: ModelSource, tokens: Sequence[int], key: bytes) -> tuple[Entry, int] | None:
        """The entry in memory that serves the longest prefix of `tokens`, and its length."""
        return self._in_memory(self._namespace(source), source, tokens, key)[0]

    def returns(self, entry: Entry) -> bool:
        """Whether an entry's prefix can come back from disk; without an SSD tier there is nothing to wait for."""
        return self._ssd is None or self._ssd.holds(entry)

    def save_now(self, entry: Entry, queue: SpillQueue, deadline: float) -> bool:
        """Have an entry written before anything else goes on. False when it is not on disk by the deadline."""
        if self._ssd is None or not self._offer(entry):
            return False
        ssd = self._ssd
        return queue.write_now(lambda: ssd.holds(entry), deadline)

    def release(self, entry: Entry) -> None:
        """Let go of an entry, saved or not."""
        self._drop(entry, self.unsaved.give_up)

    def forget(self, entry: Entry) -> None:
        """Let go of an entry that nobody wants any more."""
        self._drop(entry, self.unsaved.remove)

    # Inside

    def _drop(self, entry: Entry, from_unsaved: Callable[[Entry], None]) -> None:
        if entry in self.unsaved:
            from_unsaved(entry)
        if entry in self.ram:
            self.ram.remove(entry)
        entry.caches = []  # whoever walks over the entries still holds this one

    def _looked_up(self, source: ModelSource, tokens: Sequence[int]) -> tuple[Taken | None, str, Decision | None, bytes]:
        """What was found, in which tier, why it was restored or not, and the key of the tokens."""
        if self.together is None or len(tokens) <= 1:
            return self._looked_up_here(source, tokens)
        found: list[tuple[Taken | None, str, Decision | None, bytes]] = []

        def offer(most: int | None) -> Taken | None:
            try:
                found.append(self._offered(source, tokens, most, *found[-1:]))
            except Exception as error:  # the other ranks wait for what this one says
                self._statistics.fault("take", f"looking for a stored prefix failed ({error!r})")
                found.append((None, "", None, b""))
            return found[-1][0]

        taken = self.together.take(offer)
        return (taken, *found[-1][1:]) if taken is not None else (None, "", None, found[0][3])

    def _offered(self, source: ModelSource, tokens: Sequence[int], most: int | None, before: Any = None) -> Any:
        """What is found of the first `most` tokens: of what was found `before` if it can be cut, else anew."""
        if most is None:
            return self._looked_up_here(source, tokens)
        taken, *rest = before
        if taken is None or taken.length == most:
            return before
        if usable_length(tokens, most, taken.length, lambda length: kinds.can_cut(taken.caches, length)) == most:
            return Taken(kinds.lend(taken.caches, most), most), *rest
        return self._looked_up_here(source, tokens[: most + 1])

    def _looked_up_here(self, source: ModelSource, tokens: Sequence[int]) -> tuple[Taken | None, str, Decision | None, bytes]:
        """The same for this process alone."""
        taken, tier, decision, key = None, "", None, b""
        if len(tokens) > 1:
            try:
                key = token_key(tokens)
                taken, tier = self._take(source, tokens, key)
                if self._ssd is not None:
                    decision = self._ssd.decided(source, key, tier == "ssd")
                    tier = self._ssd.came_from(source, key) if tier == "ssd" else tier
            except Exception as error:
                self._statistics.fault("take", f"looking for a stored prefix failed ({error!r})")
        return taken, tier, decision, key

    def _told(self, source: ModelSource, tokens: Sequence[int], key: bytes, tier: str, reused: int, decision: Decision | None) -> None:
        """Count a lookup, and say how much was reused, and why not more."""
        saved = self.estimate(source, reused) if reused else None
        nearest = found = None
        if reused < len(tokens) - 1 and (decision is None or decision.action == "restored"):
            nearest = self._nearest(source, key)
            found = why_not_more(nearest, len(tokens), self._min_tokens)
        restored = self._ssd.restore_seconds if self._ssd is not None and tier in ("ssd", "shared") else None
        lookup = Lookup(
            len(tokens), reused, tier, decision, found or "", nearest and nearest[:3], restored, saved,
            parting(source.path, nearest, tokens) if nearest is not None and self.inspected else None,
        )  # fmt: skip
        self._statistics.looked_up(tier, len(tokens), reused, saved or 0.0)
        self.on_lookup(lookup)
        self._telling.tell(lookup)

    def _nearest(self, source: ModelSource, key: bytes) -> Nearest | None:
        """The stored sequence that shares most with these tokens."""
        found = []
        if (in_ram := self.ram.closest(self._namespace(source), key)) is not None:
            found.append(Nearest(in_ram[1], in_ram[0].length, "ram", lambda: in_ram[0].key))
        if (waiting := self._waiting(source, key, lambda _, common: common)) is not None:
            found.append(Nearest(waiting[1], waiting[0].length, "queue", lambda: waiting[0].key))
        if self._ssd is not None and (on_disk := self._ssd.closest(source, key)) is not None:
            found.append(Nearest(on_disk.length, on_disk.entry.length, "ssd", lambda: on_disk.entry.key))
        return max(found, key=lambda one: one[:3], default=None)

    def _take(self, source: ModelSource, tokens: Sequence[int], key: bytes) -> tuple[Taken | None, str]:
        """What was found, and in which tier."""
        ssd = self._ssd
        if ssd is None:
            return self._best(source, tokens, key, lambda longer_than: None)

        def restore(longer_than: int) -> Taken | None:
            if self.together is not None:
                return self._restored_in_time(source, tokens, key, longer_than)
            prepared = self.preparations.claim(source, key) if self.preparations is not None else None
            return prepared.taken() if prepared is not None else ssd.take(source, tokens, key, longer_than)

        return self._best(source, tokens, key, restore)

    def _restored_in_time(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> Taken | None:
        """What is on disk, read on another thread for a bounded time: the other ranks stand still meanwhile."""
        if self.preparations is None or time.monotonic() < self._resting_until:
            return None
        restore = self.preparations.alone(source, tokens, key, longer_than)
        until = time.monotonic() + RESTORE_SECONDS
        while not restore.step():
            if time.monotonic() > until:
                restore.cancel()
                self._resting_until = time.monotonic() + REST_SECONDS
                self._statistics.fault("slow_restore", f"a prefix was not restored in {RESTORE_SECONDS:g} s and is computed; nothing is restored for {REST_SECONDS:g} s")
                return None
            time.sleep(0.0005)
        return restore.taken()

    def _best(self, source: ModelSource, tokens: Sequence[int], key: bytes, restore: Callable[[int], Taken | None]) -> tuple[Taken | None, str]:
        """The longer one of what is in memory and what `restore` gives, which is to be longer than so many tokens; and its tier."""
        namespace = self._namespace(source)
        found, tier = self._in_memory(namespace, source, tokens, key)
        longer_than = found[1] if found is not None else self._min_tokens - 1
        restored = restore(longer_than)
        if restored is not None and restored.length > longer_than:
            if (restored := self._adopt(source, restored, found)) is not None:
                return self._keep_restored(namespace, source, tokens, restored), "ssd"
            found, tier = self._in_memory(namespace, source, tokens, key)  # it may have had to make room
        if found is None:
            return None, ""
        entry, length = found
        if tier == "ram":
            self.ram.touch(entry)
        elif not kinds.stay_cuttable(entry.caches):
            self.ram.put(entry)  # as with those that are restored
        whole = length == entry.length
        lent = Taken(kinds.lend(entry.caches, None if whole else length), length, entry.companion if whole else None)
        taken = self._adopt(source, lent, None)
        return taken, tier if taken is not None else ""

    def _in_memory(self, namespace: Hashable, source: ModelSource, tokens: Sequence[int], key: bytes) -> tuple[tuple[Entry, int] | None, str]:
        """The entry that serves the longest prefix without reading anything, with that length, and where it is."""
        found, tier = self.ram.find(namespace, tokens, key), "ram"
        waiting = self._waiting(source, key, usable_by(tokens))
        if waiting is not None and (found is None or found[1] < waiting[1]):
            found, tier = waiting, "queue"
        return (found if found is None or found[1] >= self._min_tokens else None), tier

    def _waiting(self, source: ModelSource, key: bytes, usable: Callable[[Any, int], int]) -> tuple[Entry, int] | None:
        """Of what has left RAM and is not on disk yet, the entry that serves the longest prefix, and that length."""
        namespace = self._namespace(source)
        found = [self.unsaved.find(namespace, key, usable)]
        if self._ssd is not None:
            found.append(self._ssd.waiting(namespace, source, key, usable))
        return max((one for one in found if one is not None), key=lambda one: one[1], default=None)

    def _adopt(self, source: ModelSource, taken: Taken, found: tuple[Entry, int] | None) -> Taken | None:
        caches = self.adopted(source, taken.caches, found)
        return None if caches is None else taken._replace(caches=caches)

    def _keep_restored(self, namespace: Hashable, source: ModelSource, tokens: Sequence[int], restored: Taken) -> Taken:
        """Restored caches go to the request, which then writes in place. Only those that a longer entry will not be able to serve stay here as well, and those that share what they hold."""
        if kinds.stay_cuttable(restored.caches) and not kinds.shared(restored.caches):
            return restored
        key = token_key(tokens[: restored.length])
        self.ram.put(Entry(namespace, source, key, restored.length, restored.caches, "user", restored.companion))
        return restored._replace(caches=kinds.lend(restored.caches))

    def _put(
        self, source: ModelSource, tokens: Sequence[int], caches: list[Any], role: str, companion: Companion | None = None
    ) -> None:
        caches, held = agreeing(tokens, caches, self._statistics)
        if held == 0:
            return
        key = token_key(tokens[:held])
        namespace = self._namespace(source)
        if held < len(tokens):
            companion = None  # it belongs to all the tokens
        covering = self.ram.covering(namespace, key, held) if companion is None else None
        if covering is not None and covering.length > held:
            self.ram.touch(covering)
            return
        kinds.rest(caches)
        entry = Entry(namespace, source, key, held, caches, role, companion)
        self._statistics.count("puts")
        if not self.ram.put(entry):
            self._statistics.count("larger_than_ram_tier")
            self._save(entry)
            return
        if self._writebehind:
            self._save(entry)

    def _evicted(self, entry: Entry) -> None:
        if self._ssd is not None and not self._ssd.covers(entry):
            self._statistics.count("spills")
            self._save(entry)

    def _save(self, entry: Entry) -> None:
        if self._ssd is not None and not self._offer(entry):
            self.unsaved.add(entry)

    def _offer(self, entry: Entry) -> bool:
        return self._ssd is not None and self._ssd.offer(entry, kept=entry in self.ram)
