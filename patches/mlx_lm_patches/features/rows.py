"""Seam: one request's caches become a batch row without a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..runtime import Runtime
from ..seam import Seam


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def _merge_caches(caches: Any) -> Any:
        if len(caches) == 1 and runtime.active:
            try:
                row = runtime.plugins.merge_row(caches[0])
                if row is not None:
                    return row
            except Exception as error:
                runtime.fault("merging a row", error)
        return original(caches)

    return _merge_caches


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
]
