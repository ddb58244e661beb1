"""Following a sequential prefill from its progress callback, and showing processors what came before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm_hooks.types import ModelSource, PrefixCache

from .mailbox import Cancelled
from .runtime import Runtime


class Progress:
    """A prompt-progress callback that lets the prefix cache watch the caches, tells what each chunk took, and calls the one it stands in for.

    Upstream calls it with (tokens processed, tokens in all) after each chunk,
    once when one token is left, and again after the first decode step. `tokens`
    is the whole key, `caches` the list being filled; the last
    `total` tokens of the key are to be processed, `offset` of them in an earlier
    prefill.
    """

    def __init__(
        self,
        runtime: Runtime,
        prefixes: PrefixCache,
        source: ModelSource,
        tokens: Sequence[int],
        caches: list[Any],
        total: int,
        inner: Callable[[int, int], None] | None,
    ):
        self._runtime = runtime
        self._prefixes = prefixes
        self._source = source
        self.tokens = tokens
        self._caches = caches
        self._total = total
        self._inner = inner
        self._last = -1
        self._since = 0.0
        self.offset = 0
        self._kept = False

    def __call__(self, processed: int, _total: int) -> None:
        processed += self.offset
        if processed == self._last:
            self._since = time.perf_counter()
            return
        last, self._last = self._last, processed
        if 0 <= last < processed < self._total and self._runtime.active:
            start = len(self.tokens) - self._total + last
            self._runtime.prefilled(self._source, start, processed - last, time.perf_counter() - self._since)
        self._follow(processed)
        self._since = time.perf_counter()

    def _follow(self, processed: int) -> None:
        if self._inner is not None:
            self._inner(processed, self._total)
        if processed < self._total and stopped(self._runtime):
            self._leave(processed)
        # At 0 nothing new is held, at the end a decode step is under way.
        if 0 < processed < self._total and self._runtime.active:
            try:
                self._prefixes.observe(self._caches)
            except Exception as error:
                self._runtime.fault("watching a prefill", error)
            if processed == self._total - 1 and not self._kept:
                self.keep(processed)

    def _leave(self, processed: int) -> None:
        """Nobody waits any more: store what is done, and end the generation. Raises Cancelled."""
        held = len(self.tokens) - self._total + processed
        if processed > 0:
            try:
                self._prefixes.put(self._source, self.tokens[:held], self._caches, role="user")
            except Exception as error:
                self._runtime.fault("keeping a cancelled prefill", error)
        raise Cancelled

    def keep(self, processed: int) -> None:
        """Keep the caches, which hold `processed` of the total, as the prompt's boundary."""
        self._kept = True
        held = len(self.tokens) - self._total + processed
        try:
            self._prefixes.snapshot(self._source, self.tokens[:held], self._caches, role="user")
        except Exception as error:
            self._runtime.fault("keeping a prompt boundary", error)


def stopped(runtime: Runtime) -> bool:
    """Whether nobody waits for the request that this thread, a server's, answers by itself."""
    engine = runtime.here.engine
    return runtime.active and engine is not None and engine.current is not None and engine.current.stopped


def stoppable(runtime: Runtime, inner: Callable[[int, int], None] | None) -> Callable[[int, int], None] | None:
    """A progress callback that raises Cancelled once nobody waits for the request."""
    if inner is None or runtime.here.engine is None:
        return inner

    def progress(processed: int, total: int) -> None:
        inner(processed, total)
        if processed < total and stopped(runtime):
            raise Cancelled

    return progress


def with_history(processor: Callable[[Any, Any], Any], history: Any) -> Callable[[Any, Any], Any]:
    """A logits processor of a generation that begins in the middle, which is shown the tokens before as well."""
    import mlx.core as mx

    return lambda tokens, logits: processor(mx.concatenate([history, tokens]), logits)
