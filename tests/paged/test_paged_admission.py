"""Who may begin, who waits and who is refused, by blocks, with a clock of the test's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_hooks import Admission, ModelSource
from mlx_lm_tiered.paged.admission import PATIENCE, Blocks
from mlx_lm_tiered.paged.arenas import Arenas, Sides
from mlx_lm_tiered.paged.cache import PagedKVCache, append
from mlx_lm_tiered.paged.pool import Pool
from mlx_lm_tiered.paged.scheme import Pages
from mlx_lm_tiered.paged.table import Storage, Table
from mlx_lm_tiered.statistics import Statistics

SOURCE = ModelSource(path=Path("/models/one"))


class Entry:
    def __init__(self, caches: list[Any]):
        self.caches = caches


class World:
    """A pool of 10 blocks of 4 tokens, of a model with one layer."""

    def __init__(self) -> None:
        self.pages = Pages(4, 0, Statistics())
        self.storage = Storage(Pool(10), Arenas([Sides(1, 2, 2, mx.float32, mx.float32)], 10, 4))
        self.pages.storages[SOURCE.path] = self.storage
        self.entries: list[Entry] = []
        self.now = 0.0
        self.lent: tuple[Entry, int] | None = None
        self.blocks = Blocks(self.pages, lambda: self.entries, self.make_room, lambda source, tokens: self.lent, lambda: self.now)

    def make_room(self, enough: Any) -> bool:
        while not enough() and self.entries:
            self.entries.pop(0)
        return enough()

    def caches(self, tokens: int) -> list[Any]:
        table = Table(self.storage)
        if tokens:
            numbers = mx.ones((1, 1, tokens, 2))
            append(table, 0, numbers, numbers)
        return [PagedKVCache(table, 0)]

    def store(self, tokens: int) -> Entry:
        self.entries.append(Entry(self.caches(tokens)))
        return self.entries[-1]

    def admit(self, prompt: int, most: int, caches: list[Any] | None = None, cached: int = 0) -> Any:
        caches = self.caches(0) if caches is None else caches
        return self.blocks.admit(Admission(SOURCE, None, None, [1] * prompt, cached, caches, most, 2048)), caches

    def wait(self, prompt: int, most: int) -> Any:
        return self.blocks.wait(SOURCE, [1] * prompt, most)


@pytest.fixture
def world() -> World:
    return World()


def test_blocks_of_prompt_and_reply_are_promised_and_come_back(world):
    refused, caches = world.admit(9, 8)  # 16 tokens: the last one is not forwarded
    assert refused is None and world.storage.pool.reserved == 4
    append(caches[0].table, 0, *[mx.ones((1, 1, 9, 2))] * 2)
    assert world.storage.pool.reserved == 1 and world.storage.pool.used == 3
    del caches
    assert world.storage.pool.reserved == world.storage.pool.used == 0


def test_a_prefix_of_others_is_promised_a_copy_of_its_last_block(world):
    entry = world.store(10)
    caches = [entry.caches[0].lent()]
    assert world.admit(14, 3, caches, cached=10)[0] is None  # 16 tokens: 4 blocks, 3 there, one of them to be copied
    assert world.storage.pool.reserved == 2
    whole = [entry.caches[0].lent(8)]
    assert world.admit(14, 3, whole, cached=8)[0] is None
    assert world.storage.pool.reserved == 4, "nothing of full blocks is copied"


def test_what_is_stored_makes_room(world):
    for _ in range(3):
        world.store(12)
    assert world.admit(20, 5)[0] is None and len(world.entries) < 3


def test_more_than_the_pool_is_refused_for_good_and_what_does_not_fit_now_for_a_while(world):
    refused, _ = world.admit(40, 2)
    assert refused.status == 400 and "take 11 blocks of 4 tokens, more than the 10 of the pool" in str(refused) and refused.retry_after is None
    first = world.admit(20, 9)
    assert first[0] is None
    refused, _ = world.admit(16, 1)
    assert (refused.status, refused.retry_after) == (503, 10) and "needs 4 blocks of 4 tokens, and 3 of the pool's 10 can be had" in str(refused)
    assert world.blocks.report()["refused_400"] == world.blocks.report()["refused_503"] == 1


def test_they_wait_in_line_and_go_when_they_fit(world):
    _, running = world.admit(20, 9)
    assert world.wait(8, 1) is None, "it fits"
    large, small = world.wait(20, 1), world.wait(4, 1)
    assert not large.step() and not small.step(), "none passes the one before it"
    del running
    world.now += 1
    assert large.step() and small.step() and world.blocks.report()["waiting"] == 0 and world.blocks.report()["waits"] == 2


def test_what_only_stored_prefixes_hold_counts_as_free_but_for_the_prefix_that_will_be_lent(world):
    entry = world.store(24)
    _, running = world.admit(8, 1)
    assert world.wait(32, 1) is None
    world.lent = entry, 24
    assert world.wait(32, 1) is None, "6 blocks are there, 2 more are free"
    assert world.wait(36, 1) is not None
    assert running


def test_patience_ends_and_who_waits_for_nothing_is_let_go(world):
    _, running = world.admit(20, 9)
    waiting = world.wait(20, 1)
    assert not waiting.step()
    world.now += PATIENCE
    assert waiting.step()
    beyond = world.wait(100, 1)
    del running
    world.now += 1
    assert beyond.step(), "no request has a block: it can never fit, and is told so when it is admitted"
    gone = world.wait(100, 1)
    gone.cancel()
    assert world.blocks.report()["waiting"] == 0


def test_caches_that_are_not_paged_are_no_concern_of_it(world):
    assert world.admit(400, 400, [KVCache()])[0] is None
    assert world.blocks.wait(ModelSource(path=Path("/models/other")), [1], 9) is None
