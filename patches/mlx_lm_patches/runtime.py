"""What the seams of one activation share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm_hooks.manager import Plugins
from mlx_lm_hooks.types import GenerationCheckpoints, Invocation, ModelSource, PrefixCache

from .ranks import Group
from .stopping import Stopping

log = logging.getLogger("mlx_lm_patches")


@dataclass
class Fetch:
    """The lookup that precedes a sequential generation on the same thread.

    `tokens` is the caller's own list, which it may extend later; the key is its
    first `count`. `cached` tokens of it were found.
    """

    prefixes: PrefixCache
    source: ModelSource
    tokens: Sequence[int]
    count: int
    cached: int


class _ThreadState(threading.local):
    engine: Any = None  # whose generation thread this is
    client: Any = None  # whose request this HTTP thread answers
    fetch: Fetch | None = None
    segments: tuple[list[list[int]], list[str]] | None = None
    asked: Any = None  # a `checkpointing.Asked`
    following: Any = None  # a `checkpointing.Following`


class Runtime:
    """One activation: the plugins, and what the seams know of each other.

    `active` turns false on deactivation; wrappers that someone still holds then
    only pass through.
    """

    def __init__(self, plugins: Plugins, invocation: Invocation):
        self.plugins = plugins
        self.invocation = invocation
        self.active = True
        self.scheme = plugins.kv_scheme()
        self.speculation = plugins.speculation()
        self.sources: dict[Hashable, ModelSource] = {}
        self.served: tuple[Callable[[], Any], ModelSource] | None = None  # a weak reference to the server's model, and its source
        self.loads = 0
        self.preempts = False  # whether rows of the server's batch can leave it and come back
        self.stopping: Callable[[], bool] = lambda: False  # whether the server was asked to stop
        self.ranks: Group | None = invocation.ranks if isinstance(invocation.ranks, Group) else None
        self._stopping: Stopping | None = None
        self._stop_asked: bool | None = None
        self.here = _ThreadState()
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._script_prefixes: PrefixCache | None = None
        self._script_asked = False
        self._checkpoints: list[GenerationCheckpoints | None] = []

    def fault(self, where: str, error: BaseException) -> None:
        """Note a plugin's fault: one warning a place, the details at debug level. Serving goes on without."""
        with self._lock:
            first = where not in self._warned
            self._warned.add(where)
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "plugin fault in %s, going on without it: %s: %s", where, type(error).__name__, error)
        log.debug("plugin fault in %s", where, exc_info=error)

    def stops_by(self, stopping: Stopping) -> None:
        """Say what stops the server."""
        self._stopping = stopping
        self.stopping = lambda: stopping.requested
        if self._stop_asked is not None:
            stopping.request(self._stop_asked)

    def stop(self, lost: bool = False) -> Callable[[], bool] | None:
        """Stop the server in order; `lost` when not all that it served could be. Any thread, also before it listens (then None).

        Returns what tells whether all is saved that could be.
        """
        self._stop_asked = lost or bool(self._stop_asked)
        if self._stopping is None:
            return None
        self._stopping.request(lost)
        return self._stopping.ended.is_set

    def plain_class(self, cache: Any) -> type:
        """The class that a cache had before a plugin's scheme or upstream's own flags quantized it."""
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        if type(cache) is QuantizedKVCache:
            return KVCache
        return type(cache) if self.scheme is None else self.scheme.plain_class(cache)

    def source_for(self, key: Any) -> ModelSource:
        """The model that upstream's prompt-cache key names."""
        try:
            known = self.sources.get(key)
        except TypeError:
            return ModelSource(key=repr(key))
        return known if known is not None else ModelSource(key=key)

    def served_by(self, model: Any) -> ModelSource | None:
        """The source of a model object, if it is the one that the server has loaded."""
        return self.served[1] if self.served is not None and self.served[0]() is model else None

    def prefilled(self, source: ModelSource, start: int, tokens: int, seconds: float) -> None:
        """Tell the plugins what a prefill chunk took."""
        try:
            self.plugins.prefilled(source, start, tokens, seconds)
        except Exception as error:
            self.fault("measuring a prefill", error)

    def limits(self, max_size: int | None, max_bytes: int | None) -> tuple[int | None, int | None]:
        """What the user asked of a prompt cache, as opposed to what upstream passes by default.

        Upstream's server always passes its flag's value for the entries, and never
        the one for the bytes.
        """
        if self.invocation.command == "server":
            if "prompt_cache_size" not in self.invocation.given:
                max_size = None
            if max_bytes is None:
                max_bytes = getattr(self.invocation.args, "prompt_cache_bytes", None)
        return max_size, max_bytes

    def script_prefixes(self) -> PrefixCache | None:
        """The prefix cache of scripts, made on first use; None when no plugin has one."""
        if not self._script_asked:
            self._script_asked = True
            self._script_prefixes = self.plugins.prefix_cache(None, None, "script")
        return self._script_prefixes

    def checkpoints(self) -> GenerationCheckpoints | None:
        """What keeps generations, asked for on first use; None when no plugin does."""
        if not self._checkpoints:
            self._checkpoints.append(self.plugins.generation_checkpoints())
        return self._checkpoints[0]


def kv_scheme(kv_bits: Any, group_size: Any, start: Any) -> str:
    """How upstream stores KV under its ``--kv-bits``, ``--kv-group-size`` and ``--quantized-kv-start``."""
    return "plain" if kv_bits is None else f"affine:{kv_bits}:{group_size}@{start}"
