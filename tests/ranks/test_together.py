"""What ranks agree on, without processes: several prefix caches in lock step, one thread a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_lm_hooks import ModelSource, Taken
from mlx_lm_tiered.prefix.ram import RamTier
from mlx_lm_tiered.prefix.tiers import TieredPrefixCache
from mlx_lm_tiered.prefix.together import ROUNDS, Together
from mlx_lm_tiered.statistics import Statistics

MODEL = ModelSource(key="m")


class Exchange:
    """A collective between threads."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size, timeout=10)
        self._slots: list[list[int]] = [[] for _ in range(size)]
        self.rounds = 0

    def gather(self, rank: int) -> Callable[[Sequence[int]], list[list[int]]]:
        def gather(numbers: Sequence[int]) -> list[list[int]]:
            self._slots[rank] = list(numbers)
            self._barrier.wait()
            found = [list(slot) for slot in self._slots]
            if rank == 0:
                self.rounds += 1
            self._barrier.wait()
            return found

        return gather


def all_ranks(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each on a thread; what they return."""
    results: list[Any] = [None] * len(works)

    def run(at: int) -> None:
        results[at] = works[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return results


def agree(*given: list[int]) -> tuple[list[int], int]:
    """The lengths that ranks use, each of which has entries of exactly `given` tokens; and the gathers."""
    exchange = Exchange(len(given))

    def rank(at: int) -> int:
        def offer(most: int | None) -> Taken | None:
            usable = [length for length in given[at] if most is None or length <= most]
            return Taken([], max(usable)) if usable else None

        taken = Together(exchange.gather(at)).take(offer)
        return taken.length if taken is not None else 0

    return all_ranks([lambda at=at: rank(at) for at in range(len(given))]), exchange.rounds


@pytest.mark.parametrize(
    ("given", "agreed", "rounds"),
    [
        (([7], [7]), 7, 1),
        (([7], []), 0, 1),
        (([9, 5], [7, 5]), 5, 3),
        (([9, 7], [7]), 7, 2),
        (([9], [7]), 0, 2),
        (([9, 4], [9, 6, 4], [4]), 4, 2),
    ],
)
def test_all_use_the_longest_that_all_have(given: tuple[list[int], ...], agreed: int, rounds: int):
    lengths, gathers = agree(*given)
    assert lengths == [agreed] * len(given)
    assert gathers == rounds


def test_ranks_that_never_meet_give_up_together():
    lengths, gathers = agree(list(range(1, 100, 2)), list(range(2, 100, 2)))
    assert lengths == [0, 0] and gathers == ROUNDS


def filled(length: int, kind: str = "plain") -> list[Any]:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, length, 4)), mx.ones((1, 1, length, 4)))
    if kind == "plain":
        return [cache]
    state = ArraysCache(1)
    state[0] = mx.ones((1, 2, 4))
    return [cache, state]


class Rank:
    """One rank's prefix cache."""

    def __init__(self, exchange: Exchange, at: int):
        self.statistics = Statistics()
        self.cache = TieredPrefixCache(RamTier(1 << 30), None, self.statistics, lambda source: source)
        self.cache.together = Together(exchange.gather(at))


@pytest.fixture
def ranks() -> list[Rank]:
    exchange = Exchange(2)
    return [Rank(exchange, at) for at in range(2)]


def take(ranks: list[Rank], tokens: list[int]) -> list[int]:
    taken = all_ranks([lambda rank=rank: rank.cache.take(MODEL, tokens) for rank in ranks])
    for one in taken:
        assert one is None or all(cache.offset == one.length for cache in one.caches if isinstance(cache, KVCache))
    return [one.length if one is not None else 0 for one in taken]


def test_the_longer_one_is_cut_where_it_can_be(ranks: list[Rank]):
    ranks[0].cache.put(MODEL, list(range(20)), filled(20))
    ranks[1].cache.put(MODEL, list(range(12)), filled(12))
    assert take(ranks, list(range(30))) == [12, 12]
    assert ranks[0].cache.together.report() == {"agreed": 1, "shortened": 1, "given_up": 0, "rounds": 2}


def test_recurrent_state_is_never_cut(ranks: list[Rank]):
    ranks[0].cache.put(MODEL, list(range(20)), filled(20, "hybrid"))
    ranks[1].cache.put(MODEL, list(range(12)), filled(12))
    assert take(ranks, list(range(30))) == [0, 0]
    # An entry of the right length will do.
    ranks[0].cache.put(MODEL, list(range(12)), filled(12, "hybrid"))
    assert take(ranks, list(range(30))) == [12, 12]


def test_an_entry_that_one_rank_lacks_is_nobodys(ranks: list[Rank]):
    ranks[0].cache.put(MODEL, list(range(20)), filled(20))
    assert take(ranks, list(range(30))) == [0, 0]
    assert [rank.statistics.report()["misses"] for rank in ranks] == [1, 1]


def test_a_fault_of_one_rank_is_a_miss_for_all_and_no_wait(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    for rank in ranks:
        rank.cache.put(MODEL, list(range(20)), filled(20))

    def broken(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(ranks[1].cache, "_offered", broken)
    assert take(ranks, list(range(30))) == [0, 0]
    monkeypatch.undo()
    assert take(ranks, list(range(30))) == [20, 20]


def test_a_prefix_is_not_cut_inside_an_image(ranks: list[Rank]):
    tokens = [1, 2, 3, -7, -7, -7, -7, 4, 5, 6]
    ranks[0].cache.put(MODEL, tokens, filled(10))
    ranks[1].cache.put(MODEL, tokens[:5], filled(5))
    assert take(ranks, [*tokens, 8]) == [3, 3]
