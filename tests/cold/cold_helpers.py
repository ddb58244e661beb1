"""Entries, stores and queues for the tests of the SSD tier, at the sizes of tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_lm_tiered.cold.arrays import to_bytes
from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.cold.jobs import Job, describe
from mlx_lm_tiered.cold.spill import SpillQueue
from mlx_lm_tiered.cold.store import ColdStore, NotIdentical
from mlx_lm_tiered.identity import Identity
from mlx_lm_tiered.index.keys import token_key

FINGERPRINT = "ab" * 16
IDENTITY = Identity(FINGERPRINT, {"mlx": "test"})
LARGE = 1 << 30


def plain(tokens: int, layers: int = 2, dtype: mx.Dtype = mx.float32, seed: int = 0, heads: int = 2, dim: int = 8) -> list[KVCache]:
    """Filled plain caches, different for each seed."""
    caches = [KVCache() for _ in range(layers)]
    for i, cache in enumerate(caches):
        key = mx.random.key(seed * 1000 + i)
        values = mx.random.normal((1, heads, tokens, dim), key=key).astype(dtype)
        cache.update_and_fetch(values, values + 1)
    return caches


@cache
def _walk_of(layer: int, seed: int, dim: int) -> mx.array:
    return mx.random.normal((1, 2, 2048, dim), key=mx.random.key(seed * 1000 + layer))


def grown(tokens: int, layers: int = 2, seed: int = 0, dim: int = 8, kind: type = KVCache) -> list:
    """Caches of a conversation of `tokens` so far: the same seed's shorter ones hold the same values for the same tokens."""
    caches = [kind() for _ in range(layers)]
    for i, cache in enumerate(caches):
        values = _walk_of(i, seed, dim)[:, :, :tokens]
        cache.update_and_fetch(values, values + 1)
    return caches


def wrapped(tokens: int, size: int = 16) -> list[RotatingKVCache]:
    """Rings that went round: they can only be used whole."""
    caches = [RotatingKVCache(max_size=size, keep=0) for _ in range(2)]
    for cache in caches:
        for start in range(0, tokens, 8):
            n = min(8, tokens - start)
            values = mx.random.normal((1, 2, n, 8))
            cache.update_and_fetch(values, values)
    return caches


def recurrent() -> list[ArraysCache]:
    cache = ArraysCache(size=2)
    cache[0], cache[1] = mx.random.normal((1, 4, 8)), mx.random.normal((1, 8))
    return [cache]


def job(tokens: Sequence[int], caches: list | None = None, identity: Identity = IDENTITY, role: str = "user", **sizes: int) -> Job:
    caches = plain(len(tokens), **sizes) if caches is None else caches
    return Job(identity, "", token_key(tokens), caches, role)


def save(store: ColdStore, saved: Job, until: int | None = None) -> Path:
    """Write one entry, without a queue. Returns its path."""
    meta, tensors = describe(saved)
    writer = store.begin(*saved.place, meta, continue_until=until)
    try:
        for name, array in tensors.items():
            writer.write(name, to_bytes(array))
        writer.commit()
    except NotIdentical as error:
        writer.abort()
        assert until is None or error.since < until
        return save(store, saved, error.since)
    except BaseException:
        writer.abort()
        raise
    found = store.find(*saved.place[:2], saved.key, saved.length)
    assert found is not None and found.length == saved.length
    return found.entry.path


def scanned(root: Path, max_bytes: int = LARGE, fingerprint: str = FINGERPRINT, **options: str) -> ColdStore:
    """A store as a new start would have it."""
    store = ColdStore(root, max_bytes, **options)
    store.attach(fingerprint)
    assert store.wait_scanned(30)
    return store


def restore(store: ColdStore, tokens: Sequence[int]) -> list | None:
    """The caches stored for exactly these tokens."""
    found = store.find(FINGERPRINT, "", token_key(tokens), len(tokens))
    if found is None or found.length < len(tokens):
        return None
    return store.restore(found.entry)


def same(a: Sequence, b: Sequence) -> bool:
    """Whether plain caches hold the same tokens' values, bit for bit."""
    return all(
        x.offset == y.offset
        and all(mx.array_equal(p[..., : x.offset, :], q[..., : y.offset, :]).item() for p, q in ((x.keys, y.keys), (x.values, y.values)))
        for x, y in zip(a, b, strict=True)
    )


def disk_bytes(root: Path) -> int:
    """All files under a directory, by size, while nobody moves any. Unfinished ones may go meanwhile."""
    total = 0
    with Directory(root, 0).locked():
        for path in root.rglob("*"):
            with suppress(FileNotFoundError):
                total += path.lstat().st_size if not path.is_dir() else 0
    return total


def flush(queue: SpillQueue, timeout: float = 10.0):
    """Flush with this thread as the generation thread."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(queue.flush(timeout)))
    thread.start()
    while thread.is_alive():
        if not queue.turn():
            thread.join(0.001)
    return results[0]
