"""Seam: the plugin's prefix cache in place of the server's prompt cache."""

from __future__ import annotations

from typing import Any

from mlx_lm_hooks.types import ModelSource, Preparation, Taken

from .. import checkpointing, places
from ..runtime import Fetch, Runtime
from ..seam import Seam

ROLES = ("assistant", "user", "system")


def build(original: type, runtime: Runtime) -> type:
    class LRUPromptCache(original):
        """Upstream's prompt cache over a plugin's prefix cache; upstream's own storage keeps what the plugin does not know."""

        def __init__(self, max_size: int | None = None, max_bytes: int | None = None):
            sizes = {"max_size": max_size, "max_bytes": max_bytes}
            super().__init__(**{name: size for name, size in sizes.items() if size is not None})
            self._prefixes = runtime.plugins.prefix_cache(*runtime.limits(max_size, max_bytes), "server") if runtime.active else None

        def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
            source = runtime.source_for(model)
            if runtime.here.asked is not None and checkpointing.begin(runtime, source, tokens):
                runtime.here.fetch = None
                return None, tokens
            caches, rest = self._found(model, tokens, "take")
            if self._prefixes is not None:
                runtime.here.fetch = Fetch(self._prefixes, source, tokens, len(tokens), len(tokens) - len(rest))
            return caches, rest

        def fetch_again(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
            """The same for a row that was away."""
            return self._found(model, tokens, "retake" if hasattr(self._prefixes, "retake") else "take")

        def _found(self, model: Any, tokens: list[int], how: str) -> tuple[list[Any] | None, list[int]]:
            caches, rest = self._upstream_fetch(model, tokens)
            taken = self._take(runtime.source_for(model), tokens, how) if self._prefixes is not None else None
            if taken is not None and taken.length > len(tokens) - len(rest):
                caches, rest = taken.caches, tokens[taken.length :]
            return caches, rest

        def prepare(self, model: Any, tokens: list[int]) -> Preparation | None:
            """What a fetch of these tokens would stand still for, begun in the background."""
            begin = getattr(self._prefixes, "prepare", None)
            return begin(runtime.source_for(model), tokens) if begin is not None else None

        def _take(self, source: ModelSource, tokens: list[int], how: str) -> Taken | None:
            try:
                taken = getattr(self._prefixes, how)(source, tokens) if tokens else None
                # One token must be left: a forward of none has no logits, and upstream's thread dies of it.
                if taken is not None and not 0 < taken.length < len(tokens):
                    raise ValueError(f"a prefix of {taken.length} tokens was taken for {len(tokens)}")
                return taken
            except Exception as error:
                runtime.fault("taking a prefix", error)
                return None

        def _upstream_fetch(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
            if super().__len__() == 0:
                return None, tokens
            caches, rest = super().fetch_nearest_cache(model, tokens)
            if caches and tokens and not rest and _real(caches):
                # Upstream serves an exact hit with nothing left to forward.
                caches, rest = super().fetch_nearest_cache(model, tokens[:-1])
                if caches and not rest and len(tokens) == 1:
                    return None, tokens
                rest = [*rest, tokens[-1]]
            return caches, rest

        def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant") -> None:
            if self._prefixes is not None:
                try:
                    if self._prefixes.owns(prompt_cache):
                        # Upstream's loop keeps its last list in a variable, and would keep what it holds from being freed.
                        caches = list(prompt_cache)
                        prompt_cache.clear()
                        self._prefixes.put(runtime.source_for(model), tokens, caches, role=cache_type)
                        return
                except Exception as error:
                    runtime.fault("storing a prefix", error)
                    return
                if runtime.ranks is not None:
                    return  # upstream would find it by each rank's own memory, and agree with nobody
            super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

        def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
            super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
            if self._prefixes is None:
                return
            entries = None if n_sequences is None else max(0, n_sequences - super().__len__())
            size = None if n_bytes is None else max(0, n_bytes - super().nbytes)
            try:
                self._prefixes.trim(max_entries=entries, max_bytes=size)
            except Exception as error:
                runtime.fault("trimming prefixes", error)

        def __len__(self) -> int:
            return super().__len__() + (len(self._prefixes) if self._prefixes is not None else 0)

        @property
        def nbytes(self) -> int:
            return super().nbytes + (self._prefixes.nbytes if self._prefixes is not None else 0)

        def stats_by_type(self) -> dict[str, dict[str, int]]:
            result = super().stats_by_type()
            for role, (entries, size) in self._prefixes.by_role().items() if self._prefixes is not None else ():
                stats = result.setdefault(role, {"n_sequences": 0, "n_bytes": 0})
                stats["n_sequences"] += entries
                stats["n_bytes"] += size
            return result

    LRUPromptCache.__qualname__ = original.__qualname__
    LRUPromptCache.__module__ = original.__module__
    return LRUPromptCache


def _real(caches: list[Any]) -> bool:
    """Whether the caches are upstream's classes, which a model can be run with (its tests store stand-ins)."""
    from mlx_lm.models.cache import _BaseCache

    return all(isinstance(cache, _BaseCache) for cache in caches)


def probe(original: type) -> None:
    """Store, fetch, count and trim with caches that are no more than their size."""

    class Stand:
        nbytes = 3

        def is_trimmable(self) -> bool:
            return False

    cache = original(max_size=2)
    cache.insert_cache("m", [1, 2], [Stand()])
    caches, rest = cache.fetch_nearest_cache("m", [1, 2, 3])
    roles = cache.stats_by_type()
    if len(caches) != 1 or list(rest) != [3] or len(cache) != 1 or cache.nbytes != 3 or set(roles) != set(ROLES):
        raise ValueError("a stored prefix is not found, counted or listed as before")
    cache.trim_to(n_bytes=0)
    if len(cache) != 0:
        raise ValueError("trimming leaves entries")


SEAMS = [
    Seam(
        feature="prefix",
        module="mlx_lm.server",
        qualname="LRUPromptCache",
        kind="replace",
        signature=(
            "__init__(self, max_size=, max_bytes=); __len__(self); nbytes(self); fetch_nearest_cache(self, "
            "model, tokens); insert_cache(self, model, tokens, prompt_cache, *, cache_type=); trim_to(self, *, "
            "n_sequences=, n_bytes=); stats_by_type(self)"
        ),
        bodies={"3c26b494fd5d6634": "0.32.0 0.32.1 0.32.2"},
        why="the server's prompt cache looks up and stores through the plugin's tiers",
        until="upstream takes a prompt cache from a plugin",
        build=build,
        probe=probe,
    ),
    Seam(
        feature="prefix",
        **places.SERVER_LOOP,
        kind="check",
        why="fetches with the prompt's tokens, stores with the tokens that the caches hold",
        until="upstream takes a prompt cache from a plugin",
    ),
]
