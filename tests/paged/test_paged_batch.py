"""Rows of a paged batch come and go at any step, and each is what it is alone."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from paged_models import TOKENS, WITH_FULL_ATTENTION, forward, model_of, new_caches, storage_for, table_of
from support.joining import prompts, together

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.paged import attention
from mlx_lm_tiered.paged.admission import longest
from mlx_lm_tiered.paged.batch import BatchPagedKVCache
from mlx_lm_tiered.paged.cache import PagedKVCache
from mlx_lm_tiered.paged.scheme import Pages
from mlx_lm_tiered.speculation.rollback import Rollback
from mlx_lm_tiered.statistics import Statistics

PROMPTS = prompts(TOKENS)
BATCHED = [name for name in WITH_FULL_ATTENTION if all(hasattr(cache, "merge") for cache in make_prompt_cache(model_of(name)))]


@pytest.fixture(autouse=True)
def paged_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", attention.build(base.quantized_scaled_dot_product_attention))


def alone(name: str, number: int) -> list[int]:
    caches = make_prompt_cache(model_of(name))
    return [int(token) for token, _ in generate_step(mx.array(PROMPTS[number]), model_of(name), max_tokens=8 + number, prompt_cache=caches)]


# Multi-head latent attention takes keys apart, and so must have arrays.
CASES = [(name, block, padded) for name in BATCHED for block, padded in ((1, False), (16, False), (16, True)) if (padded or name != "nested") and (block > 1 or name == "dense")]


@pytest.mark.parametrize("name, block, padded", CASES)
def test_every_row_equals_its_run_alone(name: str, block: int, padded: bool):
    storage = storage_for(name, block)
    storage.padded = padded
    found = together(model_of(name), PROMPTS, lambda: new_caches(name, storage))
    for number in range(1, len(PROMPTS)):
        assert found[number] == alone(name, number), number
    assert found[0] == alone(name, 0)[: len(found[0])]
    assert storage.pool.used == 0


def batch_of(storage, lengths: list[int]) -> list[BatchPagedKVCache]:
    rows = []
    for number, length in enumerate(lengths):
        rows.append(new_caches("dense", storage))
        forward("dense", rows[-1], TOKENS[number * 50 : number * 50 + length])
    return [PagedKVCache.merge([row[layer] for row in rows]) for layer in range(len(rows[0]))]


def test_a_short_row_takes_what_it_needs_whatever_the_others_take():
    storage = storage_for("dense", 16)
    batch = batch_of(storage, [200, 3, 17])
    assert storage.pool.used == 13 + 1 + 2
    for _ in range(3):
        mx.eval(model_of("dense")(mx.array([[5], [6], [7]]), cache=batch))
    assert storage.pool.used == 13 + 1 + 2 and batch[0].lengths == [203, 6, 20]
    for cache in batch:
        cache.filter([1, 2])
    assert storage.pool.used == 3


def test_rows_are_written_in_place():
    storage = storage_for("dense", 16, 4000)
    batch = batch_of(storage, [20, 3, 17])
    mx.eval([cache.state for cache in batch])
    size = storage.arenas.planes[0][0].nbytes
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    for _ in range(3):
        mx.eval(model_of("dense")(mx.array([[5], [6], [7]]), cache=batch), [cache.state for cache in batch])
    assert mx.get_peak_memory() - held < size


def test_an_extracted_row_keeps_its_tokens_while_the_batch_goes_on():
    storage = storage_for("dense", 16)
    batch = batch_of(storage, [20, 5])
    row = [cache.extract(0) for cache in batch]
    mx.eval(model_of("dense")(mx.array([[5], [6]]), cache=batch))
    plain = make_prompt_cache(model_of("dense"))
    forward("dense", plain, TOKENS[:20])
    for mine, theirs in zip(row, plain, strict=True):
        assert mx.array_equal(mine.keys_and_values()[0], theirs.keys_and_values()[0])


@pytest.mark.parametrize("most", (1, 5))
def test_a_request_takes_the_blocks_that_it_is_promised(most: int):
    storage = storage_for("dense", 1)
    generator = BatchGenerator(model_of("dense"))
    generator.insert([TOKENS[:20]], [most], caches=[new_caches("dense", storage)])
    while not any(response.finish_reason for response in generator.next()[1]):
        pass
    assert storage.pool.peak == longest(20, most)


def test_a_draft_that_nobody_has_dropped_keeps_no_blocks():
    storage = storage_for("dense", 16)
    batch = batch_of(storage, [20])
    rollback = Rollback(batch, 4)
    batch.clear()  # as mlx-lm does when the last row has ended
    assert storage.pool.used == 0 and rollback.keep(1) is False


def test_a_split_batch_keeps_what_was_promised_to_its_rows():
    storage = storage_for("dense", 16)
    batch = batch_of(storage, [20, 5])
    batch[0].tables[0].reserve(3)
    moved = copy.deepcopy(batch)
    assert len({id(cache.tables[0]) for cache in moved}) == 1
    for cache in batch:
        cache.filter([1])
    for cache in moved:
        cache.filter([0])
    assert storage.pool.reserved == 3 and storage.pool.shared == 0
    moved[0].tables[0].extend(0, 16)
    assert storage.pool.reserved == 2
    del moved, cache
    assert storage.pool.reserved == 0


@pytest.mark.parametrize("tokens, window", ((1, None), (4, None), (1, 6), (4, 6)))
def test_masks_of_arrays_are_mlx_lms_own(tokens: int, window: int | None):
    storage = storage_for("dense", 16)
    (paged, *_) = batch_of(storage, [9, 4])
    plain = []
    for number, length in enumerate((9, 4)):
        plain.append(KVCache())
        plain[-1].update_and_fetch(*[mx.zeros((1, 2, length, 16))] * 2)
    theirs = BatchKVCache.merge(plain)
    options = {"window_size": window} if window is not None else {}
    assert mx.array_equal(paged.make_mask(tokens, return_array=True, **options), theirs.make_mask(tokens, return_array=True, **options))
    assert paged.offset.tolist() == theirs.offset.tolist()


def test_a_row_without_a_block_is_found_before_the_step_and_the_others_go_on():
    storage = storage_for("dense", 16, 0)  # 4 blocks
    batch = batch_of(storage, [16, 20, 9])
    pages = Pages(16, 0, Statistics())
    assert storage.pool.available == 0 and (short := pages.short(batch)) is not None
    row, refused = short
    assert (row, refused.status) == (0, 503) and "1 blocks of KV were needed and 0 of 4 were free" in str(refused)
    assert batch[0].lengths == batch[2].lengths == [16, 20, 9] and refused.__traceback__ is None
    for cache in batch:
        cache.filter([1, 2])
    assert pages.short(batch) is None
    mx.eval(model_of("dense")(mx.array([[5], [6]]), cache=batch))
    assert batch[0].lengths == batch[2].lengths == [21, 10] and storage.pool.used == 3


def test_what_is_promised_to_a_row_is_no_other_rows():
    storage = storage_for("dense", 16, 0)
    batch = batch_of(storage, [16, 32])
    batch[0].tables[0].reserve(1)
    assert storage.pool.available == 0 and Pages(16, 0, Statistics()).short(batch)[0] == 1  # type: ignore[index]
    for cache in batch:
        cache.filter([0])
    mx.eval(model_of("dense")(mx.array([[5]]), cache=batch))
    assert batch[0].lengths == [17] and storage.pool.reserved == 0


def test_a_block_that_was_found_is_the_rows_own():
    storage = storage_for("dense", 16, 0)
    batch = batch_of(storage, [32, 16])
    assert storage.pool.available == 1 and Pages(16, 0, Statistics()).short(batch)[0] == 1  # type: ignore[index]
    assert len(batch[0].tables[0].blocks) == 3 and storage.pool.available == 0 and batch[0].lengths == [32, 16]


def test_one_row_is_a_row_without_a_copy_and_of_a_kind():
    storage = storage_for("dense", 16)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:20])
    table = table_of(caches)
    rows = kinds.merge_row(caches)
    assert rows is not None and rows[0].tables == [table] and kinds.signatures(rows) == ["batch:kv:paged:16"] * 3
    assert kinds.kind_of(rows[0]).unwinds(rows[0], True) and not hasattr(rows[0], "bits")
