"""Seams: one request's caches become a batch row, and go from prefill to decoding, without a copy.

Upstream copies them three times on this way: into a merged batch, out of the
prefill batch by a gather, and again when the merged batch, made without room, has to
grow. For a prefix of gigabytes that is most of the time to the first token, and
twice its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..runtime import Runtime
from ..seam import Seam


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    scheme = runtime.scheme

    @functools.wraps(original)
    def _merge_caches(caches: Any) -> Any:
        if scheme is not None and scheme.start > 0 and len(caches) > 1 and runtime.active:
            if (merged := scheme.merge(caches)) is not None:
                return merged
        if len(caches) == 1 and runtime.active:
            try:
                row = runtime.plugins.merge_row(caches[0])
                if row is not None:
                    return row
            except Exception as error:
                runtime.fault("merging a row", error)
        return original(caches)

    return _merge_caches


def build_split(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def split(self: Any, indices: list[int]) -> Any:
        if not (runtime.active and list(indices) == [0] and len(self.uids) == 1 and _unpadded(self.prompt_cache)):
            return original(self, indices)
        # Upstream copies the batch, then filters both halves; the only row can simply move.
        caches, self.prompt_cache = self.prompt_cache, []
        moved = self._copy()
        moved.prompt_cache = caches
        self.filter([])
        return moved

    return split


def _unpadded(caches: list[Any]) -> bool:
    """Whether the rows begin in the first slot, so that upstream's filter would shift nothing."""
    for cache in caches:
        if hasattr(cache, "caches"):
            if not _unpadded(list(cache.caches)):
                return False
        elif (padding := getattr(cache, "left_padding", None)) is not None and any(padding.tolist()):
            return False
    return True


def probe(original: Callable[..., Any]) -> None:
    """No caches make no batch."""
    if original([]) != []:
        raise ValueError("merging no caches gives some")


SEAMS = [
    Seam(
        feature="rows",
        module="mlx_lm.generate",
        qualname="_merge_caches",
        kind="wrap",
        signature="(caches)",
        bodies={"80b3ae47cf0913eb": "0.32.0 0.32.1 0.32.2"},
        why="lets the plugin make the batch form of a single row",
        until="upstream merges a single row without copying",
        build=build,
        probe=probe,
    ),
    Seam(
        feature="rows",
        module="mlx_lm.generate",
        qualname="PromptProcessingBatch.split",
        kind="wrap",
        signature="(self, indices)",
        bodies={"ec24bfa4259085c0": "0.32.0 0.32.1 0.32.2"},
        why="moves the only row of a prefill batch instead of gathering it",
        until="upstream moves a batch that is split off whole",
        build=build_split,
    ),
    Seam(
        feature="rows",
        module="mlx_lm.generate",
        qualname="PromptProcessingBatch._copy",
        kind="check",
        signature="(self)",
        bodies={"3f0750b5534ad13e": "0.32.0 0.32.1 0.32.2"},
        why="takes along everything but the caches",
        until="upstream moves a batch that is split off whole",
    ),
    Seam(
        feature="rows",
        module="mlx_lm.generate",
        qualname="PromptProcessingBatch.filter",
        kind="check",
        signature="(self, keep)",
        bodies={"1d867371c8b7160e": "0.32.0 0.32.1 0.32.2"},
        why="empties a batch of which nothing is kept",
        until="upstream moves a batch that is split off whole",
    ),
]
