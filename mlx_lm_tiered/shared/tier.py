"""The shared tier as the SSD tier sees it: a prefix is asked for, and comes into the directory while its request waits."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..cold.catalog import ColdEntry
from ..cold.checking import BadEntry
from ..cold.directory import DirectoryFull
from ..cold.health import Bounded
from ..cold.restoring import SHARE, SHARE_OF_EACH, cores
from ..cold.store import ColdStore
from ..prefix.rates import Rates
from ..settings import Settings
from .background import Background
from .breaker import Breaker
from .cleaning import Cleaning
from .fetching import Cancelled, Fetching, Gone, Progress
from .lookup import Lookup
from .names import Names, Team
from .objects import Damaged, Objects, StoreFailed, open_objects
from .rates import LOOKUP, Network, patience

logger = logging.getLogger("mlx_lm_tiered")

TOGETHER = 4  # requests that ask at the same time, and pieces that are read at the same time
WORTH = 0.05  # seconds that computing must take for the store to be asked
POLL = 0.02
LONGEST_REST = 0.25

# What becomes of the requests that ask: nothing there (longer than what is here), brought
# here, not worth it by the measured rates, too late, the store failed, what it gave was refused, the client went.
OUTCOMES = ("misses", "fetched", "not_worth", "late", "failed", "refused", "cancelled")


class Fetch:
    """What one request waits for. Generation thread, but for what says otherwise."""

    def __init__(self, wait: float, stop: Callable[[], bool], too_late: Callable[[], None]):
        self.entry: ColdEntry | None = None  # that came
        self.progress = Progress(lambda: self.stopped or stop())
        self.late = False
        self._too_late = too_late
        self._until = time.monotonic() + wait
        self._ended = threading.Event()
        self._cancelled = False

    @property
    def stopped(self) -> bool:
        """Whether nobody waits any more. Any thread."""
        return self._cancelled or self._ended.is_set()

    def over(self) -> bool:
        """Whether it came, or is not to be waited for any longer."""
        if not self._ended.is_set() and time.monotonic() >= self._until:
            if not self._cancelled:
                self.late = True
                self._too_late()
            self.cancel()
        return self._cancelled or self._ended.is_set()

    def wait(self, most: float = math.inf) -> None:
        """Until it is over, but no longer than so many seconds."""
        until = time.monotonic() + most
        while not self.over() and (left := until - time.monotonic()) > 0:
            self._ended.wait(min(POLL, left))

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._cancelled = True

    def extend(self, seconds: float) -> None:
        """Wait so long from now on. Any thread."""
        self._until = time.monotonic() + seconds

    def end(self, entry: ColdEntry | None) -> None:
        """What came of it. Any thread."""
        self.entry = entry
        self._ended.set()


class SharedTier:
    """Everything that is there with `--shared-cache`. `always`: whether to fetch without asking if it pays. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: ColdStore,
        rates: Rates,
        busy: Callable[[], bool],
        decoding: Callable[[], bool],
        wake: Callable[[], None],
        objects: Objects | None = None,
    ):
        assert settings.shared_cache is not None
        self.url = settings.shared_cache
        self._objects = objects or open_objects(self.url)
        self._team = Team(settings.shared_cache_team)
        self._rates = rates
        self._always = settings.ssd_restore == "always"
        self._decoding = decoding
        self._wake = wake
        self._asking = ThreadPoolExecutor(TOGETHER, "mlx-lm-tiered-shared")
        self._reading = ThreadPoolExecutor(TOGETHER, "mlx-lm-tiered-piece")
        self._lookup = Lookup(self._objects, self._reading)
        self._fetching = Fetching(self._objects, store.arriving, self._reading)
        self._network = Network()
        self._reads, self._writes = Breaker("reading"), Breaker("writing")
        self._log = Bounded()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._closing = False
        # Pieces together take no more of the cores than a restore does.
        self._ratio = TOGETHER / min(SHARE, SHARE_OF_EACH * cores()) - 1
        self._background = None
        self._cleaners: ThreadPoolExecutor | None = None
        self._write = settings.shared_cache_write
        if self._write != "off":
            # Threads of its own: requests are not to wait behind all manifests.
            self._cleaners = ThreadPoolExecutor(TOGETHER, "mlx-lm-tiered-clean")
            cleaning = Cleaning(self._objects, self._team, self._cleaners, settings.shared_cache_max, settings.shared_cache_ttl)
            self._background = Background(
                self._objects, self._lookup, store.catalog, self._team, self._writes, busy,
                always=self._write == "always", bandwidth=settings.shared_cache_bandwidth, cleaning=cleaning,
            )  # fmt: skip

    def begin(self, fingerprint: str, key: bytes, have: int, most: int) -> Fetch | None:
        """Ask for a prefix of `key` longer than `have` tokens and of `most` at most; None when it is not worth asking. Returns at once."""
        names = Names(self._team, fingerprint)
        if self._closing or self._reads.open or not self._lookup.worth(names, key, have, most):
            return None
        computing = self._rates.prefill_seconds(fingerprint, have, most)
        if not self._always and computing is not None and computing < WORTH:
            return None
        fetch = Fetch(LOOKUP, lambda: self._closing, lambda: self._reads.failed(TimeoutError("it took too long")))
        fetch.progress.rest = self._rest
        self._asking.submit(self._run, fetch, names, key, have, most)
        return fetch

    def stats(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        background = self._background
        with self._lock:
            counts = {name: self._counts[name] for name in ("lookups", *OUTCOMES, "fetched_tokens", "fetched_bytes")}
        return {
            "url": self.url,
            "write": self._write,
            **counts,
            **(background.counts if background is not None else dict.fromkeys(("uploads", "uploads_there", "uploads_failed", "uses"), 0)),
            "pending": len(background.waiting()) if background is not None else 0,
            "reading": not self._reads.open,
            "writing": background is not None and not self._writes.open,
            "outages": self._reads.opened + self._writes.opened,
            "requests": self._objects.counts(),
            "rates": self._network.report(),
        }

    def close(self) -> None:
        """End the threads; what is half fetched or uploaded is given up."""
        self._closing = True
        self._objects.close()
        if self._background is not None:
            self._background.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)
        if self._cleaners is not None:
            self._cleaners.shutdown(wait=False, cancel_futures=True)

    # The threads

    def _run(self, fetch: Fetch, names: Names, key: bytes, have: int, most: int) -> None:
        """One request's lookup and fetch."""
        outcome, entry = "failed", None
        try:
            outcome, entry = self._fetched(fetch, names, key, have, most)
            self._reads.worked()
        except Cancelled:
            outcome = "late" if fetch.late else "cancelled"
        except StoreFailed as error:
            outcome = "late" if fetch.late else "refused" if isinstance(error, Damaged) else "failed"
            if not fetch.late:  # that was noted when it happened
                self._reads.failed(error, error.denied)
        except (BadEntry, Gone) as error:
            outcome = "refused"
            self._log.warn("refused", "shared cache: an entry is not used: %s", error)
        except (DirectoryFull, OSError) as error:
            self._log.warn("local", "shared cache: an entry could not be taken in: %s", error)
        except Exception as error:  # whatever it is, the request is served without it
            self._log.warn("fault", "shared cache: a lookup failed (%s: %s)", type(error).__name__, error)
        with self._lock:
            self._counts["lookups"] += 1
            self._counts[outcome] += 1
        fetch.end(entry)
        self._wake()

    def _fetched(self, fetch: Fetch, names: Names, key: bytes, have: int, most: int) -> tuple[str, ColdEntry | None]:
        stop = fetch.progress.stop
        reached = self._lookup.reach(names, key, have, most, stop=stop)
        if self._lookup.distrusted(names, reached.name):
            return "misses", None
        try:
            manifest = self._lookup.manifest(names, reached.name, stop) if reached.length else None
        except Damaged:
            self._lookup.distrust(names, reached.name)
            raise
        if fetch.stopped:
            raise Cancelled
        if manifest is None:
            return "misses", None
        files, length = manifest.serving(key, most)
        if length <= have or not self._fetching.fits(manifest, files):
            return "misses", None
        size = self._fetching.missing(manifest, files)
        computing = self._rates.prefill_seconds(names.fingerprint, have, length)
        if not self._always and size and not self._network.pays(size, computing):
            return "not_worth", None
        fetch.extend(patience(computing))
        started = time.monotonic()
        try:
            chain = self._fetching.fetch(names, manifest, files, fetch.progress)
        except Damaged as error:  # the store works, but for this
            self._lookup.distrust(names, reached.name)
            raise Gone(str(error)) from None
        except (BadEntry, Gone):
            self._lookup.distrust(names, reached.name)
            raise
        finally:
            # Also of what came too late: the next decision is to know.
            self._network.fetched(fetch.progress.nbytes, time.monotonic() - started)
        with self._lock:
            self._counts.update(fetched_tokens=length - have, fetched_bytes=fetch.progress.nbytes)
        if self._background is not None:
            self._background.came(chain[-1], names, reached.name)
        return "fetched", chain[-1]

    def _rest(self, spent: float) -> None:
        """Leave the cores to those that decode."""
        if self._decoding():
            time.sleep(min(LONGEST_REST, spent * self._ratio))
