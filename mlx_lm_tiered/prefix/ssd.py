"""The SSD tier as the prefix cache sees it: entries of a model, found by their tokens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from mlx_lm_hooks import ModelSource, Taken

from .. import caches as kinds
from ..cold.ahead import TRIES
from ..cold.restore import Restored
from ..cold.spill import Job, SpillQueue
from ..cold.store import ColdEntry, ColdStore, Found
from ..identity import Identity, IdentityResolver
from ..statistics import Statistics
from .choice import Chooser, Decision, candidates
from .probing import Look
from .ram import Entry, usable_by
from .rates import KEPT_CHUNKS, Rates

# The first requests after a start may come before its weights are hashed and its headers
# read; a prefix worth restoring costs more than the wait. Seconds, of all requests for a
# model together: decoding stands still meanwhile, and weights on a slow disk take minutes.
PATIENCE = 10.0
UNSERVED = 64  # requests whose decision is remembered until they are served
# How the namespaces of entries with companion state begin: they are stored beside those
# without, which neither serve for them nor give way to them.
BESIDE = "companion:"


class Fetch(Protocol):
    """What comes from elsewhere for one request. Generation thread only."""

    @property
    def entry(self) -> ColdEntry | None:
        """What came, once it is over."""

    def over(self) -> bool:
        """Whether it came, or is not to be waited for any longer."""

    def wait(self, most: float = math.inf) -> None:
        """Until it is over, which is soon, but no longer than so many seconds."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""


class Shared(Protocol):
    """What has entries that others computed, and brings them into the directory."""

    def begin(self, fingerprint: str, key: bytes, have: int, most: int) -> Fetch | None:
        """Ask for a prefix of `key` longer than `have` tokens and of `most` at most; None when it is not worth asking. Returns at once."""


class SsdTier:
    """Store, queue and identities behind three questions: take, offer, covers. Generation thread only."""

    def __init__(
        self, store: ColdStore, queue: SpillQueue, identities: IdentityResolver, statistics: Statistics, chooser: Chooser | None = None
    ):
        self._store = store
        self._queue = queue
        self._identities = identities
        self._statistics = statistics
        self._patience: dict[ModelSource, float] = {}  # what is left of it
        self._until: dict[ModelSource, float] = {}  # when it ends, for those who need not stand still
        self.chooser = chooser or Chooser(Rates(), "always")
        self._decided: dict[tuple[ModelSource, bytes], Decision] = {}  # by the model and the key of a request that has not been served yet
        self.shared: Shared | None = None
        self._came: dict[tuple[ModelSource, bytes], ColdEntry] = {}  # from elsewhere, for a request that has not been served yet
        self._early: dict[ModelSource, deque[tuple[int, int, float]]] = {}  # measured before the fingerprint was known

    def take(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> Taken | None:
        """Restore the longest usable prefix of `tokens`, if it is longer than `longer_than`."""
        if self.chooser.mode == "never" or self._found(source) is None:
            return None
        if (fetch := self.fetch(source, tokens, key, longer_than)) is not None:
            fetch.wait()
            self.fetched(source, key, fetch)
        # An entry that turns out damaged leaves the index; the next best may serve.
        for _ in range(TRIES):
            located = self.locate(source, tokens, key, longer_than)
            if located is None:
                return None
            entry, length = located
            caches = self._store.restore(entry)
            if caches is not None:
                return self.cut(entry, caches, length)
        return None

    def locate(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> tuple[ColdEntry, int] | None:
        """The entry to restore for `tokens`, and how many of them it serves, if that is more than `longer_than` and expected to pay. Looks at the index only."""
        identity = self._identity(source, 0)
        found = self._find(identity.fingerprint, key, len(tokens) - 1) if identity is not None else None
        if identity is None or found is None:
            return None
        serves = usable_by(tokens)

        def usable(entry: ColdEntry, common: int) -> int:
            length = serves(entry, common)
            return length if length > longer_than else 0

        length = usable(found.entry, found.length)
        if length == 0:
            return None
        offered = candidates(found.entry, length, usable)
        decision = self.chooser.decide(identity.fingerprint, offered, longer_than, len(tokens) - 1)
        self._decided.pop((source, key), None)
        self._decided[source, key] = decision
        while len(self._decided) > UNSERVED:
            del self._decided[next(iter(self._decided))]
        return (decision.chosen.entry, decision.chosen.length) if decision.chosen is not None else None

    def fetch(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> Fetch | None:
        """Have what others computed of `tokens` brought here, if it is more than memory and directory have; None when there is nothing to wait for."""
        identity = self._identity(source, 0)
        if self.shared is None or identity is None or self.chooser.mode == "never":
            return None
        found = self._find(identity.fingerprint, key, len(tokens) - 1)
        have = max(longer_than, usable_by(tokens)(*found) if found is not None else 0)
        return self.shared.begin(identity.fingerprint, key, have, len(tokens) - 1)

    def fetched(self, source: ModelSource, key: bytes, fetch: Fetch) -> None:
        """Note that a fetch is over."""
        if fetch.entry is not None:
            self._came[source, key] = fetch.entry
            while len(self._came) > UNSERVED:
                del self._came[next(iter(self._came))]

    def came_from(self, source: ModelSource, key: bytes) -> str:
        """The tier that what was restored for a request is counted for, once: `shared` when it was brought here for it."""
        return "shared" if self._came.pop((source, key), None) is not None else "ssd"

    def decided(self, source: ModelSource, key: bytes, restored: bool) -> Decision | None:
        """The decision that the request with this key was served by, once; None where there was nothing to decide, or a restore failed."""
        decision = self._decided.pop((source, key), None)
        if decision is None or (decision.chosen is not None) != restored:
            return None
        self.chooser.followed(decision)
        return decision

    def prefilled(self, source: ModelSource, start: int, tokens: int, seconds: float) -> None:
        """Note what a prefill chunk took."""
        if source.path is None:
            return  # it will never have a fingerprint, and nothing of it is stored
        early = self._early.setdefault(source, deque(maxlen=KEPT_CHUNKS))
        early.append((start, tokens, seconds))
        if (identity := self._identity(source, 0)) is not None:
            while early:
                self.chooser.rates.prefilled(identity.fingerprint, *early.popleft())

    def cut(self, entry: ColdEntry, caches: Restored, length: int) -> Taken | None:
        """The first `length` tokens of an entry's caches, which the caller gives up; all of them with their companion state."""
        if length < entry.length:
            if not kinds.can_cut(caches, length):
                self._statistics.fault("restored_uncuttable", "a restored entry could not be cut to the shared prefix")
                return None
            return Taken(kinds.lend(caches, length), length)
        return Taken(caches, length, caches.companion)

    def settled(self, source: ModelSource) -> bool:
        """Whether all that can be found is found: the model's fingerprint is known and its headers are read, or the patience for that is at its end. Never waits."""
        identity = self._identity(source, 0)
        if identity is not None:
            self._store.attach(identity.fingerprint)
            if self._store.wait_scanned(0, identity.fingerprint):
                return True
        elif source.path is None or not self._identities.pending(source):
            return True
        until = self._until.setdefault(source, time.monotonic() + self._patience.get(source, PATIENCE))
        if time.monotonic() < until:
            return False
        self._patience[source] = 0.0
        return True

    def _find(self, fingerprint: str, key: bytes, limit: int) -> Found | None:
        """The entry that serves the longest prefix; among those of one length one that has companion state to it."""
        best = self._store.find(fingerprint, "", key, limit)
        for namespace in self._store.namespaces(fingerprint):
            if namespace.startswith(BESIDE):
                found = self._store.find(fingerprint, namespace, key, limit)
                if found is not None and (best is None or (found.length, found.length == found.entry.length) > (best.length, False)):
                    best = found
        return best

    def _found(self, source: ModelSource) -> Identity | None:
        """The model's identity, its entries indexed, or as much of that as the patience left for it gives."""
        started = time.monotonic()
        patience = self._patience.get(source, PATIENCE)
        identity = self._identity(source, patience)
        if identity is not None:
            self._store.attach(identity.fingerprint)
            self._store.wait_scanned(max(0.0, patience - (time.monotonic() - started)), identity.fingerprint)
        self._patience[source] = max(0.0, patience - (time.monotonic() - started))
        return identity

    def waiting(self, namespace: Hashable, source: ModelSource, key: bytes, usable: Callable[[Job, int], int]) -> tuple[Entry, int] | None:
        """What waits to be written and serves the longest prefix of `key`, as an entry to lend from, and that length (see `PrefixIndex.best`)."""
        if (identity := self._identity(source, 0)) is None:
            return None
        places = ["", *(place for place in self._queue.namespaces(identity.fingerprint) if place.startswith(BESIDE))]
        found = [one for place in places if (one := self._queue.find(identity.fingerprint, place, key, usable)) is not None]
        if not found:
            return None
        job, caches, length = max(found, key=lambda one: (one[2], one[0].length == one[2] and one[0].companion is not None))
        return Entry(namespace, source, job.key, job.length, caches, job.role, job.companion, settled=True), length

    def closest(self, source: ModelSource, key: bytes) -> Found | None:
        """The stored sequence that shares most leading tokens with `key`, and how many it shares."""
        identity = self._identity(source, 0)
        return self._store.closest(identity.fingerprint, "", key) if identity is not None else None

    def prefill_seconds(self, source: ModelSource, tokens: int) -> float | None:
        """What prefilling a prompt of so many tokens is expected to take; None: not measured."""
        identity = self._identity(source, 0)
        return self.chooser.rates.prefill_seconds(identity.fingerprint, 0, tokens) if identity is not None else None

    @property
    def restore_seconds(self) -> float:
        """What the last restore took."""
        return self._store.restore_seconds

    def wait_indexed(self, source: ModelSource, timeout: float) -> None:
        """Wait until it is known what the directory holds of a model. Any thread but the generation thread."""
        deadline = time.monotonic() + timeout
        if (identity := self._identity(source, timeout)) is not None:
            self._store.attach(identity.fingerprint)
            self._store.wait_scanned(max(0.0, deadline - time.monotonic()))

    def look(self, source: ModelSource, tokens: Sequence[int], key: bytes) -> dict[str, Look]:
        """What a request for these tokens would find in the queue and on disk. Any thread; nothing is read or counted as used."""
        identity = self._identity(source, 0)
        if identity is None:
            return {"queue": Look(), "ssd": Look()}
        place, usable = (identity.fingerprint, ""), usable_by(tokens)
        queued = self._queue.find(*place, key, usable)
        found = self._store.find(*place, key, len(tokens) - 1)
        hit = usable(*found) if found is not None else 0
        closest = self._store.closest(*place, key)
        file = f"{identity.fingerprint}/{closest.entry.path.name}" if closest is not None else ""
        return {
            "queue": Look(queued[2]) if queued is not None else Look(),
            "ssd": Look(hit, closest.entry.length, closest.length, file) if closest is not None else Look(),
        }

    def offer(self, entry: Entry, kept: bool = False) -> bool:
        """Queue an entry to be written; `kept` says whether RAM keeps it too. False when its model's fingerprint is not known yet; True also when it can never be written."""
        identity = self._identity(entry.source, 0)
        if identity is None:
            return not self._identities.pending(entry.source)
        self._queue.offer(Job(identity, _namespace(entry), entry.key, entry.caches, entry.role, kept, companion=entry.companion))
        return True

    def covers(self, entry: Entry) -> bool:
        """Whether the directory holds these tokens durably. True for entries of a model that cannot be identified: nothing will ever be written of them."""
        return self.covers_tokens(entry.source, entry.key, _namespace(entry))

    def covers_tokens(self, source: ModelSource, key: bytes, namespace: str = "") -> bool:
        """The same for a model and a key."""
        identity = self._identity(source, 0)
        if identity is None:
            return not self._identities.pending(source)
        return self._store.covers(identity.fingerprint, namespace, key)

    def holds(self, entry: Entry) -> bool:
        """Whether the directory holds these tokens, so that they can come back from there."""
        return self._identity(entry.source, 0) is not None and self.covers(entry)

    def _identity(self, source: ModelSource, timeout: float) -> Identity | None:
        return self._identities.get(source, timeout) if source.path is not None else None


def _namespace(entry: Entry) -> str:
    """Where an entry is stored: its companion state's schema and version tell who can use it."""
    beside = entry.companion
    return f"{BESIDE}{beside.schema}/{beside.version}" if beside is not None else ""
