"""One run of the plugin: settings, tiers and background work, wired together."""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mlx_lm_hooks import Engine, ModelSource, Serves

from .identity import IdentityResolver, stat_signature
from .index.keys import token_key
from .memory.guard import MemoryGuard
from .prefix.probing import Look, look_in_ram
from .prefix.ram import RamTier
from .prefix.relief import Relief
from .prefix.ssd import SsdTier
from .prefix.tiers import TieredPrefixCache
from .schemes.spec import PLAIN, Spec
from .settings import Settings, default_ram_bytes, format_size
from .statistics import Statistics

if TYPE_CHECKING:
    from .checkpoints.room import Checkpoints
    from .schemes.scheme import Scheme

logger = logging.getLogger("mlx_lm_tiered")

# Even a flush without time to write asks whether there is anything to write.
ANSWER_WAIT = 0.5


SAVE_RATES_EVERY = 5.0  # seconds, at the most
# Seconds that loading another model may wait for the entries of the one before to be written.
SWAP_PATIENCE = 60.0


class Warms(Protocol):
    """What sends requests of its own (see `serving.warm`)."""

    def is_clients(self, tokens: Sequence[int]) -> bool: ...

    def report(self) -> dict[str, Any]: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class Runtime:
    """Everything between `mlx_lm_configure` and `mlx_lm_unconfigure`."""

    def __init__(self, settings: Settings, spec: Spec = PLAIN):
        self.settings = settings
        self._spec = spec
        self._scheme: Scheme | None = None
        self.statistics = Statistics()
        self.engine: Engine | None = None
        self.args: argparse.Namespace | None = None  # of the command
        self.source: ModelSource | None = None  # the model that was loaded last
        self.warmer: Warms | None = None
        self.saves_itself = False  # a script has no idle turns and no shutdown of a server
        self._process = os.getpid()
        self._caches: weakref.WeakSet[TieredPrefixCache] = weakref.WeakSet()
        self._namespaces: dict[ModelSource, Hashable] = {}
        self._flushes = _Flushes()
        self._announcement = "SSD tier off (--ssd-cache DIR)"
        self._store = self._queue = self._identities = self._ssd = self._restorer = self._rates = self._compactor = None
        self.checkpoints: Checkpoints | None = None
        relief = Relief(lambda: list(self._caches), lambda: self._queue)
        self.guard = MemoryGuard(settings.memory_budget, relief, self.statistics)

    def _open_ssd_tier(self, restoring_bytes: int) -> None:
        """Not before there is something to serve: a server sets up its log after its flags are read."""
        from .cold.compaction import Compactor
        from .cold.limits import affordable
        from .cold.restoring import Restorer
        from .cold.spill import SpillQueue
        from .cold.store import ColdStore
        from .prefix import rates_file
        from .prefix.choice import Chooser
        from .prefix.rates import Rates

        settings = self.settings
        assert settings.ssd_cache is not None
        limit, free = affordable(settings.ssd_cache, settings.ssd_cache_max)
        why = "" if limit == settings.ssd_cache_max else f" (half of what is free, of {format_size(settings.ssd_cache_max)} asked for)"
        self._announcement = f"SSD tier of {format_size(limit)}{why} in {settings.ssd_cache}, {format_size(free)} free"
        if settings.ssd_restore == "never":
            self._announcement += "; it is written only (--ssd-restore never)"
        self._store = ColdStore(settings.ssd_cache, limit, settings.ssd_cache_verify)
        # The scan starts as soon as it can, so that the first request need not wait for all of it.
        self._identities = IdentityResolver(settings.ssd_cache, known=self._store.attach)
        # Both queues together may hold what one may.
        share = settings.ssd_queue // 2 if settings.generation_checkpoint else settings.ssd_queue
        self._queue = SpillQueue(self._store, busy=self._busy, max_bytes=share, wake=self._wake)
        if settings.generation_checkpoint:
            from .checkpoints.room import Checkpoints

            self.checkpoints = Checkpoints(
                self._store, self._identities, self.statistics, self._decoding, settings.generation_checkpoint, settings.ssd_queue - share
            )
        queue = self._queue
        self._compactor = Compactor(self._store, lambda: self._busy() or queue.pending > 0)
        self._restorer = Restorer(self._store.restoring, self._decoding, self._wake, restoring_bytes)
        self._rates = Rates(settings.ssd_cache / rates_file.NAME)
        self._store.on_restored = self._rates.restored
        self._ssd = SsdTier(self._store, self._queue, self._identities, self.statistics, Chooser(self._rates, settings.ssd_restore))

    # From the hooks

    def prefix_cache(self, max_entries: int | None, max_bytes: int | None, serves: Serves) -> TieredPrefixCache | None:
        """A new prefix cache over a RAM tier of its own and the one SSD tier; None when the RAM tier is off."""
        size = self.settings.prompt_cache_bytes
        size = default_ram_bytes() if size is None else size
        if size == 0 or self.settings.prompt_cache_size == 0:
            return None
        if max_bytes is not None:
            size = min(size, max_bytes)
        if self.settings.prompt_cache_size is not None:
            max_entries = self.settings.prompt_cache_size
        if self._ssd is None and self.settings.ssd_cache is not None:
            self._open_ssd_tier(size)
        cache = TieredPrefixCache(
            RamTier(size, max_entries),
            self._ssd,
            self.statistics,
            self._namespace,
            self.settings.writebehind,
            self._min_tokens(serves),
            self.settings.ssd_queue,
            # What would not be restored must not leave RAM by itself.
            self.settings.ssd_demote_idle if self.settings.ssd_restore != "never" else 0.0,
            self._restorer if self.settings.ssd_restore != "never" else None,
        )
        if self.warmer is not None:
            cache.is_clients = self.warmer.is_clients
        self._caches.add(cache)
        logger.info("RAM tier of %s; %s", format_size(size), self._announcement)
        return cache

    def scheme(self) -> Scheme | None:
        """The KV scheme, made on first use; None where KV is stored as the model makes it."""
        if self._scheme is None and not self._spec.plain:
            from .schemes.scheme import Scheme

            self._scheme = Scheme(self._spec, self.statistics)
        return self._scheme

    def model_loaded(self, source: ModelSource) -> None:
        """Start fingerprinting the weights, off the path to readiness."""
        self.source = source
        if self._identities is not None and source.path is not None:
            self._identities.request(source)
        if self.engine is not None:
            self.guard.model_loaded()

    def prefilled(self, source: ModelSource, start: int, tokens: int, seconds: float) -> None:
        """Note what a prefill chunk took; on the generation thread."""
        if self._ssd is not None:
            self._ssd.prefilled(source, start, tokens, seconds)

    def idle_turn(self) -> bool:
        """One bounded unit of background work on the generation thread. True when more is waiting."""
        for cache in list(self._caches):
            if cache.idle_turn():
                return True
        self._flushes.turn(self._offer_unsaved)
        if self._rates is not None and self._rates.due(SAVE_RATES_EVERY):
            threading.Thread(target=self._rates.save, args=(SAVE_RATES_EVERY,), name="mlx-lm-tiered-rates", daemon=True).start()
        return self._queue.turn() if self._queue is not None else False

    def busy_turn(self) -> None:
        """Background work that must not wait any longer, in a small share of the time of running requests; on the generation thread."""
        if self._queue is not None:
            self._queue.busy_turn()

    def flush(self, timeout: float) -> dict[str, Any]:
        """Have everything put so far on disk, or say what is not. Any thread but the generation thread.

        Returns ``durable`` and its evidence. Entries that nothing queued yet are
        queued one at a time, so that the queue's cap cannot drop them.
        """
        if self._queue is None:
            return {"durable": False, "reason": "the SSD tier is off"}
        deadline = time.monotonic() + timeout
        answer_by = max(deadline, time.monotonic() + ANSWER_WAIT)
        tried: set[int] = set()
        self._await_identities(deadline)
        while True:
            result = self._queue.flush(max(0.0, deadline - time.monotonic()))
            answer = self._flushes.ask(tried, answer_by, self._wake, self._alive)
            if answer is not True or time.monotonic() > deadline:
                break
        kept = self.checkpoints.flush(max(0.0, deadline - time.monotonic())) if self.checkpoints is not None else (0, 0)
        # A thread that gave no answer in time may hold entries nobody counted.
        unsaved = self._flushes.unsaved
        given_up = sum(cache.unsaved.lost for cache in list(self._caches))
        report = {
            "durable": result.durable and answer is False and unsaved == given_up == 0 and kept == (0, 0),
            "pending": result.pending + unsaved + kept[0],
            "dropped": result.dropped + given_up,
            "failed": result.failed + kept[1],
            "entries": result.entries,
            "longest_durable_prefix_tokens": result.longest_durable_prefix,
        }
        return report

    def drain(self, timeout: float) -> dict[str, Any]:
        """Save everything and free its memory; prefixes stay reachable. Any thread but the generation thread.

        Returns the flush's report, with ``left``: entries still in RAM that were there before.
        """
        deadline = time.monotonic() + timeout
        demotions = [(d, d.due_now()) for cache in list(self._caches) if (d := cache.demotion) is not None]
        report = self.flush(timeout)
        while (left := sum(d.left(before) for d, before in demotions)) and time.monotonic() < deadline and self._alive():
            if not report["durable"]:
                break  # what could not be saved stays
            self._wake()
            time.sleep(0.01)
        return {**report, "left": left}

    def model_unloading(self, source: ModelSource) -> None:
        """Save a model's entries and free them before another takes its place; on the generation thread."""
        if self._queue is None:
            return
        for cache in list(self._caches):
            if cache.preparations is not None:
                cache.preparations.cancel(source)
        namespace = self._namespace(source)
        for cache in list(self._caches):
            if cache.demotion is not None:
                cache.demotion.due_now(namespace)
        if any(entry.namespace == namespace for cache in list(self._caches) for entry in cache.ram):
            self.flush_on_this_thread(SWAP_PATIENCE)
            while self.idle_turn():
                pass

    def flush_on_this_thread(self, timeout: float) -> bool:
        """The same for a script, whose own thread is the generation thread."""
        outcome: list[dict[str, Any]] = []
        worker = threading.Thread(target=lambda: outcome.append(self.flush(timeout)), name="mlx-lm-tiered-flush")
        worker.start()
        while worker.is_alive():
            if not self.idle_turn():
                worker.join(0.005)
        return bool(outcome and outcome[0]["durable"])

    def shutdown(self, timeout: float) -> bool:
        """Flush for the last time; say in one line what could not be saved."""
        report = self.flush(timeout)
        if report["durable"]:
            logger.info("all saved: %d entries on disk", report["entries"])
        else:
            logger.warning(
                "not all saved: %d entries pending, %d dropped, %d failed", report["pending"], report["dropped"], report["failed"]
            )
        return bool(report["durable"])

    def wait_indexed(self, source: ModelSource, timeout: float) -> None:
        """Wait until it is known what is stored of a model. Any thread but the generation thread."""
        if self._ssd is not None:
            self._ssd.wait_indexed(source, timeout)

    def probe(self, source: ModelSource, tokens: Sequence[int]) -> dict[str, Look]:
        """What a request for these tokens would find, by tier, the quickest first. Any thread; nothing counts as used."""
        key = token_key(tokens)
        rams = [look_in_ram(cache.ram, self._namespace(source), tokens, key) for cache in list(self._caches)]
        looks = {"ram": max(rams, default=Look())}
        if self._ssd is not None:
            looks |= self._ssd.look(source, tokens, key)
        least = self._min_tokens("server")
        return {tier: look if look.hit >= least else look._replace(hit=0) for tier, look in looks.items()}

    def report(self) -> dict[str, Any]:
        """What `/stats` answers."""
        caches = list(self._caches)
        from . import __version__

        return {
            "version": __version__,
            **self.statistics.report(),
            "ram": {
                "entries": sum(len(c) for c in caches),
                "bytes": sum(c.nbytes for c in caches),
                "max_bytes": max((c.ram.max_bytes for c in caches), default=0),
                "evictions": sum(c.ram.evictions for c in caches),
            },
            "checkpoints": self.checkpoints.stats() if self.checkpoints is not None else None,
            "memory": self.guard.report() if self.engine is not None else None,
            "ssd": self._report_ssd(caches),
            "warm": self.warmer.report() if self.warmer is not None else None,
            "kv": self._scheme.report([entry for cache in caches for entry in cache.ram]) if self._scheme is not None else None,
        }

    def _report_ssd(self, caches: list[TieredPrefixCache]) -> dict[str, Any] | None:
        if self._store is None or self._queue is None or self._restorer is None:
            return None
        held = [cache.preparations.seconds for cache in caches if cache.preparations is not None]
        seconds = {"held_seconds_last": max((one["last"] for one in held), default=0.0), "held_seconds_total": sum(one["total"] for one in held)}
        waiting = sum(len(cache.unsaved) for cache in caches)
        chosen = self._ssd.chooser.stats() if self._ssd is not None else {}
        return {**self._store.stats(), **self._queue.stats(), **self._restorer.stats(), **seconds, **chosen, "waiting_for_fingerprint": waiting}

    def close(self) -> None:
        """End the threads. Files stay, entries in memory go; a script's are saved first."""
        if os.getpid() != self._process:
            return  # a forked child has none of the threads; entries and lock are its parent's
        if self.warmer is not None:
            self.warmer.close()
        if self.saves_itself and self._queue is not None and self.engine is None:
            self.flush_on_this_thread(self.settings.shutdown_timeout)
        if self._compactor is not None:
            self._compactor.close()
        if self._restorer is not None:
            self._restorer.close()
        if self._rates is not None:
            self._rates.save()
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self._queue is not None:
            self._queue.close()
        if self._identities is not None:
            self._identities.close()
        if self._store is not None:
            self._store.close()
        self._caches.clear()

    # Inside

    def _await_identities(self, deadline: float) -> None:
        """Wait until the models of all entries are fingerprinted: without it nothing of them can be written."""
        assert self._identities is not None
        for source in {entry.source for cache in list(self._caches) for entry in cache.entries()}:
            self._identities.get(source, max(0.0, deadline - time.monotonic()))

    def _min_tokens(self, serves: Serves) -> int:
        """Scripts compare numbers more often than they send short prompts twice; who has a prompt cache means to reuse."""
        chosen = self.settings.prompt_cache_min_tokens
        return chosen if chosen is not None else 64 if serves == "script" else 1

    def _busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    def _decoding(self) -> bool:
        return self.engine is not None and self.engine.decoding

    def _wake(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    def _alive(self) -> bool:
        return self.engine is None or self.engine.alive

    def _namespace(self, source: ModelSource) -> Hashable:
        """What tells models apart in RAM: their files as they were when loaded, so that a model swapped out and in again finds its entries."""
        if source.path is None:
            return source
        if source not in self._namespaces:
            self._namespaces[source] = stat_signature(source)
        return self._namespaces[source]

    def _offer_unsaved(self, tried: set[int]) -> tuple[bool, int]:
        """Queue one entry the SSD tier lacks and this flush has not tried. Whether there was one, and how many are still missing."""
        assert self._ssd is not None and self._store is not None
        for cache in list(self._caches):
            cache.unsaved.settle(self._ssd.covers_tokens)
        entries = [entry for cache in list(self._caches) for entry in cache.entries()]
        missing = {id(entry) for entry in entries if not self._ssd.covers(entry)}
        # Oldest first, so that the newest are the last to be evicted; but none that has no room
        # beside the newer ones: they would evict it again, and every flush would write it anew.
        room = self._store.max_bytes - self._store.max_bytes // 8  # headers, directories and side files take some
        fitting = [entry for entry in reversed(entries) if (room := room - entry.nbytes - 8 * entry.length) >= 0]
        for entry in reversed(fitting):
            if id(entry) in missing and id(entry) not in tried:
                tried.add(id(entry))
                self._ssd.offer(entry, kept=any(entry in cache.ram for cache in list(self._caches)))
                return True, len(missing)
        return False, len(missing)


class _Flushes:
    """The line between threads that flush and the generation thread that owns the entries."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._question: set[int] | None = None
        self._answer: bool | None = None
        self._one_at_a_time = threading.Lock()
        self.unsaved = 0

    def ask(self, tried: set[int], deadline: float, wake: Callable[[], None], alive: Callable[[], bool]) -> bool | None:
        """Have the generation thread queue one more unsaved entry. True: it did; False: there is none; None: no answer in time, or no thread that could give one."""
        with self._one_at_a_time, self._condition:
            self._question, self._answer = tried, None
            while self._answer is None and alive() and (left := deadline - time.monotonic()) > 0:
                wake()
                self._condition.wait(min(left, 0.25))
            self._question = None
            return self._answer

    def turn(self, offer: Callable[[set[int]], tuple[bool, int]]) -> None:
        """Answer a waiting question; on the generation thread."""
        if self._question is None:
            return
        with self._condition:
            if self._question is not None and self._answer is None:
                self._answer, self.unsaved = offer(self._question)
                self._condition.notify_all()

