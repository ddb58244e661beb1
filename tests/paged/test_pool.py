"""The pool against a model of it: nothing is lost, freed twice, counted wrongly or given to two; exhaustion says its numbers."""

from __future__ import annotations

import gc
import os
import threading

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_lm_tiered.paged.arenas import Arenas
from mlx_lm_tiered.paged.pool import Pool, PoolExhausted
from mlx_lm_tiered.paged.sides import Sides
from mlx_lm_tiered.paged.table import Storage, Table

LAYERS = 2
EXAMPLES = int(os.environ.get("MLX_LM_TIERED_EXAMPLES", "60"))


def storage(blocks: int, block: int) -> Storage:
    return Storage(Pool(blocks), Arenas([Sides(1, 2, 3, mx.float32, mx.float16)] * LAYERS, blocks, block))


def test_blocks_come_in_ascending_runs_and_grow_where_they_end():
    pool = Pool(16)
    first = pool.take(4)
    assert first == [0, 1, 2, 3]
    second = pool.take(2)
    assert second == [9, 10], "in the middle of what is free, so that both can grow"
    assert pool.take(3, after=3) == [4, 5, 6]
    assert pool.take(2, after=10) == [11, 12]


def test_what_is_freed_last_is_taken_first_where_there_is_no_run():
    pool = Pool(6)
    assert pool.take(6) == [0, 1, 2, 3, 4, 5]
    for block in (4, 0, 2):
        pool.let_go([block])
    assert pool.take(2) == [2, 0]


def test_exhaustion_says_what_was_needed_and_what_was_there():
    pool = Pool(5)
    pool.take(3)
    with pytest.raises(PoolExhausted) as caught:
        pool.take(4)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (4, 2, 5)
    assert pool.used == 3 and pool.take(2) == [3, 4]


def test_reserved_blocks_are_only_for_who_has_the_reservation():
    pool = Pool(4)
    pool.reserve(3)
    assert (pool.free, pool.available) == (4, 1)
    with pytest.raises(PoolExhausted) as caught:
        pool.take(2)
    assert caught.value.free == 1
    assert len(pool.take(4, promised=3)) == 4 and pool.reserved == 0
    with pytest.raises(PoolExhausted):
        pool.reserve(1)


def test_a_free_block_can_neither_be_freed_nor_shared():
    pool = Pool(2)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([1])
    pool.let_go([1])
    with pytest.raises(ValueError, match="freed again"):
        _ = pool.used


def test_blocks_that_another_thread_is_taking_back_are_waited_for():
    """`/stats` settles on its own thread: nothing may be short, or counted twice, while it does."""
    pool, begun, go_on = Pool(4), threading.Event(), threading.Event()
    blocks = pool.take(4)

    class Slowly(list):
        def __iter__(self):
            begun.set()
            go_on.wait(10)
            return super().__iter__()

    pool.let_go(Slowly(blocks))
    looks = threading.Thread(target=lambda: pool.used)
    looks.start()
    begun.wait(10)
    threading.Timer(0.2, go_on.set).start()
    assert len(pool.take(4)) == 4
    looks.join()
    assert pool.used == 4


def test_relief_is_asked_for_what_is_missing_before_a_pool_is_exhausted():
    pool, asked = Pool(4), []
    held = pool.take(3)

    def relieve(missing: int) -> None:
        asked.append(missing)
        pool.let_go(held)

    pool.relieve = relieve
    assert len(pool.take(3)) == 3 and asked == [2]


class Sharing(RuleBasedStateMachine):
    """Tables that grow, are trimmed, forked and dropped. A table's own tokens are the model; each layer must read them back."""

    @initialize(blocks=st.integers(1, 12), block=st.integers(1, 4))
    def begin(self, blocks: int, block: int):
        self.storage = storage(blocks, block)
        self.tables: list[tuple[Table, list[int]]] = []
        self.fresh = 0
        self.seen: dict[int, list[int]] = {}  # versions of tables, and their blocks
        self.new()
        self.write(0, block + 1)

    @rule()
    def new(self):
        if len(self.tables) < 5:
            table = Table(self.storage)
            table.lengths = [0] * LAYERS
            self.tables.append((table, []))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), count=st.integers(1, 9))
    def write(self, which: int, count: int):
        table, tokens = self.tables[which % len(self.tables)]
        self.fresh += count
        new = list(range(self.fresh - count, self.fresh))
        blocks = list(table.blocks)
        try:
            for layer in range(LAYERS):
                start = table.extend(layer, count)
                assert start == len(tokens)
                keys = mx.array(new, mx.float32).reshape(1, 1, -1, 1) * mx.ones((1, 1, 1, 2))
                values = mx.broadcast_to(keys[..., :1] + layer, (1, 1, count, 3)).astype(mx.float16)
                self.storage.arenas.write(layer, table.slots(start, start + count), (keys, values))
            tokens += new
        except PoolExhausted as error:
            assert layer == 0, "other layers find the blocks that the first one took"
            assert error.needed > error.free and error.total == self.storage.pool.total
            # A block of its own may have been made already, which changes nothing that can be read.
            assert table.lengths == [len(tokens)] * LAYERS and len(table.blocks) == len(blocks)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), count=st.integers(0, 9))
    def trim(self, which: int, count: int):
        table, tokens = self.tables[which % len(self.tables)]
        for layer in range(LAYERS):
            assert table.trim(layer, count) == min(count, len(tokens))
        del tokens[max(0, len(tokens) - count) :]

    @precondition(lambda self: self.tables and len(self.tables) < 5)
    @rule(which=st.integers(0, 9), part=st.floats(0, 1))
    def fork(self, which: int, part: float):
        table, tokens = self.tables[which % len(self.tables)]
        length = round(part * len(tokens))
        forks = [table.fork(layer, length) for layer in range(LAYERS)]
        assert all(made is forks[0] for made in forks)
        self.tables.append((forks[0], tokens[:length]))

    @precondition(lambda self: self.tables and len(self.tables) < 5)
    @rule(which=st.integers(0, 9), cut=st.integers(0, 3), count=st.integers(1, 5), first=st.booleans())
    def diverge(self, which: int, cut: int, count: int, first: bool):
        """A fork, and other tokens behind what it shares, by the lender first or by the borrower."""
        which %= len(self.tables)
        tokens = len(self.tables[which][1])
        self.fork(which, max(0, tokens - cut) / max(1, tokens))
        self.write(which if first else len(self.tables) - 1, count)
        self.write(len(self.tables) - 1 if first else which, count)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9))
    def drop(self, which: int):
        del self.tables[which % len(self.tables)]

    @invariant()
    def counts_are_exact(self):
        if not hasattr(self, "tables"):
            return
        pool = self.storage.pool
        holders = [block for table, _ in self.tables for block in table.blocks]
        assert pool.used == len(set(holders)) and pool.free == pool.total - pool.used
        assert all(pool.count(block) == holders.count(block) for block in range(pool.total))
        assert pool.shared == sum(holders.count(block) > 1 for block in set(holders))
        for table, tokens in self.tables:
            assert len(table.blocks) == self.storage.blocks_for(len(tokens)), "no block more than the tokens take"

    @invariant()
    def every_table_reads_its_own_tokens(self):
        for table, tokens in getattr(self, "tables", ()):
            for layer in range(LAYERS if tokens else 0):
                keys, values = self.storage.arenas.read(layer, table.slots(0, len(tokens)))
                assert keys[0, 0, :, 0].tolist() == tokens
                assert values[0, 0, :, 2].tolist() == [t + layer for t in tokens]

    @invariant()
    def what_is_remembered_of_blocks_is_of_these(self):
        for table, tokens in getattr(self, "tables", ()):
            blocks = table.blocks
            assert table.breaks == [place for place in range(1, len(blocks)) if blocks[place] != blocks[place - 1] + 1]
            assert table.in_one_run(0) == (len(table.slots(0, len(tokens))) <= 1)
            assert self.seen.setdefault(table.version, list(blocks)) == blocks

    def teardown(self):
        if hasattr(self, "tables"):
            self.tables.clear()
            gc.collect()
            assert self.storage.pool.used == 0


Sharing.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
TestSharing = Sharing.TestCase
