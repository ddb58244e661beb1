"""What comes from the store is anybody's: whatever it is, nothing wrong is taken in, nothing too large is read, and the next request is served."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from cold_helpers import LARGE, grown, restore, same
from mlx_lm_tiered.cold.checking import BadEntry
from mlx_lm_tiered.shared.fetching import Cancelled, Progress
from mlx_lm_tiered.shared.manifest import PIECE, parse
from mlx_lm_tiered.shared.names import Names, Team
from shared_helpers import KEY, NAMES, TOKENS, conversation, everything
from support.waiting import until

NAME = NAMES.entry(KEY)
PROMPT = [*TOKENS, 5]


def nothing_taken(b) -> None:
    assert restore(b.cold, TOKENS) is None and not list((b.cold.root / "tmp").glob("*"))
    assert b.cold.stats()["bytes"] < 100_000


def manifest(objects):
    return parse(objects.get(NAMES.place("entries", NAME), LARGE), NAMES.team, NAMES.folder, NAME)


@pytest.mark.parametrize("change", ["flip", "cut", "longer", "empty", "gone", "other"])
def test_a_piece_that_is_not_what_its_name_says_is_not_used(filled, machine, change):
    digest = manifest(filled).links[-1].pieces[0]
    place, data = NAMES.place("pieces", digest), everything(filled)[f"pieces/{digest}"]
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    other = everything(filled)[f"pieces/{manifest(filled).links[0].pieces[0]}"]
    if change == "gone":
        filled.delete(place)
    else:
        filled.put(place, {"flip": bytes(flipped), "cut": data[:-1], "longer": data + b"x", "empty": b"", "other": other}[change])
    b = machine("b")
    assert b.outcome(PROMPT) in ("refused", "failed")
    assert restore(b.cold, TOKENS) is None and not list((b.cold.root / "tmp").glob("*"))
    kept = restore(b.cold, TOKENS[:400])
    assert kept is not None and same(kept, grown(400)), "the file before it is sound"


@pytest.mark.parametrize("tokens", [TOKENS, [*TOKENS[:700], *range(2000, 2200)]], ids=["same", "beginning"])
def test_a_lost_piece_is_healed_by_the_next_upload(filled, machine, tokens):
    filled.delete(NAMES.place("pieces", manifest(filled).links[-1].pieces[0]))
    b = machine("b", shared_cache_write="idle")
    assert b.outcome(PROMPT) == "refused"
    conversation(b.cold, 900, tokens=tokens)
    until(lambda: b.shared.stats()["uploads"] == 1)
    assert machine("c").outcome([*tokens, 5]) == "fetched"


@pytest.mark.parametrize("where", range(0, 1000, 83))
def test_a_manifest_with_a_flipped_byte_is_not_used(filled, machine, where):
    data = bytearray(filled.get(NAMES.place("entries", NAME), LARGE))
    data[where % len(data)] ^= 4
    filled.put(NAMES.place("entries", NAME), bytes(data))
    b = machine("b")
    assert b.outcome(PROMPT) == "refused"
    nothing_taken(b)


def test_another_teams_signature_is_none(filled, machine):
    sound = manifest(filled)
    filled.put(NAMES.place("entries", NAME), sound.encode(Team("another key")))
    b = machine("b")
    assert b.outcome(PROMPT) == "refused"
    nothing_taken(b)


LIES = {
    "a path": {"file": "../../../etc/passwd"},
    "an absolute path": {"file": "/etc/passwd"},
    "a folder": {"file": "x/" + "ab" * 16 + ".safetensors"},
    "another name": {"file": "ab" * 16 + ".safetensors"},
    "too many bytes": {"nbytes": 1 << 60},
    "no bytes": {"nbytes": 0},
    "negative bytes": {"nbytes": -1},
    "more bytes than pieces": {"nbytes": 2 * PIECE},
    "bytes that are none": {"nbytes": "many"},
    "no pieces": {"pieces": []},
    "a piece that is a path": {"pieces": ["../" * 21 + "a"]},
    "another checksum": {"checksum": "0" * 32},
    "a longer chain": {"length": 1 << 40},
    "true for a number": {"start": True},
    "cuttable by a word": {"cuttable": "yes"},
    "a field more": {"more": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_signed_manifest_that_lies_is_refused(filled, machine, lie):
    """Whoever has the key may still be wrong."""
    sound = manifest(filled)
    _, line, packed = sound.encode(NAMES.team).split(b"\n", 2)
    head = json.loads(line)
    head["links"][0].update(LIES[lie])
    filled.put(NAMES.place("entries", NAME), NAMES.team.signed(json.dumps(head).encode() + b"\n" + packed))
    b = machine("b")
    assert b.outcome(PROMPT) == "refused"
    nothing_taken(b)


def test_a_manifest_under_another_name_is_refused(filled):
    data = filled.get(NAMES.place("entries", NAME), LARGE)
    for name, folder in ((NAMES.entry(KEY[:-8]), NAMES.folder), (NAME, Names(NAMES.team, "cd" * 16).folder)):
        with pytest.raises(BadEntry):
            parse(data, NAMES.team, folder, name)


def test_what_is_larger_than_the_directory_is_not_begun(filled, machine):
    b = machine("b", max_bytes=60_000)
    assert b.outcome(PROMPT) == "misses" and filled.counts()["read_bytes"] < 20_000
    nothing_taken(b)


def test_an_object_that_is_too_large_is_not_read(filled, machine):
    """A rung has 97 bytes; one of a gigabyte costs nothing."""
    for name in everything(filled):
        if name.startswith("rungs/"):
            filled.put(f"{NAMES.folder}/{name}", bytes(1 << 20))
    b = machine("b")
    before = filled.counts()["read_bytes"]
    assert b.outcome(PROMPT) == "refused" and filled.counts()["read_bytes"] == before
    nothing_taken(b)


def test_a_signed_file_that_is_no_entry_is_refused(filled, machine):
    """Pieces that are what their names say, and together no file that a reader takes."""
    sound = manifest(filled)
    junk = b"\xff" * 5000
    digest = hashlib.sha256(junk).hexdigest()
    filled.put(NAMES.place("pieces", digest), junk)
    lying = replace(sound, links=(replace(sound.links[0], nbytes=len(junk), pieces=(digest,)), *sound.links[1:]))
    filled.put(NAMES.place("entries", NAME), lying.encode(NAMES.team))
    b = machine("b")
    assert b.outcome(PROMPT) == "refused"
    nothing_taken(b)


def test_a_cancelled_fetch_leaves_nothing(filled, machine):
    b = machine("b")
    fetching, stopped = b.shared._fetching, Progress(stop=lambda: True)
    with pytest.raises(Cancelled):
        fetching.fetch(NAMES, manifest(filled), 2, stopped)
    assert not fetching._coming
    nothing_taken(b)
