"""The SSD side of a run: everything that is there with `--ssd-cache`, opened together and closed in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .checkpoints.room import Checkpoints
from .cold.compaction import Compactor
from .cold.fresh import leaves_unfilled
from .cold.limits import affordable
from .cold.restoring import Restorer
from .cold.spill import SpillQueue
from .cold.store import ColdStore
from .identity import IdentityResolver
from .prefix import rates_file
from .prefix.choice import Chooser
from .prefix.rates import Rates
from .prefix.ssd import SsdTier
from .settings import Settings, format_size
from .statistics import Statistics

if TYPE_CHECKING:
    from .shared.tier import SharedTier

WRITES = {"off": "which is only read", "idle": "which is written while no request runs", "always": "which is written at any time"}
SAVE_RATES_EVERY = 5.0  # seconds, at the most


class Storage:
    """Store, queue, tier, and the threads that read and write beside the engine.

    `busy` and `decoding` say what the engine does, `wake` asks it for idle turns;
    `restoring_bytes` bounds what is read in the background, and so does `spare`, the
    bytes that memory has left.
    """

    def __init__(
        self,
        settings: Settings,
        statistics: Statistics,
        busy: Callable[[], bool],
        decoding: Callable[[], bool],
        wake: Callable[[], None],
        restoring_bytes: int,
        spare: Callable[[], float],
    ):
        directory = settings.ssd_cache
        assert directory is not None
        limit, free = affordable(directory, settings.ssd_cache_max)
        why = "" if limit == settings.ssd_cache_max else f" (half of what is free, of {format_size(settings.ssd_cache_max)} asked for)"
        self.announcement = f"SSD tier of {format_size(limit)}{why} in {directory}, {format_size(free)} free"
        if settings.ssd_restore == "never":
            self.announcement += "; it is written only (--ssd-restore never)"
        self.store = ColdStore(directory, limit, settings.ssd_cache_verify)
        # The scan starts as soon as it can, so that the first request need not wait for all of it.
        self.identities = IdentityResolver(directory, known=self.store.attach)
        # Both queues together may hold what one may.
        share = settings.ssd_queue // 2 if settings.generation_checkpoint else settings.ssd_queue
        self.queue = SpillQueue(self.store, busy=busy, max_bytes=share, wake=wake)
        self._compactor = Compactor(self.store, lambda: busy() or self.queue.pending > 0)
        self.restorer = Restorer(
            self.store.restoring, decoding, wake, restoring_bytes, spare,
            computes_here=lambda: mx.default_device().type == mx.cpu and leaves_unfilled(),
        )  # fmt: skip
        self.checkpoints: Checkpoints | None = None
        if settings.generation_checkpoint:
            interval, size = settings.generation_checkpoint, settings.ssd_queue - share
            self.checkpoints = Checkpoints(self.store, self.identities, statistics, decoding, interval, size, self.restorer)
        self._rates = Rates(directory / rates_file.NAME)
        self.store.on_restored = self._rates.restored
        self.tier = SsdTier(self.store, self.queue, self.identities, statistics, Chooser(self._rates, settings.ssd_restore))
        self.shared: SharedTier | None = None
        if settings.shared_cache is not None:
            from .shared.tier import SharedTier

            self.tier.shared = self.shared = SharedTier(settings, self.store, self._rates, busy, decoding, wake)
            self.announcement += f"; shared store {settings.shared_cache}, {WRITES[settings.shared_cache_write]}"

    def save_rates(self) -> None:
        """Write the measured rates, on a thread of its own, when there are new ones and it was not done lately."""
        if self._rates.due(SAVE_RATES_EVERY):
            threading.Thread(target=self._rates.save, args=(SAVE_RATES_EVERY,), name="mlx-lm-tiered-rates", daemon=True).start()

    def stats(self) -> dict[str, Any]:
        """Counters of all of it."""
        return {**self.store.stats(), **self.queue.stats(), **self.restorer.stats(), **self.tier.chooser.stats()}

    def close(self) -> None:
        """End the threads; what was not written by now is dropped. Files stay."""
        if self.shared is not None:
            self.shared.close()
        self._compactor.close()
        self.restorer.close()
        self._rates.save()
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.queue.close()
        self.identities.close()
        self.store.close()
