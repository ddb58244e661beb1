"""Which models are paged, and how, is found out by running them; those that cannot be keep plain caches, with one warning."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from families import FAMILIES
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from paged_models import WITH_FULL_ATTENTION, model_of

from mlx_lm_tiered.memory.footprint import Footprint
from mlx_lm_tiered.paged import attention, batch, plan
from mlx_lm_tiered.paged.arenas import Arenas
from mlx_lm_tiered.paged.cache import PagedKVCache
from mlx_lm_tiered.paged.moving import into_blocks
from mlx_lm_tiered.paged.pool import Pool
from mlx_lm_tiered.paged.scheme import Pages
from mlx_lm_tiered.paged.sides import Sides
from mlx_lm_tiered.paged.table import Storage, Table
from mlx_lm_tiered.schemes.convert import leaves
from mlx_lm_tiered.statistics import Statistics

POOL = 4 << 20


@pytest.fixture(autouse=True)
def paged_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", attention.build(base.quantized_scaled_dot_product_attention))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str):
    fresh = make_prompt_cache(model_of(name))
    found = plan.make(model_of(name), fresh)
    if name not in WITH_FULL_ATTENTION:
        assert found is None
        return
    # Latent attention takes keys apart; mlx-lm's own takes rows as they are.
    assert found is not None and found.padded == (name == "nested")
    made = list(leaves(found.apply(make_prompt_cache(model_of(name)), found.storage(4, 16))))
    assert [type(leaf) is PagedKVCache for leaf in made] == [side is not None for side in found.sides]
    assert all(type(leaf) in (PagedKVCache, type(plain)) for leaf, plain in zip(made, leaves(fresh), strict=True))
    # The pool is there already: a request's tokens cost nothing more but what is computed of them.
    footprint = Footprint(0, tuple(layer for layers in found.layers for layer in layers))
    assert footprint.computed_per_token >= found.token_bytes > 0 and (name != "dense" or footprint.nbytes(1000, 64) == 0)


class Unreadable:
    """A model whose attention wants a plain cache's own buffers."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        keys = mx.ones((1, 1, tokens.shape[1], 2))
        cache[0].update_and_fetch(keys, keys)
        assert type(cache[0]) is KVCache, "buffers"
        return mx.zeros((*tokens.shape, 3))


class Wrong(Unreadable):
    """One that computes something else over paged caches."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        keys = mx.ones((tokens.shape[0], 1, tokens.shape[1], 2))
        cache[0].update_and_fetch(keys, keys)
        return mx.full((*tokens.shape, 3), 1.0 if type(cache[0]) is KVCache else 2.0)


@pytest.mark.parametrize("model, reason", ((Unreadable(), "AssertionError: buffers"), (Wrong(), "logits differ by 1")))
def test_a_model_that_paging_cannot_serve_keeps_plain_caches_with_one_warning(model, reason, caplog):
    statistics = Statistics()
    pages = Pages(16, POOL, statistics)
    for _ in range(3):
        caches = [KVCache()]
        assert pages.caches(model, None, caches) is caches
    assert statistics.report()["faults"] == {"paged_kv": 1} and pages.plan_of(model) is None and not pages.storages
    assert len([record for record in caplog.records if reason in record.getMessage()]) == 1


def test_restored_caches_go_to_the_layers_of_the_plan():
    """A cache that the model never fills has none."""
    sides = Sides(1, 2, 2, mx.float32, mx.float32)
    storage = Storage(Pool(4), Arenas([sides], 4, 16), (None, sides))
    restored = [KVCache(), KVCache()]
    restored[1].update_and_fetch(*[mx.ones((1, 1, 3, 2))] * 2)
    made = into_blocks(restored, Table(storage))
    assert made[0] is restored[0] and isinstance(made[1], PagedKVCache) and (made[1].layer, made[1].offset) == (0, 3)
    assert made[1].keys_and_values()[0].tolist() == [[[[1, 1]] * 3]]


@pytest.mark.parametrize("name, padded", (("dense", True), ("nested", None)))
def test_attention_to_the_wrong_tokens_of_a_row_is_seen(name: str, padded: bool | None, monkeypatch: pytest.MonkeyPatch):
    read, slots = attention.read, batch._slots

    def last_only(*of: Any) -> tuple[mx.array, mx.array]:
        return tuple(mx.repeat(side[:, :, -1:], side.shape[2], axis=2) for side in read(*of))  # type: ignore[return-value]

    def backwards(table: Any, stop: int, left: int, width: int) -> Any:
        made = slots(table, stop, left, width)
        made[left : left + stop] = made[left : left + stop][::-1].copy()
        return made

    monkeypatch.setattr(attention, "read", last_only)
    if padded is not None:
        assert plan.make(model_of(name), make_prompt_cache(model_of(name))).padded
        return
    monkeypatch.setattr(batch, "_slots", backwards)
    with pytest.raises(ValueError, match="cannot read rows of paged KV .*logits differ"):
        plan.make(model_of(name), make_prompt_cache(model_of(name)))


def test_a_pool_smaller_than_a_block_is_none():
    statistics = Statistics()
    caches = make_prompt_cache(model_of("dense"))
    assert Pages(256, 1000, statistics).caches(model_of("dense"), None, caches) is caches
    assert statistics.report()["faults"] == {"paged_kv": 1}
    object.__delattr__(model_of("dense"), "_mlx_lm_tiered_pages")


def test_a_bounded_cache_stays_a_ring():
    pages = Pages(16, POOL, Statistics())
    assert type(pages.caches(model_of("dense"), None, make_prompt_cache(model_of("dense")))[0]) is PagedKVCache
    rings = pages.caches(model_of("dense"), None, [RotatingKVCache(64) for _ in range(3)])
    assert all(type(ring) is RotatingKVCache for ring in rings)
    object.__delattr__(model_of("dense"), "_mlx_lm_tiered_pages")
