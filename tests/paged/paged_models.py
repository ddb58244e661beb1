"""Tiny models with paged caches, made without a server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from families import FAMILIES, VOCABULARY, build
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_lm_tiered.caches import paged as kinds_of_paging
from mlx_lm_tiered.caches.kind import kind_named, register
from mlx_lm_tiered.paged.arenas import Arenas
from mlx_lm_tiered.paged.cache import PagedKVCache
from mlx_lm_tiered.paged.pool import Pool
from mlx_lm_tiered.paged.sides import Sides
from mlx_lm_tiered.paged.table import Storage, Table
from mlx_lm_tiered.schemes.convert import leaves, mapped

for _kind in kinds_of_paging.KINDS:
    if kind_named(_kind.name) is None:
        register(_kind)

TOKENS = np.random.default_rng(3).integers(3, VOCABULARY, 400).tolist()


@functools.cache
def model_of(name: str) -> Any:
    return build(name)[0]


@functools.cache
def _kv(name: str) -> tuple[Any, ...]:
    """Of each leaf of a model's caches what its tokens look like; None where it is not of full attention."""
    probe = make_prompt_cache(model_of(name))
    model_of(name)(mx.array([[1, 2]]), cache=probe)
    return tuple(Sides.of(c.keys, c.values) if type(c) is KVCache and c.keys is not None else None for c in leaves(probe))


WITH_FULL_ATTENTION = [name for name in FAMILIES if any(_kv(name))]


def storage_for(name: str, block: int, tokens: int = 1000) -> Storage:
    blocks = tokens // block + 4
    return Storage(Pool(blocks), Arenas([sides for sides in _kv(name) if sides is not None], blocks, block))


def new_caches(name: str, storage: Storage) -> list[Any]:
    table, sides, layers = Table(storage), iter(_kv(name)), iter(range(len(storage.arenas.layers)))
    change: Callable[[Any], Any] = lambda leaf: leaf if next(sides) is None else PagedKVCache(table, next(layers))  # noqa: E731
    return [mapped(cache, change) for cache in make_prompt_cache(model_of(name))]


def table_of(caches: list[Any]) -> Table:
    return next(leaf.table for leaf in leaves(caches) if isinstance(leaf, PagedKVCache))


def forward(name: str, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model_of(name)(mx.array([tokens]), cache=caches)
    mx.eval(logits, [c.state for c in caches])
    return logits


def address(array: mx.array) -> int:
    return np.array(array, copy=False).__array_interface__["data"][0]
