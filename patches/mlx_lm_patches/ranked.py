"""The generation loop of one of several ranks: every turn has the same collectives on all of them, whatever each has to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from mlx_lm_hooks.types import Preparation

from .engine import Engine
from .holding import Delivery, has_images
from .mailbox import Mailbox
from .ranks import Control, Group, control, watch_launcher
from .runtime import Runtime

log = logging.getLogger("mlx_lm_patches")

# What a rank has to do, and how long rank 0 then waits for a request (seconds; None: as upstream does).
NOTHING, SOON, NOW = range(3)
WAITS = {NOTHING: None, SOON: 0.005, NOW: 0.0}


class RankedEngine(Engine):
    """One turn: an idle or a busy turn of each rank's own, one gather, upstream's own sharing of a request.

    Nothing is held back, and nobody looks whether a client has gone: rank 0 alone could
    tell. That a row is given up, upstream shares.
    """

    together = True
    wakes_with = control("wake")

    def __init__(self, generator: Any, runtime: Runtime, ranks: Group):
        super().__init__(generator, runtime)
        self._ranks = ranks
        ranks.alive = lambda: self.alive
        if ranks.rank == 0:
            ranks.put = generator_queue(generator)

    def start(self) -> None:
        super().start()
        watch_launcher(self._launcher_gone)

    def next_request(self, original: Callable[..., Any], timeout: float | None) -> Any:
        self._runtime.here.engine = self
        more = False
        if timeout is None:
            if time.monotonic() >= self._busy_turn_at:
                self._busy_turn()
        else:
            self._decoding = False
            more = self._idle_turn()
        if (wait := self._agreed(more)) is not None and timeout is not None:
            timeout = wait
        request = self._shared(original, timeout)
        if request is None:
            return None
        if isinstance(request[1], Control):
            self._obey(request[1])
            return None
        self._decoding = True
        _, body, args = request
        alone = not self._generator._is_batchable(args) or has_images(body.messages)
        # Upstream cannot stop one that it serves by itself: rank 0 would, and the others go on.
        return self._deliver((Mailbox(request[0], args=args, together=True, to_the_end=alone), body, args))

    def _agreed(self, more: bool) -> float | None:
        """How long rank 0 waits for a request, by what any of them has to do. Any that was asked to stop stops all."""
        need = NOW if more else SOON if self._ranks.asked else NOTHING
        stops, needs = zip(*self._ranks.gather([int(self.stopping), need]), strict=True)
        if any(stops) and not self.stopping:
            self._runtime.stop()
        return WAITS[max(needs)]

    def _shared(self, original: Callable[..., Any], timeout: float | None) -> Delivery | None:
        with self._lock:
            if self._woken and timeout is not None:
                timeout = 0.0
            self._woken = False
            self._waiting = timeout is not None and timeout > 0
        try:
            return original(self._generator, timeout)
        finally:
            with self._lock:
                self._waiting = False

    def _obey(self, order: Control) -> None:
        if order.kind == "stop":
            self._generator._stop = True
        else:
            self._ranks.obey(order)

    def wake(self) -> None:
        if self._ranks.rank == 0:
            super().wake()

    def end(self) -> None:
        if self._ranks.rank == 0 and self.alive:
            self._generator.requests.put(control("stop"))  # all leave the loop in the same turn
        self._generator._generation_thread.join()

    def lost(self, error: Exception) -> None:
        """What the others do is not known any more: the requests get the error, and the server stops."""
        log.error("rank %d of %d stops, as its loop failed or another rank was lost: %s: %s", self._ranks.rank, self._ranks.size, type(error).__name__, error)
        self._ranks.complete = False
        self.fail_all(error.with_traceback(None))
        saved = self._runtime.stop(lost=True)
        while saved is not None and not saved():  # which needs turns of this thread
            if not self._idle_turn():
                time.sleep(0.005)

    def waits_for(self, tokens: list[int], known: int, max_tokens: int, preempted: int) -> Preparation | None:
        return None

    def _launcher_gone(self) -> None:
        log.info("stopping: the launcher has gone")
        self._runtime.stop()


def generator_queue(generator: Any) -> Callable[[Any], None]:
    """Puts something on a generator's queue, which upstream makes later."""
    return lambda item: generator.requests.put(item)
