"""Paged caches give the numbers of plain ones, bit for bit, and share what they have in common."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from paged_models import TOKENS, WITH_FULL_ATTENTION, address, forward, model_of, new_caches, storage_for, table_of

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.paged.pool import PoolExhausted
from support.cache_bytes import through_bytes

BLOCKS = (1, 16, 256)


def equal(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and np.array(a).tobytes() == np.array(b).tobytes()


def scatter_blocks(storage) -> list:
    """Take blocks in the way, so that nothing is one run; what keeps them."""
    held = storage.pool.take(storage.pool.total)
    storage.pool.let_go(held[::2])
    return held[1::2]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", WITH_FULL_ATTENTION)
def test_logits_are_those_of_plain_caches_around_every_border(name: str, block: int):
    storage = storage_for(name, block)
    plain, paged = make_prompt_cache(model_of(name)), new_caches(name, storage)
    at = 0
    for chunk in (15, 1, 1, 15, 1, 223, 1, 1, 20):  # to 15, 16, 17, 32, 33, 256, 257, 258 and 278 tokens
        tokens = TOKENS[at : at + chunk]
        assert equal(forward(name, plain, tokens), forward(name, paged, tokens)), (at, chunk)
        at += chunk
    assert storage.pool.used == -(-at // block)
    assert len(table_of(paged).slots(0, at)) == 1, "read without gathering"
    del paged
    assert storage.pool.used == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ("dense", "nested", "sliding"))
def test_logits_are_the_same_where_blocks_lie_apart(name: str, block: int):
    storage = storage_for(name, block)
    held = scatter_blocks(storage)
    plain, paged = make_prompt_cache(model_of(name)), new_caches(name, storage)
    for tokens in (TOKENS[:258], TOKENS[258:259], TOKENS[259:280], TOKENS[280:281]):
        assert equal(forward(name, plain, tokens), forward(name, paged, tokens))
    assert len(table_of(paged).slots(0, 281)) > 1
    storage.pool.let_go(held)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cut", (1, 2, 17, 33))
def test_trimmed_tokens_go_and_others_take_their_place(block: int, cut: int):
    storage = storage_for("dense", block)
    plain, paged = make_prompt_cache(model_of("dense")), new_caches("dense", storage)
    for caches in (plain, paged):
        forward("dense", caches, TOKENS[:257])
        for cache in caches:
            assert cache.trim(cut) == cut
    assert storage.pool.used == -(-(257 - cut) // block), "tail blocks are freed"
    for tokens in (TOKENS[300:320], TOKENS[320:321]):
        assert equal(forward("dense", plain, tokens), forward("dense", paged, tokens))


@pytest.mark.parametrize("name, block", [(name, block) for name in WITH_FULL_ATTENTION for block in (BLOCKS if name == "dense" else (16,))])
@pytest.mark.parametrize("length", (32, 33))
def test_forks_share_blocks_until_they_diverge(name: str, block: int, length: int):
    storage = storage_for(name, block)
    lender = new_caches(name, storage)
    forward(name, lender, TOKENS[:length])
    plain = make_prompt_cache(model_of(name))
    forward(name, plain, TOKENS[:length])
    before = storage.pool.used
    forks = [kinds.lend(lender) for _ in range(3)]
    assert storage.pool.used == before and storage.pool.shared == before
    for number, fork in enumerate(forks):
        own = kinds.lend(plain)
        for tokens in (TOKENS[100 + number : 120 + number], TOKENS[200 + number : 201 + number]):
            assert equal(forward(name, own, tokens), forward(name, fork, tokens))
    # What the lender has is what it had.
    assert equal(forward(name, plain, TOKENS[50:60]), forward(name, lender, TOKENS[50:60]))
    tail = length % block != 0  # a block that is not full is copied by each that writes into it
    assert storage.pool.used <= length // block + 4 * ((21 // block + 2) if tail or block == 1 else 21 // block + 1)
    del lender, fork, forks
    assert storage.pool.used == 0


def test_a_step_writes_into_the_arena_and_copies_none_of_it():
    storage = storage_for("dense", 16, 4000)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:100])
    arena = storage.arenas.planes[0][0]
    before, size = address(arena), arena.nbytes
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    for token in TOKENS[100:104]:
        forward("dense", caches, [token])
    assert address(storage.arenas.planes[0][0]) == before
    assert mx.get_peak_memory() - held < size, "no arena was copied"


def test_a_fork_that_diverges_copies_a_block_and_not_the_arena():
    storage = storage_for("dense", 16, 4000)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:100])
    fork = kinds.lend(caches, 90)
    before, size = address(storage.arenas.planes[1][1]), storage.arenas.planes[1][1].nbytes
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    forward("dense", fork, TOKENS[200:203])
    assert address(storage.arenas.planes[1][1]) == before and mx.get_peak_memory() - held < size


def test_a_deep_copy_is_a_fork():
    storage = storage_for("dense", 16)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:40])
    copied = copy.deepcopy(caches)
    assert table_of(copied) is not table_of(caches) and storage.pool.used == 3
    assert all(cache.table is table_of(copied) for cache in copied)


def test_what_is_dumped_is_what_a_plain_cache_dumps_and_either_is_restored_as_one():
    storage = storage_for("dense", 16)
    plain, paged = make_prompt_cache(model_of("dense")), new_caches("dense", storage)
    for caches in (plain, paged):
        forward("dense", caches, TOKENS[:50])
    theirs, ours = kinds.dump(plain), kinds.dump(paged)
    assert ours.descriptors == theirs.descriptors and kinds.stored_signatures(paged) == kinds.signatures(plain)
    assert list(ours.tensors) == list(theirs.tensors)
    for name, tensor in ours.tensors.items():
        assert (tensor.array.shape, tensor.array.dtype, tensor.array.nbytes) == (theirs.tensors[name].array.shape, mx.float32, theirs.tensors[name].array.nbytes)
        assert tensor.grow_axis == theirs.tensors[name].grow_axis
        assert equal(kinds.made(tensor.array), theirs.tensors[name].array)
    restored = through_bytes(paged)
    assert all(type(cache) is KVCache for cache in restored)
    assert equal(forward("dense", restored, TOKENS[60:70]), forward("dense", plain, TOKENS[60:70]))


def test_reading_for_the_disk_leaves_no_handle_on_an_arena():
    storage = storage_for("dense", 16, 4000)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:50])
    dumped = kinds.dump(kinds.lend(caches))
    kept = [kinds.made(tensor.array) for tensor in list(dumped.tensors.values())[:2]]
    before = address(storage.arenas.planes[0][0])
    forward("dense", caches, TOKENS[50:51])
    assert address(storage.arenas.planes[0][0]) == before and kept
    # What is read afterwards is what was there: the writer has blocks of its own now.
    last = kinds.made(dumped.tensors["2.keys"].array)
    plain = make_prompt_cache(model_of("dense"))
    forward("dense", plain, TOKENS[:50])
    assert equal(last, plain[2].keys[:, :, :50])


def test_the_newest_tokens_can_be_read_alone():
    storage = storage_for("dense", 16)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:50])
    for tensor in kinds.dump(caches).tensors.values():
        assert equal(kinds.since(tensor.array, tensor.grow_axis, 21), kinds.made(tensor.array)[:, :, 21:])
        assert equal(kinds.since(kinds.made(tensor.array), tensor.grow_axis, 21), kinds.made(tensor.array)[:, :, 21:])


def test_a_pool_that_is_too_small_says_so_and_the_cache_keeps_what_it_had():
    storage = storage_for("dense", 16, 0)
    caches = new_caches("dense", storage)
    forward("dense", caches, TOKENS[:40])
    with pytest.raises(PoolExhausted, match="2 blocks of KV were needed and 1 of 4 were free"):
        forward("dense", caches, TOKENS[40:80])
    assert kinds.length(caches) == 40 and storage.pool.used == 3


def test_a_cache_of_paging_answers_as_a_kind():
    storage = storage_for("dense", 16)
    caches = new_caches("dense", storage)
    assert kinds.signatures(caches) == ["kv:paged:16"] * 3 and kinds.length(caches) is None
    forward("dense", caches, TOKENS[:20])
    assert kinds.length(caches) == 20 and kinds.can_cut(caches, 7) and not kinds.can_cut(caches, 21) and kinds.stay_cuttable(caches)
    assert kinds.nbytes(caches) == sum(kinds.shared(caches).values()) == 2 * storage.arenas.block_bytes
    assert kinds.shared(kinds.lend(caches, 16)).items() < kinds.shared(caches).items()
