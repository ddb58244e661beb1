"""Who may begin, who waits and who is refused, by blocks, with a clock of the test's."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_hooks import Admission, ModelSource
from mlx_lm_tiered.paged import admission
from mlx_lm_tiered.paged.admission import PATIENCE, Blocks
from mlx_lm_tiered.paged.arenas import Arenas
from mlx_lm_tiered.paged.batch import BatchPagedKVCache
from mlx_lm_tiered.paged.cache import PagedKVCache, append
from mlx_lm_tiered.paged.pool import Pool
from mlx_lm_tiered.paged.scheme import Pages
from mlx_lm_tiered.paged.sides import Sides
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

    def make_room(self, enough: Any, choose: Any) -> bool:
        while not enough() and self.entries and (entry := choose(self.entries)) is not None:
            self.entries.remove(entry)
            entry.caches = []  # as `TieredPrefixCache.release`
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

    def admit(self, prompt: int, most: int, caches: list[Any] | None = None, cached: int = 0, preempted: int | None = None) -> Any:
        caches = self.caches(0) if caches is None else caches
        return self.blocks.admit(Admission(SOURCE, None, None, [1] * prompt, cached, caches, most, 2048, preempted=preempted)), caches

    def wait(self, prompt: int, most: int, preempted: int | None = None) -> Any:
        return self.blocks.wait(SOURCE, [1] * prompt, most, preempted)

    def row(self, prompt: int, most: int, preempted: int = 0) -> list[Any]:
        """A row that can leave the batch, prefilled."""
        refused, caches = self.admit(prompt, most, preempted=preempted)
        assert refused is None
        write(caches, prompt)
        return caches


def write(caches: list[Any], tokens: int) -> None:
    append(caches[0].table, 0, *[mx.ones((1, 1, tokens, 2))] * 2)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(admission, "FIRST", 8)
    monkeypatch.setattr(admission, "GROWTH", 8)
    return World()


def test_blocks_of_prompt_and_reply_are_promised_and_come_back(world):
    refused, caches = world.admit(9, 7)  # 16 tokens: a batch forwards the last one too
    assert refused is None and world.storage.pool.reserved == 4
    append(caches[0].table, 0, *[mx.ones((1, 1, 9, 2))] * 2)
    assert world.storage.pool.reserved == 1 and world.storage.pool.used == 3
    del caches
    assert world.storage.pool.reserved == world.storage.pool.used == 0


def test_a_prefix_of_others_is_promised_a_copy_of_its_last_block(world):
    entry = world.store(10)
    caches = [entry.caches[0].lent()]
    assert world.admit(14, 2, caches, cached=10)[0] is None  # 16 tokens: 4 blocks, 3 there, one of them to be copied
    assert world.storage.pool.reserved == 2
    whole = [entry.caches[0].lent(8)]
    assert world.admit(14, 2, whole, cached=8)[0] is None
    assert world.storage.pool.reserved == 4, "nothing of full blocks is copied"


def test_what_is_stored_makes_room(world):
    for _ in range(3):
        world.store(12)
    assert world.admit(20, 5)[0] is None and len(world.entries) < 3


def test_more_than_the_pool_is_refused_for_good_and_what_does_not_fit_now_for_a_while(world):
    refused, _ = world.admit(40, 2)
    assert refused.status == 400 and "take 11 blocks of 4 tokens, more than the 10 of the pool" in str(refused) and refused.retry_after is None
    first = world.admit(20, 8)
    assert first[0] is None
    refused, _ = world.admit(15, 1)
    assert (refused.status, refused.retry_after) == (503, 10) and "needs 4 blocks of 4 tokens, and 3 of the pool's 10 can be had" in str(refused)
    assert world.blocks.report()["refused_400"] == world.blocks.report()["refused_503"] == 1


def test_they_wait_in_line_and_go_when_they_fit(world):
    _, running = world.admit(20, 8)
    assert world.wait(7, 1) is None, "it fits"
    large, small = world.wait(19, 1), world.wait(3, 1)
    assert not large.step() and not small.step(), "none passes the one before it"
    del running
    world.now += 1
    assert large.step() and small.step() and world.blocks.report()["waiting"] == 0 and world.blocks.report()["waits"] == 2


def test_what_only_stored_prefixes_hold_counts_as_free_but_for_the_prefix_that_will_be_lent(world):
    entry = world.store(24)
    _, running = world.admit(7, 1)
    assert world.wait(31, 1) is None
    world.lent = entry, 24
    assert world.wait(31, 1) is None, "6 blocks are there, 2 more are free"
    assert world.wait(35, 1) is not None
    assert running


def test_patience_ends_and_who_waits_for_nothing_is_let_go(world):
    _, running = world.admit(20, 8)
    waiting = world.wait(19, 1)
    assert not waiting.step()
    world.now += PATIENCE
    assert waiting.step()
    lost = world.caches(4)  # held by nobody that is known, so what needs all blocks never fits
    beyond = world.wait(39, 1)
    assert not beyond.step()
    del running, lost
    world.now += 1
    assert beyond.step(), "no request has a block"
    busy = world.caches(4)
    gone = world.wait(39, 1)
    gone.cancel()
    assert busy and world.blocks.report()["waiting"] == 0


def test_who_waits_keeps_no_pool_of_a_model_that_goes(world):
    _, running = world.admit(20, 8)
    waiting = world.wait(19, 1)
    pool = weakref.ref(world.storage)
    world.pages.unloaded()
    del running, world.storage
    assert pool() is None and waiting.step(), "its model will be loaded for it"


def test_what_is_larger_than_the_pool_does_not_stand_in_the_line_of_others(world):
    _, running = world.admit(20, 8)
    assert world.wait(40, 1) is None, "it never fits, and is told so when it is admitted"
    assert world.wait(11, 1) is None, "this one fits"
    assert world.admit(40, 1)[0].status == 400 and running


def test_a_request_whose_lender_makes_room_has_no_copy_to_make(world):
    world.lent = world.store(10), 10
    assert world.wait(38, 2) is None, "all 10 blocks, 3 of them lent"
    caches = [world.entries[0].caches[0].lent()]
    world.lent = None
    assert world.admit(38, 2, caches, cached=10)[0] is None and not world.entries
    append(caches[0].table, 0, *[mx.ones((1, 1, 30, 2))] * 2)
    assert world.storage.pool.used == 10


def test_what_drafts_take_and_give_back_stays_promised(world):
    _, caches = world.admit(4, 12)
    append(caches[0].table, 0, *[mx.ones((1, 1, 4, 2))] * 2)
    for _ in range(5):
        append(caches[0].table, 0, *[mx.ones((1, 1, 5, 2))] * 2)
        caches[0].trim(4)
        caches[0].trim(1)
    assert (world.storage.pool.used, world.storage.pool.reserved) == (1, 3)
    other = world.admit(23, 1)
    assert other[0] is None and world.storage.pool.available == 0
    append(caches[0].table, 0, *[mx.ones((1, 1, 12, 2))] * 2)
    assert world.storage.pool.used == 4 and world.storage.pool.reserved == 6


def test_blocks_that_are_shared_with_others_are_not_promised_again_when_they_are_trimmed(world):
    _, caches = world.admit(8, 8)
    append(caches[0].table, 0, *[mx.ones((1, 1, 8, 2))] * 2)
    world.entries.append(Entry([caches[0].lent()]))
    caches[0].trim(4)
    pool = world.storage.pool
    assert (pool.used, pool.reserved, pool.free - pool.reserved) == (2, 2, 6)
    del caches
    world.entries.clear()
    assert pool.used == pool.reserved == 0


def test_a_prefix_that_is_stored_meanwhile_takes_nothing_of_what_is_promised(world):
    _, caches = world.admit(6, 10)
    append(caches[0].table, 0, *[mx.ones((1, 1, 6, 2))] * 2)
    world.entries.append(Entry([caches[0].lent()]))  # as of models with rings at the end of a message
    append(caches[0].table, 0, *[mx.ones((1, 1, 1, 2))] * 2)
    assert world.storage.pool.reserved == 2 and world.storage.pool.used == 3, "two are still to come, one was copied"
    other = world.admit(23, 1)
    assert other[0] is None and not world.entries, "the stored prefix made room"
    append(caches[0].table, 0, *[mx.ones((1, 1, 9, 2))] * 2)
    assert world.storage.pool.used == 4


def test_with_no_other_block_the_prefix_goes_and_nothing_is_copied(world):
    world.storage.pool.relieve = lambda missing: world.pages.relieve(world.storage, missing, True)
    _, caches = world.admit(6, 10)
    append(caches[0].table, 0, *[mx.ones((1, 1, 6, 2))] * 2)
    other = world.admit(23, 1)
    world.entries.append(Entry([caches[0].lent()]))
    append(caches[0].table, 0, *[mx.ones((1, 1, 10, 2))] * 2)
    assert other[0] is None and not world.entries and world.storage.pool.used == 4


def test_prefixes_whose_blocks_running_requests_share_stay_when_room_is_made(world):
    shared, other = world.store(8), world.store(8)
    running = [shared.caches[0].lent()]
    first = world.admit(21, 3)  # 6 blocks; 2 of the 10 are shared, 2 the other's
    assert first[0] is None and world.entries == [shared, other], "there was room"
    assert world.admit(7, 1)[0] is None and world.entries == [shared] and running


def test_prefixes_that_only_share_with_each_other_go_together(world):
    world.store(16)
    world.entries.append(Entry([world.entries[0].caches[0].lent()]))
    assert world.admit(35, 5)[0] is None and world.entries == []


def test_what_would_not_be_enough_is_not_let_go(world):
    first, second = world.store(8), world.store(8)
    _, running = world.admit(20, 4)
    assert world.admit(20, 4)[0].status == 503 and world.entries == [first, second]
    assert world.pages.adopted(SOURCE.path, restored(20)) is None and world.entries == [first, second] and running


def restored(tokens: int) -> list[Any]:
    """What came from disk; each token has its place as a number."""
    plain = KVCache()
    plain.update_and_fetch(*[mx.arange(tokens, dtype=mx.float32)[None, None, :, None] * mx.ones((1, 1, 1, 2))] * 2)
    return [plain]


def test_what_is_restored_shares_the_blocks_of_its_prefix_that_is_there(world):
    (there,) = world.pages.adopted(SOURCE.path, restored(10))
    world.entries.append(Entry([there]))
    lost = world.caches(16)
    (longer,) = world.pages.adopted(SOURCE.path, restored(18), world.entries[0], 10)
    assert longer.table.blocks[:2] == there.table.blocks[:2] and world.storage.pool.used == 3 + 4 + 3
    assert longer.offset == 18 and longer.keys[0, 0, :, 1].tolist() == list(range(18))
    assert world.pages.adopted(SOURCE.path, restored(14), world.entries[0], 10) is None, "two blocks more are needed" and lost


def test_what_is_restored_keeps_the_blocks_that_make_room_for_it(world):
    (there,) = world.pages.adopted(SOURCE.path, restored(10))
    world.entries.append(Entry([there]))
    del there
    lost = world.caches(16)
    (longer,) = world.pages.adopted(SOURCE.path, restored(22), world.entries[0], 10)
    assert world.entries == [] and world.storage.pool.used == 10 and longer.keys[0, 0, :, 0].tolist() == list(range(22)) and lost


def test_caches_that_are_not_paged_are_no_concern_of_it(world):
    assert world.admit(400, 400, [KVCache()])[0] is None
    assert world.blocks.wait(ModelSource(path=Path("/models/other")), [1], 9) is None


def batch(*rows: list[Any]) -> list[Any]:
    return [BatchPagedKVCache([row[0].table for row in rows], 0)]


def test_a_row_that_can_leave_is_promised_the_beginning_of_its_reply_and_then_more(world):
    row = world.row(6, 30)
    assert (world.storage.pool.used, world.storage.pool.reserved) == (2, 2), "6 and 8 tokens"
    assert world.blocks.room(batch(row)) == 10, "all 16 of 4 blocks"
    write(row, 10)
    assert world.blocks.room(batch(row)) == 8 and world.storage.pool.reserved == 2
    write(row, 8)
    assert world.blocks.room(batch(row)) == 8
    write(row, 7)
    assert world.blocks.room(batch(row)) == 1
    write(row, 1)
    assert world.blocks.room(batch(row)) == 4, "9 blocks are all that it can need"
    write(row, 4)
    assert row[0].offset == 36 and world.storage.pool.used == 9 and world.storage.pool.reserved == 0
    assert world.blocks.report()["preempted"] == 0


def test_a_short_bound_and_what_cannot_leave_are_promised_whole(world):
    row = world.row(6, 3)
    assert world.storage.pool.reserved == 1 and world.blocks.room(batch(row)) == 6
    refused, whole = world.admit(6, 18)
    assert refused is None and world.storage.pool.reserved == 1 + 6 and whole


def test_stored_prefixes_go_before_a_row_does(world):
    world.store(12)
    rows = world.row(7, 25), world.row(7, 25)
    write(rows[0], 9)
    write(rows[1], 9)
    while world.blocks.room(batch(*rows)):
        for row in rows:
            write(row, 1)
    assert world.entries == [] and world.storage.pool.free == 0 and world.blocks.report()["preempted"] == 1
    assert rows[0][0].offset == rows[1][0].offset == 20


def test_a_row_that_leaves_gives_room_and_comes_back_first_with_twice_the_promise(world):
    old, young = world.row(8, 30), world.row(8, 20)
    write(old, 8)
    write(young, 8)
    while world.blocks.room(batch(old, young)):
        write(old, 1)
    new = world.wait(4, 4, preempted=0)
    assert not new.step()
    young.clear()
    assert world.blocks.room(batch(old)) > 0
    back = world.wait(17, 11, preempted=1)
    assert back is not None and world.blocks.report()["waits"] == 1, "17 and 11 tokens, of which 16 are promised"
    world.now += PATIENCE - 1
    assert not back.step() and not new.step(), "one block would do for the new one, but it is behind"
    world.now += 2 * PATIENCE
    assert not back.step(), "it was served before, and waits as long as it takes"
    old.clear()
    world.now += 1
    assert back.step() and new.step()
    returned = world.row(17, 11, preempted=1)
    assert world.storage.pool.used + world.storage.pool.reserved == 7 and world.blocks.room(batch(returned)) == 28 - 17


def test_one_that_comes_back_and_fits_passes_those_that_wait(world):
    _, running = world.admit(20, 8)
    assert world.wait(19, 1) is not None and running
    assert world.wait(5, 3, preempted=1) is None


def test_the_oldest_row_alone_gets_all_there_is(world):
    row = world.row(10, 30)
    world.store(8)
    while row[0].offset < 40:
        assert world.blocks.room(batch(row)) > 0
        write(row, 1)
    assert world.storage.pool.used == 10 and world.entries == [] and world.blocks.report()["preempted"] == 0


def test_a_block_that_was_stored_meanwhile_is_no_room(world):
    row = world.row(6, 30)
    assert world.blocks.room(batch(row)) == 10
    world.entries.append(Entry([row[0].lent()]))
    assert world.blocks.room(batch(row)) == 6


def test_a_row_that_was_promised_all_and_lost_a_block_to_a_copy_has_another_or_leaves(world):
    row = world.row(6, 2)
    world.entries.append(Entry([row[0].lent()]))
    lost = world.caches(32)
    assert world.blocks.room(batch(row)) == 0 and world.blocks.report()["preempted"] == 1
    del lost
    assert world.blocks.room(batch(row)) == 2 and world.storage.pool.reserved == 1, "one block is for the copy"


def test_drafts_of_a_row_that_is_alone_have_room_beside_what_it_keeps(world):
    world.blocks._drafts = 5
    row = world.row(6, 30)
    assert world.blocks.room(batch(row)) == 5 and world.storage.pool.reserved == 2
    write(row, 5)
    assert world.blocks.room(batch(row)) == 8, "5 tokens were left of those promised, and 8 more are"
    write(row, 13)
    row[0].trim(5)
    assert row[0].offset == 19
