"""One run of the plugin: settings, tiers and background work, wired together."""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlx_lm_hooks import Admission, Engine, ModelSource, Preparation, Ranks, Refused, Serves

from . import drafting
from .identity import stat_signature
from .index.keys import token_key
from .managing import Manager
from .managing_ranks import RanksManager
from .memory.guard import MemoryGuard
from .prefix.lookup import Lookup
from .prefix.orders import Orders
from .prefix.probing import Look, look_in_ram
from .prefix.ram import RamTier
from .prefix.rates import Rates
from .prefix.relief import Relief
from .prefix.tiers import TieredPrefixCache
from .prefix.together import Together
from .ranks import Company
from .schemes.spec import PLAIN, Spec
from .served import NOTE, Requests
from .settings import Settings, default_ram_bytes, format_size
from .speculation.choose import OFF, Drafting
from .statistics import Statistics

if TYPE_CHECKING:
    from .checkpoints.room import Checkpoints
    from .memory.footprint import Planned
    from .paged.scheme import Pages
    from .paging import Paging
    from .prefix.ram import Entry
    from .saving import Saver
    from .schemes.scheme import Scheme
    from .speculation.requests import Speculating
    from .speculation.trace import Trace
    from .storage import Storage

logger = logging.getLogger("mlx_lm_tiered")

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

    def __init__(self, settings: Settings, spec: Spec = PLAIN, chosen: Drafting = OFF, paged: bool = False, ranks: Ranks | None = None):
        self.settings = settings
        self._drafting = chosen
        self._spec = spec
        self._scheme: Scheme | None = None
        self._paged = paged
        self._paging: Paging | None = None  # with --paged-kv, from the first look at a model on
        self._speculation: Speculating | None = None
        self.statistics = Statistics()
        self.requests = Requests()
        self._rates = Rates()  # without an SSD tier, which keeps its own
        self.engine: Engine | None = None
        self.args: argparse.Namespace | None = None  # of the command
        self.source: ModelSource | None = None  # the model that was loaded last
        self._loaded = threading.Event()  # once there is one, or the end
        self.warmer: Warms | None = None
        self.trace: Trace | None = None  # with --spec-trace
        self.seeded = False  # whether the command was given a seed
        self.saves_itself = False  # a script has no idle turns and no shutdown of a server
        self._process = os.getpid()
        self._caches: weakref.WeakSet[TieredPrefixCache] = weakref.WeakSet()
        self._namespaces: dict[ModelSource, Hashable] = {}
        self.storage: Storage | None = None  # with --ssd-cache, from the first prefix cache on
        self._saver: Saver | None = None
        self._orders = Orders(self._wake)
        make_manager = Manager if ranks is None else RanksManager
        self.manager = make_manager(lambda: list(self._caches), lambda: self.storage, self._orders)
        self._relief = Relief(lambda: list(self._caches), lambda: self.storage.queue if self.storage is not None else None)
        self.guard = MemoryGuard(settings.memory_budget, self._relief, self.statistics, self._plan_of)
        self._company: Company | None = None
        if ranks is not None and isinstance(self.manager, RanksManager):
            work = {"stats": lambda _: self.report_here(), "flush": self.flush_here, "drain": self.drain_here}
            self._company = Company(ranks, self.manager, work, lambda: self.engine is not None and self.engine.alive)
        self._together = Together(ranks.gather) if ranks is not None else None

    @property
    def checkpoints(self) -> Checkpoints | None:
        """What keeps running generations, with --generation-checkpoint."""
        return self.storage.checkpoints if self.storage is not None else None

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
        if self.storage is None and self.settings.ssd_cache is not None:
            self._open_storage(size)
        storage = self.storage
        cache = TieredPrefixCache(
            RamTier(size, max_entries),
            storage.tier if storage is not None else None,
            self.statistics,
            self._namespace,
            self.settings.writebehind,
            self._min_tokens(serves),
            self.settings.ssd_queue,
            # What would not be restored must not leave RAM by itself.
            self.settings.ssd_demote_idle if self.settings.ssd_restore != "never" else 0.0,
            storage.restorer if storage is not None and self.settings.ssd_restore != "never" else None,
        )
        cache.inspected = self.settings.cache_inspection
        cache.is_clients, cache.on_lookup, cache.estimate = self._is_clients, self._note, self._prefill_seconds
        cache.together = self._together
        if self._paged:
            cache.adopted = self._adopted
        self._caches.add(cache)
        logger.info("RAM tier of %s; %s", format_size(size), storage.announcement if storage is not None else "SSD tier off (--ssd-cache DIR)")
        if self._company is not None:
            logger.info(self._company.announcement)
        return cache

    def scheme(self) -> Scheme | Pages | None:
        """The KV scheme, made on first use; None where KV is stored as the model makes it."""
        if self._scheme is None and not self._spec.plain:
            from .schemes.scheme import Scheme

            self._scheme = Scheme(self._spec, self.statistics, self.settings.kernels)
        if self._paged and self._paging is None:
            from .paging import Paging

            self._paging = Paging(self.settings, self.statistics, self._scheme, self._drafting, self._relief, lambda: list(self._caches), self._queued)
        return self._paging.pages if self._paging is not None else self._scheme

    def speculation(self) -> Speculating | None:
        """What requests get their drafts from, made on first use; None when it is off."""
        if self._speculation is None and self._drafting.source != "off":
            from .speculation.requests import Speculating

            source = drafting.source(self._drafting, self.settings, lambda: next(iter(self._caches), None), self._served_path, self.guard.spare)
            self._speculation = Speculating(source, self.settings.num_draft_tokens, self.statistics, strict=self.settings.spec_strict, sampling=self._sampling(), trace=self.trace)
        return self._speculation

    def _sampling(self) -> str:
        """Of ``mlx_lm.generate --seed`` and the like the random numbers are chosen for the whole run: drafts leave its output alone."""
        return "target" if self.seeded else self.settings.spec_sampling

    def _served_path(self) -> Path | None:
        """Where the model that answers came from, as far as that is known."""
        if self.source is not None:
            return self.source.path
        name = getattr(self.args, "model", None)
        return Path(name) if isinstance(name, str) and Path(name).is_dir() else None

    def _plan_of(self, model: Any) -> Planned | None:
        scheme = self._paging.pages if self._paging is not None else self._scheme
        return scheme.plan_of(model) if scheme is not None else None

    def admit(self, request: Admission) -> Refused | None:
        """None when a request fits into memory and into the blocks; else what to tell its client."""
        refused = self.guard.admit(request)
        return refused if refused is not None or self._paging is None else self._paging.blocks.admit(request)

    def hold(self, source: ModelSource, tokens: Sequence[int], max_tokens: int, preempted: int | None = None) -> Preparation | None:
        """What a request waits for before it is looked up."""
        return self._paging.blocks.wait(source, tokens, max_tokens, preempted) if self._paging is not None else None

    def room(self, caches: Sequence[Any]) -> int | None:
        """How many tokens each of a batch's rows may get; 0 when the newest must leave."""
        return self._paging.blocks.room(caches) if self._paging is not None else None

    def model_loaded(self, source: ModelSource) -> None:
        """Start fingerprinting the weights, off the path to readiness."""
        self.source = source
        self._loaded.set()
        if self.storage is not None and source.path is not None:
            self.storage.identities.request(source)
            if (draft := drafting.identity(self._drafting)) is not None:
                self.storage.identities.request(draft)
        if self.engine is not None:
            self.guard.model_loaded()

    def prefilled(self, source: ModelSource, start: int, tokens: int, seconds: float) -> None:
        """Note what a prefill chunk took; on the generation thread."""
        if self._speculation is not None:
            self._speculation.prefilled()
        if self.storage is not None:
            self.storage.tier.prefilled(source, start, tokens, seconds)
        else:
            self._rates.prefilled(str(source.path), start, tokens, seconds)

    def idle_turn(self) -> bool:
        """One bounded unit of background work on the generation thread. True when more is waiting."""
        if self._orders.turn():
            return True
        for cache in list(self._caches):
            if cache.idle_turn():
                return True
        if self.storage is None or self._saver is None:
            return False
        self._saver.turn()
        self.storage.save_rates()
        return self.storage.queue.turn()

    def busy_turn(self) -> None:
        """Background work that must not wait any longer, in a small share of the time of running requests; on the generation thread."""
        self._orders.turn()
        if self.storage is not None:
            self.storage.queue.busy_turn()

    def flush(self, timeout: float) -> dict[str, Any]:
        """Have everything put so far on disk, on all ranks, or say what is not. Any thread but the generation thread.

        Returns ``durable`` and its evidence (see `Saver.flush`).
        """
        return self.flush_here(timeout) if self._company is None else self._company.saved("flush", timeout)

    def flush_here(self, timeout: float) -> dict[str, Any]:
        """The same for this process alone."""
        if self._saver is None:
            return {"durable": False, "reason": "the SSD tier is off"}
        return self._saver.flush(timeout)

    def drain(self, timeout: float) -> dict[str, Any]:
        """Save everything and free its memory, on all ranks; prefixes stay reachable. Any thread but the generation thread.

        Returns the flush's report, with ``left``: entries still in RAM that were there before.
        """
        return self.drain_here(timeout) if self._company is None else self._company.saved("drain", timeout)

    def drain_here(self, timeout: float) -> dict[str, Any]:
        """The same for this process alone."""
        deadline = time.monotonic() + timeout
        demotions = [(d, d.due_now()) for cache in list(self._caches) if (d := cache.demotion) is not None]
        report = self.flush_here(timeout)
        while (left := sum(d.left(before) for d, before in demotions)) and time.monotonic() < deadline and self._alive():
            if not report["durable"]:
                break  # what could not be saved stays
            self._wake()
            time.sleep(0.01)
        return {**report, "left": left}

    def model_unloading(self, source: ModelSource) -> None:
        """Save a model's entries and free them before another takes its place; on the generation thread."""
        if self.storage is not None:
            self._save_all_of(source)
        if self._paging is not None and self._paging.pages.storages:
            self._paging.drop(self._namespace(source))

    def flush_on_this_thread(self, timeout: float) -> bool:
        """The same for a script, whose own thread is the generation thread."""
        outcome: list[dict[str, Any]] = []
        worker = threading.Thread(target=lambda: outcome.append(self.flush_here(timeout)), name="mlx-lm-tiered-flush")
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

    def wait_loaded(self, timeout: float) -> ModelSource | None:
        """The model that was loaded last. A server answers before the one it starts with is loaded: that one is waited for.

        Any thread but the generation thread.
        """
        if self.args is not None and getattr(self.args, "model", None):
            self._loaded.wait(timeout)
        return self.source

    def wait_indexed(self, source: ModelSource, timeout: float) -> None:
        """Wait until it is known what is stored of a model. Any thread but the generation thread."""
        if self.storage is not None:
            self.storage.tier.wait_indexed(source, timeout)

    def probe(self, source: ModelSource, tokens: Sequence[int]) -> dict[str, Look]:
        """What a request for these tokens would find, by tier, the quickest first. Any thread; nothing counts as used."""
        key = token_key(tokens)
        rams = [look_in_ram(cache.ram, self._namespace(source), tokens, key) for cache in list(self._caches)]
        looks = {"ram": max(rams, default=Look())}
        if self.storage is not None:
            looks |= self.storage.tier.look(source, tokens, key)
        least = self._min_tokens("server")
        return {tier: look if look.hit >= least else look._replace(hit=0) for tier, look in looks.items()}

    def report(self) -> dict[str, Any]:
        """What `/stats` answers."""
        company, together = self._company, self._together
        beside = company.report(together.report()) if company is not None and together is not None else None
        return {**self.report_here(), "ranks": beside}

    def report_here(self) -> dict[str, Any]:
        """Of it, what is this process's own."""
        caches = list(self._caches)
        from . import __version__

        return {
            "version": __version__,
            **self.statistics.report(),
            "requests": self.requests.report() if self.engine is not None else None,
            "ram": {
                "entries": sum(len(c) for c in caches),
                "bytes": sum(c.nbytes for c in caches),
                "max_bytes": max((c.ram.max_bytes for c in caches), default=0),
                "evictions": sum(c.ram.evictions for c in caches),
            },
            "checkpoints": self.checkpoints.stats() if self.checkpoints is not None else None,
            "memory": self.guard.report() if self.engine is not None else None,
            "ssd": self._report_ssd(caches),
            "shared": self.storage.shared.stats() if self.storage is not None and self.storage.shared is not None else None,
            "warm": self.warmer.report() if self.warmer is not None else None,
            "speculation": self._speculation.report() if self._speculation is not None else None,
            "paged": self._paging.blocks.report() if self._paging is not None else None,
            "kv": self._scheme.report([entry for cache in caches for entry in cache.ram]) if self._scheme is not None else None,
        }

    def _report_ssd(self, caches: list[TieredPrefixCache]) -> dict[str, Any] | None:
        if self.storage is None:
            return None
        held = [cache.preparations.seconds for cache in caches if cache.preparations is not None]
        if self.checkpoints is not None:
            held.append(self.checkpoints.resumptions.seconds)
        return {
            **self.storage.stats(),
            "held_seconds_last": max((one["last"] for one in held), default=0.0),
            "held_seconds_total": sum(one["total"] for one in held),
            "waiting_for_fingerprint": sum(len(cache.unsaved) for cache in caches),
        }

    def close(self) -> None:
        """End the threads. Files stay, entries in memory go; a script's are saved first."""
        if os.getpid() != self._process:
            return  # a forked child has none of the threads; entries and lock are its parent's
        self._loaded.set()
        if self.warmer is not None:
            self.warmer.close()
        if self.storage is not None:
            if self.saves_itself and self.engine is None:
                self.flush_on_this_thread(self.settings.shutdown_timeout)
            self.storage.close()
        if self.trace is not None:
            self.trace.close()
        self._caches.clear()

    # Inside

    def _save_all_of(self, source: ModelSource) -> None:
        """Have what is kept of a model on disk, as far as there is time, and nothing of it on its way into memory."""
        for cache in list(self._caches):
            if cache.preparations is not None:
                cache.preparations.cancel(source)
        if self.checkpoints is not None:
            self.checkpoints.resumptions.cancel(source)
        namespace = self._namespace(source)
        for cache in list(self._caches):
            if cache.demotion is not None:
                cache.demotion.due_now(namespace)
        if any(entry.namespace == namespace for cache in list(self._caches) for entry in cache.ram):
            self.flush_on_this_thread(SWAP_PATIENCE)
            while self.idle_turn():
                pass

    def _is_clients(self, tokens: Sequence[int]) -> bool:
        """Whether a lookup is a client's, and not one of `--warm`."""
        if self.warmer is None or self.warmer.is_clients(tokens):
            return True
        self._note(None)
        return False

    def _queued(self) -> list[Any]:
        """What is in memory only until it is written."""
        return self.storage.queue.jobs() if self.storage is not None else []

    def _note(self, lookup: Lookup | None) -> None:
        request = self.engine.request if self.engine is not None else None
        if request is not None:
            request.notes[NOTE] = lookup

    def _prefill_seconds(self, source: ModelSource, tokens: int) -> float | None:
        if self.storage is not None:
            return self.storage.tier.prefill_seconds(source, tokens)
        return self._rates.prefill_seconds(str(source.path), 0, tokens)

    def _adopted(self, source: ModelSource, caches: list[Any], lender: tuple[Entry, int] | None) -> list[Any] | None:
        return caches if self._paging is None else self._paging.adopted(source, caches, lender)

    def _open_storage(self, restoring_bytes: int) -> None:
        """Not before there is something to serve: a server sets up its log after its flags are read."""
        from .saving import Saver
        from .storage import Storage

        self.storage = Storage(self.settings, self.statistics, self._busy, self._decoding, self._wake, restoring_bytes, self.guard.spare)
        if self.checkpoints is not None:
            self.checkpoints.adopted = lambda source, caches: self._adopted(source, caches, None)
        self._saver = Saver(self.storage, lambda: list(self._caches), self._wake, self._alive)

    def _min_tokens(self, serves: Serves) -> int:
        """Scripts compare numbers more often than they send short prompts twice; who has a prompt cache means to reuse."""
        chosen = self.settings.prompt_cache_min_tokens
        return chosen if chosen is not None else 64 if serves == "script" else 1

    def _busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    def _decoding(self) -> bool:
        # Ranks restore while all stand still: nobody is slowed down by it.
        return self._company is None and self.engine is not None and self.engine.decoding

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
