"""Attempts to break the shared tier: what goes wrong for one object, one request or one clock stays there."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cold_helpers import FINGERPRINT, grown, restore, same
from mlx_lm_tiered.cold.checking import BadEntry
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.shared import manifest as manifests
from mlx_lm_tiered.shared.cleaning import DAY, Cleaning
from mlx_lm_tiered.shared.lookup import Lookup, read_manifest
from mlx_lm_tiered.shared.names import Team
from mlx_lm_tiered.shared.objects import StoreFailed, open_objects
from mlx_lm_tiered.shared.pushing import BELIEVED, Pushing
from shared_helpers import KEY, NAMES, POOL, TOKENS, Machine, conversation, entry_of, everything, push
from support.waiting import until

NAME = NAMES.entry(KEY)
OTHER = [*TOKENS[:800], *range(3000, 3100)]  # begins like TOKENS


def last_piece(objects) -> str:
    return NAMES.place("pieces", read_manifest(objects, NAMES.team, NAMES.folder, NAME).links[-1].pieces[0])


def whole(cold, tokens) -> None:
    restored = restore(cold, tokens)
    assert restored is not None and same(restored, grown(len(tokens)))


# One object

@pytest.mark.parametrize("what", ["piece", "manifest", "rung"])
def test_a_damaged_object_stops_nothing_else_and_is_healed_by_an_upload_that_begins_alike(filled, machine, what):
    rungs = [digest for _, digest in NAMES.rungs(KEY)]
    place = {"piece": last_piece(filled), "manifest": NAMES.place("entries", NAME), "rung": NAMES.place("rungs", rungs[0])}[what]
    filled.put(place, b"x" * 97)
    b = machine("b", shared_cache_write="idle")
    outcomes = [b.outcome([*TOKENS, number]) for number in range(4)]
    assert outcomes[0] == "refused" and "refused" not in outcomes[1:] and b.shared.stats()["reading"]
    conversation(b.cold, 900, tokens=OTHER)
    until(lambda: b.shared.stats()["uploads"] == 1)
    c = machine("c")
    assert c.outcome([*OTHER, 5]) == "fetched"
    whole(c.cold, OTHER)


def test_a_damaged_piece_is_healed_by_an_upload_of_the_same_file(filled, machine):
    place = last_piece(filled)
    filled.put(place, b"x")
    lookup = Lookup(filled, POOL)
    lookup.distrust(NAMES, NAME)
    pushed = Pushing(filled, lookup).push(NAMES, entry_of(machine("a").cold, TOKENS))
    assert pushed.outcome == "uploaded" and not lookup.broken(NAMES, NAME)
    assert machine("c").outcome([*TOKENS, 5]) == "fetched"


def test_an_upload_that_ended_before_its_rungs_is_ended_by_the_next(filled, machine):
    for name in everything(filled):
        if name.startswith("rungs/"):
            filled.delete(f"{NAMES.folder}/{name}")
    assert machine("b").outcome([*TOKENS, 5]) == "misses"
    assert push(filled, machine("a").cold, TOKENS).outcome == "there"
    assert machine("c").outcome([*TOKENS, 5]) == "fetched"


def test_a_piece_that_was_seen_long_ago_is_looked_for_again(filled, machine):
    now = [0.0]
    a = machine("a")
    pushing = Pushing(filled, Lookup(filled, POOL), clock=lambda: now[0])
    pushing.push(NAMES, entry_of(a.cold, TOKENS), anew=True)
    Cleaning(filled, NAMES.team, POOL, 1, 0).clean()
    assert not everything(filled)
    now[0] = BELIEVED + 1
    assert pushing.push(NAMES, entry_of(a.cold, TOKENS)).outcome == "uploaded"
    assert machine("c").outcome([*TOKENS, 5]) == "fetched"


def test_a_manifest_with_a_giant_description_is_not_parsed(monkeypatch):
    data = NAMES.team.signed(b"[" + b"{}," * (manifests.MOST_HEAD // 3 + 1) + b"{}]\n")
    monkeypatch.setattr(manifests.json, "loads", lambda line: pytest.fail("it takes some hundred megabytes"))
    with pytest.raises(BadEntry):
        manifests.parse(data, NAMES.team, NAMES.folder, NAME)


def test_a_team_key_of_any_bytes_is_one():
    assert Team("k\udcff").folder != Team("k\udcfe").folder


# Several who fetch

def test_two_processes_on_one_directory_fetch_once(filled, tmp_path):
    first, second = Machine(tmp_path / "b", filled), Machine(tmp_path / "b", filled)
    assert first.outcome([*TOKENS, 5]) == "fetched"
    read = filled.counts()["read_bytes"]
    assert second.outcome([*TOKENS, 5]) == "fetched" and second.shared.stats()["fetched_bytes"] == 0
    assert filled.counts()["read_bytes"] - read < 10_000, "a few rungs and the manifest"
    whole(second.cold, TOKENS)
    first.close()
    second.close()


def test_two_processes_that_fetch_at_the_same_time_both_have_it(filled, tmp_path):
    both = [Machine(tmp_path / "b", filled) for _ in range(2)]
    fetches = [one.shared.begin(FINGERPRINT, token_key([*TOKENS, 5]), 0, 900) for one in both]
    for fetch in fetches:
        fetch.wait()
    assert all(fetch.entry is not None for fetch in fetches)
    for one in both:
        whole(one.cold, TOKENS)
        one.close()


def test_a_file_of_other_content_under_the_name_is_kept_and_nothing_is_fetched(filled, machine):
    b = machine("b")
    conversation(b.cold, 400)  # the same tokens, computed here
    assert b.outcome([*TOKENS, 5]) == "failed" and b.shared.stats()["fetched_bytes"] == 0
    whole(b.cold, TOKENS[:400])


def held(objects, part: str) -> threading.Event:
    """Reads of names with `part` in them wait for the event."""
    free, read = threading.Event(), objects.read

    def hang(name, most, take):
        if part in name:
            free.wait(20)
        return read(name, most, take)

    objects.read = hang
    return free


def test_who_waits_for_another_ones_fetch_goes_on_when_that_one_is_given_up(filled, machine):
    b, free = machine("b"), held(filled, "/pieces/")
    first, second = (b.shared.begin(FINGERPRINT, token_key([*TOKENS, number]), 0, 900) for number in range(2))
    until(lambda: b.shared._fetching._coming)
    time.sleep(0.2)
    first.cancel()
    free.set()
    second.wait()
    assert second.entry is not None
    whole(b.cold, TOKENS)


# Cleaning

def test_requests_do_not_wait_behind_the_days_cleaning_nor_does_the_end(filled, machine):
    for number in range(50):
        filled.put(NAMES.place("entries", f"{number:032x}"), b"junk")
    b, free = machine("b", shared_cache_write="idle"), held(filled, "/entries/000")
    b.shared._background._clean_at = 0.0
    until(lambda: filled.counts()["list"] > 3)
    time.sleep(0.2)
    assert b.ask([*TOKENS, 5]).entry is not None
    started = time.monotonic()
    b.close()
    free.set()
    assert time.monotonic() - started < 5


def test_a_clock_that_is_ahead_deletes_nothing(filled):
    before = everything(filled)
    Cleaning(filled, NAMES.team, POOL, 0, 30 * DAY, lambda: time.time() + 400 * DAY).daily()
    assert everything(filled) == before


def test_a_store_that_answers_with_pages_for_manifests_loses_none(filled):
    before, get = everything(filled), filled.get
    filled.get = lambda name, most: b"<html>Please log in</html>" if "/entries/" in name else get(name, most)
    with pytest.raises(StoreFailed):
        Cleaning(filled, NAMES.team, POOL, 0, 30 * DAY).clean()
    filled.get = get
    assert everything(filled) == before


def test_a_manifest_of_any_size_does_not_keep_others_from_being_deleted(filled, monkeypatch):
    monkeypatch.setattr("mlx_lm_tiered.shared.lookup.MOST", 100_000)
    filled.put(NAMES.place("entries", "0" * 32), bytes(100_001))
    assert Cleaning(filled, NAMES.team, POOL, 0, 30 * DAY).clean().gone == 1
    assert f"entries/{NAME}" in everything(filled)


def test_what_is_uploaded_while_cleaning_keeps_what_it_found_there(filled, machine):
    """Its pieces were there when the upload looked, and go with an entry that is deleted at that moment."""
    a = machine("a")
    delete, uploaded = filled.delete, []

    def meanwhile(name):
        delete(name)
        if "/entries/" in name and not uploaded:
            uploaded.append(push(filled, a.cold, TOKENS))

    filled.delete = meanwhile
    assert Cleaning(filled, NAMES.team, POOL, 1, 0).clean().gone == 1 and uploaded[0].nbytes == 0
    filled.delete = delete
    assert machine("c").outcome([*TOKENS, 5]) == "fetched"


def test_a_clock_that_is_set_back_does_not_keep_uses_from_being_noted(filled, machine, monkeypatch):
    b = machine("b", shared_cache_write="idle")
    background, real = b.shared._background, time.time
    monkeypatch.setattr("mlx_lm_tiered.shared.background.time.time", lambda: real() - 400 * DAY)
    filled.put(NAMES.place("uses", NAME), b"")
    background.use(NAMES, NAME)
    until(lambda: b.shared.stats()["uses"] == 1)


# The wire

class _Wire(BaseHTTPRequestHandler):
    def do_GET(self):
        if "other" in self.path:
            self.server.seen.append(self.headers.get("Authorization"))
            return self._reply(200, b"abc")
        if "away" in self.path:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/other")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if "trickle" not in self.path:
            return self._reply(400, b"\x1b[31mred\x1b[0m\n")
        self._reply(200, b"", 97)
        try:
            for _ in range(97):
                self.wfile.write(b"x")
                time.sleep(0.1)
        except OSError:
            pass

    def _reply(self, code, body, size=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def wire(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Wire)
    server.daemon_threads, server.seen = True, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login bob password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield server, open_objects(f"http://127.0.0.1:{server.server_port}/x")
    server.shutdown()
    server.server_close()


def test_credentials_do_not_follow_to_another_host(wire):
    server, objects = wire
    assert objects.get("away", 97) == b"abc" and server.seen == [None]


def test_what_a_server_answers_does_not_colour_the_log(wire):
    with pytest.raises(StoreFailed, match="red") as failure:
        wire[1].get("error", 97)
    assert str(failure.value).isprintable()


def test_a_trickle_ends_with_the_server(wire):
    _, objects = wire
    threading.Timer(0.3, objects.close).start()
    started = time.monotonic()
    with pytest.raises(StoreFailed):
        objects.get("trickle", 97)
    assert time.monotonic() - started < 5
