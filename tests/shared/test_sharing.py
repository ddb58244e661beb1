"""What one machine uploads another one finds, exact to the token and bit for bit; and in how many requests."""

from __future__ import annotations

import time

import pytest

from cold_helpers import FINGERPRINT, grown, restore, same
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.shared.names import LENGTHS, Names, Team
from shared_helpers import KEY, NAMES, TOKENS, conversation, entry_of, everything, push
from support.waiting import until


def test_what_one_machine_computed_another_restores(machine, objects):
    a, b = machine("a"), machine("b")
    conversation(a.cold, 400, 700, 900)
    assert push(objects, a.cold, TOKENS).outcome == "uploaded"
    fetch = b.ask([*TOKENS, 5])
    assert fetch.entry is not None and len(fetch.entry.chain) == 3
    restored = restore(b.cold, TOKENS)
    assert restored is not None and same(restored, grown(900))
    assert b.shared.stats()["fetched_tokens"] == 900
    assert b.ask([*TOKENS, 5], have=900) is None, "what is here is not asked for"


def test_the_manifest_says_how_far_a_prompt_is_shared(machine, objects):
    """The rung that is found is shorter than what is shared; and of the chain only what is needed comes."""
    a, b = machine("a"), machine("b")
    conversation(a.cold, 560, 900)
    push(objects, a.cold, TOKENS)
    fetch = b.ask([*TOKENS[:550], *range(2000, 2100)])
    assert fetch.entry.length == 560 and b.shared.stats()["fetched_tokens"] == 550
    assert b.shared.stats()["fetched_bytes"] == fetch.entry.nbytes < sum(one.nbytes for one in entry_of(a.cold, TOKENS).chain)


@pytest.mark.parametrize("shared", [0, 255, 256, 319, 320, 500, 781, 899])
def test_the_longest_rung_is_found(machine, objects, shared):
    a, b = machine("a"), machine("b")
    conversation(a.cold, 900)
    push(objects, a.cold, TOKENS)
    b.ask([*TOKENS[:shared], *range(5000, 6000)])
    assert b.shared.stats()["fetched_tokens"] == (shared if shared >= LENGTHS[0] else 0)


def test_a_miss_costs_one_small_request_and_is_remembered(machine, objects):
    b = machine("b")
    assert b.outcome(TOKENS) == "misses"
    assert objects.counts() == {"get": 1, "head": 0, "put": 0, "list": 0, "delete": 0, "read_bytes": 0, "written_bytes": 0}
    assert b.ask(TOKENS) is None and b.ask(TOKENS[:200]) is None
    assert objects.counts()["get"] == 1


def test_uploading_twice_changes_nothing_and_a_longer_entry_sends_what_is_new(machine, objects):
    a = machine("a")
    conversation(a.cold, 400, 700)
    push(objects, a.cold, TOKENS[:700])
    before, puts = everything(objects), objects.counts()["put"]
    assert push(objects, a.cold, TOKENS[:700]).outcome == "there"
    assert everything(objects) == before and objects.counts()["put"] == puts
    conversation(a.cold, 900)
    pushed = push(objects, a.cold, TOKENS)
    assert pushed.nbytes == entry_of(a.cold, TOKENS).nbytes
    new = everything(objects).keys() - before.keys()
    assert sorted(name.partition("/")[0] for name in new) == ["entries", "pieces", "rungs"], "one rung lies between 700 and 900"
    assert all(everything(objects)[name] == data for name, data in before.items()), "nothing is rewritten"


def test_an_upload_that_stops_anywhere_leaves_nothing_half(machine, objects, monkeypatch):
    a, b = machine("a"), machine("b")
    conversation(a.cold, 400, 900)
    put = objects.put
    for allowed in range(8):
        left = [allowed]

        def limited(name, data, left=left):
            if not left[0]:
                raise OSError("the end")
            left[0] -= 1
            put(name, data)

        monkeypatch.setattr(objects, "put", limited)
        try:
            push(objects, a.cold, TOKENS)
        except OSError:
            pass
        monkeypatch.setattr(objects, "put", put)
        b.shared._lookup.forget_absent()
        assert b.outcome([*TOKENS, 5]) in ("misses", "fetched", "")
        assert b.shared.stats()["refused"] == b.shared.stats()["failed"] == 0
    assert push(objects, a.cold, TOKENS, anew=True).outcome == "uploaded"
    assert b.ask([*TOKENS, 5]) is None or restore(b.cold, TOKENS) is not None


def test_a_server_uploads_what_is_new_notes_uses_and_sends_nothing_back(machine, objects):
    a = machine("a", shared_cache_write="idle")
    conversation(a.cold, 400, 900)
    until(lambda: a.shared.stats()["uploads"] == 1)
    b = machine("b", shared_cache_write="idle")
    assert b.outcome([*TOKENS, 5]) == "fetched"
    until(lambda: b.shared.stats()["uses"] == 1)
    assert objects.when(NAMES.place("uses", NAMES.entry(KEY))) is not None
    puts = objects.counts()["put"]
    conversation(b.cold, 200, tokens=[3] * 200)  # too short to be found by anybody
    a.shared._background.use(NAMES, NAMES.entry(KEY))
    until(lambda: not a.shared._background._uses)
    assert objects.counts()["put"] == puts, "one use a day, and what came from there is there"


def test_teams_and_models_see_nothing_of_each_other(machine, objects):
    a, stranger, colleague = machine("a"), machine("s", team="another key"), machine("c")
    conversation(a.cold, 900)
    push(objects, a.cold, TOKENS)
    assert stranger.outcome(TOKENS) == "misses" and colleague.outcome(TOKENS) == "fetched"
    other = Names(Team("another key"), FINGERPRINT)
    assert other.folder != NAMES.folder and other.entry(KEY) != NAMES.entry(KEY)
    assert {digest for _, digest in other.rungs(KEY)}.isdisjoint(digest for _, digest in NAMES.rungs(KEY))
    model = Names(Team("a key"), "cd" * 16)
    assert model.folder != NAMES.folder
    assert not any(b"a key" in data for data in everything(objects).values())


def test_it_is_fetched_when_that_is_expected_to_be_quicker(machine, objects):
    a, b = machine("a"), machine("b", ssd_restore="auto")
    conversation(a.cold, 900)
    push(objects, a.cold, TOKENS)
    for _ in range(4):
        b.rates.prefilled(FINGERPRINT, 0, 100, 0.1)  # 0.9 s for all of it
    b.shared._network.fetched(1000, 2.0)
    assert b.outcome(TOKENS) == "not_worth"
    for _ in range(16):
        b.shared._network.fetched(1000, 0.001)
    assert b.outcome(TOKENS) == "fetched"
    quick = machine("quick", ssd_restore="auto")
    for _ in range(4):
        quick.rates.prefilled(FINGERPRINT, 0, 100, 0.0001)
    asked = objects.counts()["get"]
    assert quick.ask(TOKENS) is None and objects.counts()["get"] == asked, "what computes at once is not asked for"


def test_rungs_are_those_of_the_documentation():
    assert LENGTHS[:6] == (256, 320, 400, 500, 625, 781)
    assert [length for length, _ in NAMES.rungs(token_key(range(4000)))] == [length for length in LENGTHS if length <= 4000]
    assert len([length for length in LENGTHS if length <= 4000]) == 13


def test_a_use_of_what_is_here_counts_in_the_store(machine, objects):
    """A popular entry is on every machine's SSD, and nobody asks the store for it."""
    a = machine("a", shared_cache_write="idle")
    conversation(a.cold, 900)
    until(lambda: a.shared.stats()["uploads"] == 1)
    background = a.shared._background
    place = NAMES.place("uses", NAMES.entry(KEY))
    assert objects.when(place) is None and a.shared.stats()["pending"] == 0
    background._look_at = 0.0
    until(lambda: objects.when(place) is not None)
    assert a.shared.stats()["uses"] == 1


def test_uploads_wait_while_requests_run_and_keep_to_their_bandwidth(machine, objects):
    a = machine("a", shared_cache_write="idle", shared_cache_bandwidth=400_000)
    a.busy = True
    conversation(a.cold, 900)
    eager = machine("eager", shared_cache_write="always", team="another key")
    eager.busy = True
    conversation(eager.cold, 900)
    until(lambda: eager.shared.stats()["uploads"] == 1)
    assert a.shared.stats()["uploads"] == 0 and a.shared.stats()["pending"] == 1
    started = time.monotonic()
    a.busy = False
    until(lambda: a.shared.stats()["uploads"] == 1)
    size = entry_of(a.cold, TOKENS).nbytes
    assert size > 200_000 and time.monotonic() - started > size / 400_000, "its manifest has to wait until the piece is paid for"
