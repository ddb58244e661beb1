"""A running row whose KV is in blocks is kept as one of plain caches, byte for byte: nothing of its blocks is held, copied or moved for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from families import build
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_hooks import GenerationState
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.checkpoints.snapshot import Attempt, namespace_of, take
from mlx_lm_tiered.checkpoints.writer import CheckpointWriter
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.identity import Identity
from mlx_lm_tiered.paged import attention, plan
from mlx_lm_tiered.paged import scheme as registers_its_kinds  # noqa: F401
from mlx_lm_tiered.paged.cache import PagedKVCache

PROMPT = list(range(100, 140))
IDENTITY = Identity("cd" * 16, {"mlx": "test"})


@pytest.fixture(autouse=True)
def paged_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", attention.build(base.quantized_scaled_dot_product_attention))


@pytest.fixture
def kept(tmp_path):
    """A store and its writer."""
    store = ColdStore(tmp_path / "cold", 1 << 30)
    store.attach(IDENTITY.fingerprint)
    assert store.wait_scanned(30)
    writer = CheckpointWriter(store, lambda: False, 1 << 30)
    yield store, writer
    writer.close()
    store.close()


@pytest.mark.parametrize(("family", "block"), [("dense", 16), ("dense", 1), ("hybrid", 16)])
def test_a_row_is_kept_while_it_decodes_beside_another(family: str, block: int, kept):
    store, writer = kept
    model, _ = build(family)
    made = plan.make(model, make_prompt_cache(model))
    assert made is not None
    storage = made.storage(800 // block, block)
    others = storage.pool.take(storage.pool.total)
    storage.pool.let_go([number for number in others if number % 3 == 0])  # so that no row is one run
    rows = [made.apply(make_prompt_cache(model), storage) for _ in range(2)]
    plain = make_prompt_cache(model)
    for caches, prompt in ((plain, PROMPT), (rows[0], PROMPT), (rows[1], PROMPT[5:20])):
        mx.eval(model(mx.array([prompt]), cache=caches), [cache.state for cache in caches])
    batch = [kinds.kind_of(first).cache_class().merge([first, second]) for first, second in zip(*rows, strict=True)]
    rows.clear()
    del caches
    table = next(cache.tables[0] for cache in batch if hasattr(cache, "tables"))
    addresses = [np.array(arena, copy=False).__array_interface__["data"][0] for planes in storage.arenas.planes for arena in planes]
    tokens = list(PROMPT)
    attempts = [Attempt(IDENTITY, namespace_of(PROMPT, policy), len(PROMPT)) for policy in ("plain", "paged")]
    sizes = []
    for step in range(24):
        token = 200 + step
        mx.eval(model(mx.array([[token]]), cache=plain), model(mx.array([[token], [token + 1]]), cache=batch))
        tokens.append(token)
        if step % 8 < 7:
            continue
        blocks, used = list(table.blocks), storage.pool.used
        for attempt in attempts:
            writer.basis(attempt)
        row = [cache.extract(0) for cache in batch]
        theirs, ours = (take(attempt, GenerationState(list(tokens), 7, caches)) for attempt, caches in zip(attempts, (plain, row), strict=True))
        assert ours.meta.descriptors == theirs.meta.descriptors and ours.meta.signatures == theirs.meta.signatures
        whole = kinds.dump(row).tensors
        for (name, data), (same, plainly) in zip(ours.tensors, theirs.tensors, strict=True):
            # A batch of two rounds otherwise than one row.
            mine, other = np.frombuffer(data, np.float32), np.frombuffer(plainly, np.float32)
            assert name == same and np.allclose(mine, other, atol=1e-4)
            array = kinds.made(whole[name].array)
            start = array.shape[2] - 8 if isinstance(whole[name].array, kinds.Later) and ours.parent is not None else 0
            assert bytes(data) == np.array(kinds.since(array, 2, start)).tobytes()
        del row, whole
        sizes.append(ours.nbytes)
        assert (ours.parent is None) == (len(sizes) == 1) and (table.blocks, storage.pool.used, storage.pool.shared) == (blocks, used, 0)
        for snapshot in (ours, theirs):
            writer.offer(snapshot)
        assert writer.flush(10) == (0, 0)
    assert addresses == [np.array(arena, copy=False).__array_interface__["data"][0] for planes in storage.arenas.planes for arena in planes], "an arena was copied"
    if family == "dense":
        assert sizes[1] == sizes[2] == 8 * made.token_bytes and sizes[0] == 48 * made.token_bytes
    # What is restored is put into blocks, and the row goes on there as it would have.
    entry = store.newest(IDENTITY.fingerprint, attempts[1].namespace, b"", "generation-checkpoint/1")
    assert entry is not None and entry.length == len(tokens)
    del table
    batch.clear()
    storage.pool.let_go([number for number in others if number % 3])
    assert storage.pool.used == 0
    restored = store.restore(entry)
    assert restored is not None
    pages = registers_its_kinds.Pages(block, 1 << 20, None)  # type: ignore[arg-type]
    pages.storages[None] = storage
    resumed = pages.adopted(None, list(restored))
    assert resumed is not None and any(isinstance(cache, PagedKVCache) for cache in resumed) and storage.pool.used == -(-len(tokens) // block)
    found, expected = (model(mx.array([[9, 8, 7]]), cache=caches) for caches in (resumed, plain))
    assert mx.allclose(found, expected, atol=1e-4).item() and kinds.length(resumed) == len(tokens) + 3
