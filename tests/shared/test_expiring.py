"""What is old or too much goes, nothing that somebody needs; the store down or slow costs no more than a wait that is bounded."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from cold_helpers import FINGERPRINT, restore
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.shared import tier
from mlx_lm_tiered.shared.breaker import Breaker
from mlx_lm_tiered.shared.cleaning import DAY, Cleaning
from mlx_lm_tiered.shared.objects import StoreFailed
from mlx_lm_tiered.shared.rates import LEAST, MOST, PAYS, patience
from shared_helpers import NAMES, POOL, TOKENS, conversation, entry_of, everything, push
from support.waiting import until

OTHER = [*TOKENS[:500], *range(2000, 2400)]  # begins like TOKENS


def cleaning(objects, max_bytes=0, ttl=0.0, in_days=0.0):
    return Cleaning(objects, NAMES.team, POOL, max_bytes, ttl, lambda: time.time() + in_days * DAY)


@pytest.fixture
def two(machine, objects):
    """A store with two entries that begin alike, the second one uploaded later."""
    a = machine("a")
    for tokens, seed in ((TOKENS, 0), (OTHER, 1)):
        conversation(a.cold, 900, tokens=tokens, seed=seed)
        push(objects, a.cold, tokens)
        time.sleep(0.01)
    return objects


def test_nothing_goes_that_is_young_and_fits(two):
    before = everything(two)
    assert cleaning(two, max_bytes=1 << 30, ttl=30 * DAY).clean().gone == 0
    assert everything(two) == before


def test_what_was_not_used_for_long_goes_and_its_heir_is_found(two, machine):
    two.put(NAMES.place("uses", "0" * 32), b"")
    later = cleaning(two, ttl=30 * DAY, in_days=31)
    assert later.clean(dry_run=True).gone == 2 and len(everything(two)) == 13
    use = NAMES.place("uses", entry_name(OTHER))
    two.put(use, b"")
    # The use is of today, by a clock that is 31 days ahead.
    files = two.files

    def used_today(folder):
        for listed in files(folder):
            yield listed._replace(when=listed.when + 31 * DAY) if folder.endswith("/uses") else listed

    two.files = used_today
    done = later.clean()
    two.files = files
    assert (done.entries, done.gone) == (2, 1) and done.gone_bytes > 0
    left = everything(two)
    assert [name for name in left if name.startswith("entries/")] == [f"entries/{entry_name(OTHER)}"]
    assert [name for name in left if name.startswith("uses/")] == [f"uses/{entry_name(OTHER)}"]
    assert sum(name.startswith("rungs/") for name in left) == len(NAMES.rungs(token_key(OTHER)))
    b = machine("b")
    assert b.ask([*TOKENS, 5]).entry is not None and b.shared.stats()["fetched_tokens"] == 500, "what both begin with is found in the other"
    assert machine("c").outcome([*OTHER, 5]) == "fetched"


def test_the_least_recently_used_goes_for_want_of_room(two, machine):
    size = sum(len(data) for name, data in everything(two).items() if name.startswith("pieces/"))
    done = cleaning(two, max_bytes=size - 1).clean()
    assert (done.entries, done.gone) == (2, 1)
    assert machine("b").outcome([*OTHER, 5]) == "fetched"
    assert cleaning(two, max_bytes=1).clean().gone == 1 and not everything(two)


def test_an_upload_that_goes_on_is_left_alone(two):
    two.put(NAMES.place("pieces", "ab" * 32), b"without a manifest yet")
    assert cleaning(two).clean().gone_bytes == 0 and f"pieces/{'ab' * 32}" in everything(two)
    assert cleaning(two, in_days=2).clean().gone_bytes == 22 and f"pieces/{'ab' * 32}" not in everything(two)


def test_what_is_not_named_as_ours_is_stays(two):
    others = [NAMES.place("pieces", "holiday.jpg"), NAMES.place("uses", "README"), f"{NAMES.team.folder}/photos/pieces/{'ab' * 32}"]
    for name in others:
        two.put(name, b"somebody's")
    assert cleaning(two, max_bytes=1, in_days=40).clean().gone == 2
    assert [two.get(name, 20) for name in others] == [b"somebody's"] * 3


def test_one_machine_a_day_cleans(two, machine):
    for days, lists in ((0, True), (0.5, False), (1.5, True)):
        before = two.counts()["list"]
        cleaning(two, in_days=days).daily()
        assert (two.counts()["list"] > before) == lists


def test_a_store_that_is_down_is_left_alone_and_asked_again(caplog):
    now = [0.0]
    breaker = Breaker("reading", lambda: now[0])
    caplog.set_level(logging.INFO, "mlx_lm_tiered")
    for _ in range(2):
        breaker.failed(StoreFailed("refused"))
    breaker.worked()
    for _ in range(2):
        breaker.failed(StoreFailed("refused"))
    assert not breaker.open and not caplog.records
    breaker.failed(StoreFailed("refused"))
    assert breaker.open and len(caplog.records) == 1
    rests = []
    for _ in range(8):
        start = now[0]
        while breaker.open:
            now[0] += 10
        rests.append(now[0] - start)
        breaker.failed(StoreFailed("refused"))
    assert rests == [30, 60, 120, 240, 480, 600, 600, 600] and len(caplog.records) == 1
    breaker.worked()
    assert not breaker.open and "works again" in caplog.records[-1].message
    breaker.failed(StoreFailed("forbidden"), denied=True)
    assert breaker.open


@pytest.mark.parametrize("hangs", ["lookup", "piece"])
def test_a_store_that_hangs_costs_a_bounded_wait_and_is_then_left_alone(two, machine, monkeypatch, hangs):
    monkeypatch.setattr(tier, "LOOKUP", 0.2)
    monkeypatch.setattr(tier, "patience", lambda computing: 0.2)
    b, free, read = machine("b"), threading.Event(), two.read

    def hang(name, most, take):
        if hangs == "lookup" or "/pieces/" in name:
            free.wait(20)
        return read(name, most, take)

    two.read = hang
    for number in range(3):
        started = time.monotonic()
        assert b.ask([*TOKENS, number]).entry is None
        assert time.monotonic() - started < 1
    free.set()
    until(lambda: b.shared.stats()["late"] == 3)
    assert b.shared.stats()["reading"] is False and b.ask([*TOKENS, 7]) is None, "it is not asked any more"
    assert restore(b.cold, TOKENS) is None and not list((b.cold.root / "tmp").glob("*"))


def test_a_request_that_is_given_up_leaves_nothing(two, machine):
    b, free, read = machine("b"), threading.Event(), two.read

    def hang(name, most, take):
        if "/pieces/" in name:
            free.wait(20)
        return read(name, most, take)

    two.read = hang
    fetch = b.shared.begin(FINGERPRINT, token_key([*TOKENS, 5]), 0, 900)
    time.sleep(0.1)
    fetch.cancel()
    assert fetch.over()
    free.set()
    until(lambda: b.shared.stats()["cancelled"] == 1)
    assert b.shared.stats()["reading"] and not list((b.cold.root / "tmp").glob("*"))


def test_two_requests_for_the_same_prefix_read_it_once(two, machine):
    b = machine("b")
    fetches = [b.shared.begin(FINGERPRINT, token_key([*TOKENS, number]), 0, 900) for number in range(3)]
    for fetch in fetches:
        fetch.wait()
    assert all(fetch.entry is not None for fetch in fetches)
    assert b.shared.stats()["fetched_bytes"] == entry_of(b.cold, TOKENS).nbytes


def test_a_request_waits_less_than_computing_takes():
    assert patience(None) == patience(1000.0) == MOST and patience(0.01) == LEAST and patience(6.0) == PAYS * 6.0


def entry_name(tokens):
    return NAMES.entry(token_key(tokens))
