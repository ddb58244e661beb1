"""The contract's `GenerationCheckpoints` over the SSD tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm_hooks import GenerationState, ModelSource

from .. import caches as kinds
from ..cold.ahead import TRIES, Ahead, Aheads
from ..cold.catalog import ColdEntry
from ..cold.restore import Restored
from ..cold.restoring import Restorer
from ..cold.store import ColdStore
from ..identity import Identity, IdentityResolver
from ..index.keys import token_key
from ..statistics import Statistics
from .snapshot import KIND, Attempt, namespace_of, signatures, state_of, take
from .writer import CheckpointWriter

# A request after a start may wait so long, in seconds and of all requests together, for
# the model's fingerprint and the scan: it may have been interrupted.
PATIENCE = 10.0


class Checkpoints:
    """Takes, finds and voids the checkpoints of a server's requests. Generation thread, but for `flush`, `stats` and `close`."""

    def __init__(
        self,
        store: ColdStore,
        identities: IdentityResolver,
        statistics: Statistics,
        busy: Callable[[], bool],
        interval: int,
        max_bytes: int,
        restorer: Restorer,
    ):
        self._store = store
        self._identities = identities
        self._statistics = statistics
        self._interval = interval
        self._writer = CheckpointWriter(store, busy, max_bytes)
        self._restorer = restorer
        self.resumptions: Aheads[Ahead] = Aheads()  # checkpoints read ahead of their requests; no two are of the same one
        self._patience = PATIENCE
        self._running: set[tuple[str, str]] = set()
        self._skipped: Counter[str] = Counter()
        self._resumed = self._ahead = self._tokens = self._taken = 0
        self._seconds = 0.0
        # Restored caches as requests have theirs; None when there is no room for them.
        self.adopted: Callable[[ModelSource, list[Any]], list[Any] | None] = lambda source, caches: caches

    # The contract

    @property
    def interval(self) -> int:
        return self._interval

    def prepare(self, source: ModelSource, prompt: Sequence[int], policy: str) -> Ahead | None:
        try:
            namespace = namespace_of(prompt, policy)
            if self.resumptions.of(source, namespace):
                return None  # the same request again, while it waits
            until = time.monotonic() + self._patience
            settled, newest = (lambda: self._settled(source, until)), (lambda: self._newest(source, namespace, prompt))
            return self.resumptions.begin(Ahead(self._restorer, source, namespace, settled, newest))
        except Exception as error:
            self._statistics.fault("checkpoint", f"looking for a checkpoint failed ({error!r})")
            return None

    def begin(self, source: ModelSource, prompt: Sequence[int], policy: str) -> RequestCheckpoints | None:
        try:
            identity = self._found(source)
            if identity is None:
                self.skipped("no-fingerprint")
                return None
            attempt = Attempt(identity, namespace_of(prompt, policy), len(prompt))
            if attempt.place in self._running or not all(one.step() for one in self.resumptions.of(source, attempt.namespace)):
                self.skipped("running")  # the same request again, while it runs or is about to
                return None
            state = self._state(source, attempt, prompt)
            self._running.add(attempt.place)
            return RequestCheckpoints(self, attempt, state)
        except Exception as error:
            self._statistics.fault("checkpoint", f"looking for a checkpoint failed ({error!r})")
            return None

    def skipped(self, reason: str) -> None:
        self._skipped[reason] += 1

    # Any thread

    def flush(self, timeout: float) -> tuple[int, int]:
        """See `CheckpointWriter.flush`."""
        return self._writer.flush(timeout)

    def stats(self) -> dict[str, Any]:
        """What `/stats` says of checkpoints."""
        return {
            "interval": self._interval,
            "running": len(self._running),
            "resumed": self._resumed,
            "resumed_tokens": self._tokens,
            "resumed_in_background": self._ahead,
            "taken": self._taken,
            "taking_seconds_total": self._seconds,
            **self._writer.stats(),
            "skipped": dict(self._skipped),
        }

    def close(self) -> None:
        """End the writer; files stay."""
        self._writer.close()

    # For `RequestCheckpoints`

    def save(self, attempt: Attempt, state: GenerationState) -> None:
        """Copy a state and have it written."""
        started = time.perf_counter()
        try:
            self._writer.basis(attempt)
            self._writer.offer(take(attempt, state))
            self._taken += 1
            self._seconds += time.perf_counter() - started
        except kinds.UnknownCacheClass:
            self.skipped("cache-class")
        except Exception as error:
            self._statistics.fault("checkpoint", f"taking a checkpoint failed ({error!r})")

    def end(self, attempt: Attempt, completed: bool) -> None:
        """A request is over."""
        self._running.discard(attempt.place)
        if completed:
            self._writer.void(attempt)

    # Inside

    def _found(self, source: ModelSource) -> Identity | None:
        started = time.monotonic()
        identity = self._identities.get(source, self._patience)
        if identity is not None:
            self._store.attach(identity.fingerprint)
            self._store.wait_scanned(max(0.0, self._patience - (time.monotonic() - started)), identity.fingerprint)
        self._patience = max(0.0, self._patience - (time.monotonic() - started))
        return identity

    def _settled(self, source: ModelSource, until: float) -> bool:
        """Whether it is known what checkpoints there are, or the patience for that is at its end. Never waits."""
        identity = self._identities.get(source)
        if identity is not None:
            self._store.attach(identity.fingerprint)
            if self._store.wait_scanned(0, identity.fingerprint):
                return True
        elif not self._identities.pending(source):
            return True
        if time.monotonic() < until:
            return False
        self._patience = 0.0
        return True

    def _newest(self, source: ModelSource, namespace: str, prompt: Sequence[int]) -> ColdEntry | None:
        """The checkpoint that a request which does not run yet would go on from."""
        identity = self._identities.get(source)
        place = (identity.fingerprint, namespace) if identity is not None else None
        if place is None or place in self._running or self._writer.is_void(*place):
            return None
        return self._store.newest(*place, token_key(prompt), KIND)

    def _state(self, source: ModelSource, attempt: Attempt, prompt: Sequence[int]) -> GenerationState | None:
        """Where a request goes on: what was read ahead of it, or else what is read now."""
        if (prepared := self.resumptions.claim(source, attempt.namespace)) is not None:
            restored = prepared.caches()
            state = self._accept(source, attempt, prompt, *restored) if restored is not None else None
            self._ahead += state is not None
            return state
        # One that turns out damaged leaves the index; the one before it may serve.
        for _ in range(TRIES):
            if (entry := self._newest(source, attempt.namespace, prompt)) is None:
                return None
            if (caches := self._store.restore(entry)) is not None:
                return self._accept(source, attempt, prompt, entry, caches)
        return None

    def _accept(self, source: ModelSource, attempt: Attempt, prompt: Sequence[int], entry: ColdEntry, caches: Restored) -> GenerationState | None:
        """The state that an entry holds, from which this attempt then goes on."""
        state = state_of(list(caches), entry.key, prompt, caches.companion)
        if state is None:
            return None
        stored = signatures(caches)
        held = self.adopted(source, state.caches)
        if held is None:
            self.skipped("no-blocks")
            return None
        attempt.durable, attempt.signatures = entry, stored
        self._resumed += 1
        self._tokens += entry.length - len(prompt)
        return state._replace(caches=held)


class RequestCheckpoints:
    """The contract's `RequestCheckpoints`."""

    def __init__(self, checkpoints: Checkpoints, attempt: Attempt, state: GenerationState | None):
        self._checkpoints = checkpoints
        self._attempt = attempt
        self.state = state

    def save(self, state: GenerationState) -> None:
        self.state = None  # its caches are the caller's, and not ours to hold
        self._checkpoints.save(self._attempt, state)

    def end(self, completed: bool) -> None:
        self.state = None
        if not self._attempt.ended:
            self._attempt.ended = True
            self._checkpoints.end(self._attempt, completed)
