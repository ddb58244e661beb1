"""The server's generation loop as the plugins see it: which request comes next, and its idle turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mlx_lm_hooks.requests import Served
from mlx_lm_hooks.types import ModelSource, Preparation

from .holding import Delivery, Held, preparation_for, waits_for
from .mailbox import Cancelled, Mailbox
from .runtime import Runtime
from .served import served_for

# Where a `ResponseGenerator` has its engine.
ENGINE = "_mlx_lm_patches_engine"

# Put on the request queue to end a wait; never delivered as a request.
WAKE = object()
BUSY_TURNS = 0.05  # seconds between two busy turns: steps may be much shorter


class Engine:
    """Implements the contract's `Engine` for one `ResponseGenerator`."""

    together = False  # whether other ranks do the same (see `ranked`)
    wakes_with: Any = WAKE

    def __init__(self, generator: Any, runtime: Runtime):
        self._generator = generator
        self._runtime = runtime
        self._decoding = False
        self._waiting = False
        self._woken = False
        self._lock = threading.Lock()
        self._tasks: list[Callable[[], bool]] = []
        self._busy_tasks: list[Callable[[], None]] = []
        self._busy_turn_at = 0.0
        self._held = Held(runtime)
        self._prepared: Any = None  # of the request delivered last
        self._returning: Preparation | None = None  # of the row that is on its way back into the batch
        self._model: Any = None  # that the request delivered last names; upstream loads no other before the next one
        self.current: Mailbox | None = None  # of the request delivered last
        self.joining: Any = None  # the row that has just joined the batch, until it has its detokenizer
        self.delivered = 0  # requests so far
        self._open: list[Mailbox] = []  # of those delivered, all that have not ended

    def start(self) -> None:
        """Announce the engine and resolve the tasks into plain callables."""
        self._runtime.plugins.engine_started(self)
        self._tasks = self._runtime.plugins.idle_tasks()
        self._busy_tasks = self._runtime.plugins.busy_tasks()

    @property
    def busy(self) -> bool:
        return self._decoding or len(self._held) > 0

    @property
    def decoding(self) -> bool:
        return self._decoding

    @property
    def alive(self) -> bool:
        thread = getattr(self._generator, "_generation_thread", None)
        return thread is not None and thread.is_alive() and not self._generator._generation_failed

    @property
    def waiting(self) -> int:
        return self._generator.requests.qsize() + len(self._held)

    @property
    def stopping(self) -> bool:
        return self._runtime.stopping()

    @property
    def request(self) -> Served | None:
        mailbox = self.current
        return served_for(mailbox.queue) if mailbox is not None else None

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            if self._waiting:
                self._waiting = False
                self._generator.requests.put(self.wakes_with)

    def next_request(self, original: Callable[..., Any], timeout: float | None) -> Any:
        """Upstream's `_next_request`, with idle turns in the time it would wait.

        Upstream passes no timeout while rows decode: that is its busy signal. A
        request that needs something from the disk is held back until it is there;
        others pass it.
        """
        self._runtime.here.engine = self
        if self._decoding and time.monotonic() >= self._busy_turn_at:
            self._busy_turn()
        if self._prepared is not None:
            # The request has been looked up since; what it did not take goes.
            self._held.let_go(self._prepared)
            self._prepared = None
        self._woken = False
        request = self._held_back() or self._request(original, None)
        if timeout is None or request is not None:
            self._decoding = True
            return self._deliver(request)
        self._decoding = False
        if not self._held and self._idle_turn():
            return None
        with self._lock:
            if self._woken:
                return None
            self._waiting = True
        request = self._request(original, timeout)
        with self._lock:
            self._waiting = False
        self._decoding = request is not None
        return self._deliver(request)

    def _held_back(self) -> Delivery | None:
        if not self._held or (item := self._held.ready()) is None:
            return None
        request, self._prepared = item
        return request

    def _request(self, original: Callable[..., Any], timeout: float | None) -> Delivery | None:
        """The next request that need not be held back."""
        while (request := self._queued(original, timeout)) is not None:
            request = (Mailbox(request[0], True, request[2]), *request[1:])
            if request[0].cancelled:
                request[0].put(Cancelled())
            elif not self._hold(request):
                return request
            timeout = None
        return None

    def _queued(self, original: Callable[..., Any], timeout: float | None) -> Any:
        request = original(self._generator, timeout)
        if request is WAKE and timeout is None:
            # Look behind it; a second one cannot be there, as it is put only into a wait.
            request = original(self._generator, None)
        return None if request is WAKE else request

    def _busy_turn(self) -> None:
        for task in self._busy_tasks:
            try:
                task()
            except Exception as error:
                self._runtime.fault("a busy task", error)
        self._busy_turn_at = time.monotonic() + BUSY_TURNS

    def _hold(self, delivery: Delivery) -> bool:
        """Whether a request waits for something; only one that upstream would add to its batch may."""
        _, request, args = delivery
        if self._model is None or args.model != self._model:
            return False
        try:
            preparation = preparation_for(self._runtime, self._generator, request, args)
        except Exception as error:
            self._runtime.fault("preparing a request", error)
            return False
        if preparation is None:
            return False
        self._held.add(delivery, preparation)
        return True

    def _deliver(self, delivery: Delivery | None) -> Delivery | None:
        if delivery is not None:
            self.current, self._model = delivery[0], delivery[2].model
            self.delivered += 1
            served = served_for(self.current.queue)
            if served.started is None:  # upstream's own queue of one may deliver it again
                served.started = time.monotonic()
            self._open = [mailbox for mailbox in self._open if not mailbox.ended] + [self.current]
        return delivery

    def fail_all(self, error: Exception) -> None:
        """End every request that was delivered with an error: upstream's loop begins anew, and first loads the default model again."""
        self._model = None
        for mailbox in self._open:
            mailbox.fail(error)
        if self._returning is not None:
            self.let_go(self._returning)

    def end(self) -> None:
        """Let the generation thread end, and wait for that. Any other thread."""
        self._generator.stop_and_join()

    def keep(self, tokens: list[int], caches: list[Any], role: str) -> None:
        """Store what a request leaves that nobody waits for."""
        self._generator.prompt_cache.insert_cache(self._generator.model_provider.model_key, tokens, caches, cache_type=role)

    # For rows that left the batch (see `preempting`)

    @property
    def source(self) -> ModelSource:
        """The model that is loaded."""
        return self._runtime.source_for(self._generator.model_provider.model_key)

    def waits_for(self, tokens: list[int], known: int, max_tokens: int, preempted: int) -> Preparation | None:
        self._returning = waits_for(self._runtime, self._generator, tokens, known, max_tokens, preempted)
        return self._returning

    def let_go(self, preparation: Preparation) -> None:
        self._returning = None
        self._held.let_go(preparation)

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Caches of what is stored of these tokens, and the others, at least one."""
        return self._generator.prompt_cache.fetch_again(self._generator.model_provider.model_key, tokens)

    def _idle_turn(self) -> bool:
        more = False
        for task in self._tasks:
            try:
                more = bool(task()) or more
            except Exception as error:
                self._runtime.fault("an idle task", error)
        return more
