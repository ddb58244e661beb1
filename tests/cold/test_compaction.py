"""Long chains become one file while nothing else is to be done: the same bytes, checked on the way, and never a moment without them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time

import pytest
from cold_helpers import FINGERPRINT, grown, job, restore, same, save, scanned
from test_segments import dumped, quantized, state

from mlx_lm_tiered.cold import compaction
from mlx_lm_tiered.cold.checking import BadEntry
from mlx_lm_tiered.cold.compaction import Compactor, choose, compact
from mlx_lm_tiered.cold.directory import DirectoryFull
from mlx_lm_tiered.cold.reader import open_entry
from mlx_lm_tiered.index.keys import token_key


def entry_of(store, tokens):
    found = store.find(FINGERPRINT, "", token_key(tokens), len(tokens))
    assert found is not None and found.length == len(tokens)
    return found.entry


def entries(root):
    return sorted((root / "v1").rglob("*.safetensors"))


def talk(store, turns, step=20, seed=0, **sizes):
    for n in range(step, step * turns + 1, step):
        save(store, job(range(seed * 10_000, seed * 10_000 + n), grown(n, seed=seed, **sizes)))
    return range(seed * 10_000, seed * 10_000 + step * turns)


def meta_of(path):
    with open_entry(path) as reader:
        reader.check()
        return reader.header.meta


def test_a_chain_becomes_one_file_with_the_same_bytes(tmp_path):
    store = scanned(tmp_path / "c")
    tokens = talk(store, 6)
    used = entry_of(store, tokens).path.stat().st_mtime_ns
    before = store.stats()
    assert before["longest_chain"] == 6 == len(entries(store.root))
    assert compact(store, entry_of(store, tokens))
    (path,) = entries(store.root)
    assert meta_of(path).start == 0 and path.stat().st_mtime_ns == used, "to rest is not to be used"
    stats = store.stats()
    assert (stats["longest_chain"], stats["entries"], stats["compacted"]) == (1, 1, 1)
    assert stats["written_bytes"] - before["written_bytes"] == stats["compacted_bytes"] == path.stat().st_size
    assert stats["stored"] == before["stored"] and stats["new_token_bytes"] == before["new_token_bytes"]
    for other in (store, scanned(tmp_path / "c")):
        assert same(restore(other, tokens), grown(120))
        assert other.find(FINGERPRINT, "", token_key(range(70)), 70).length == 70
    save(store, job(range(140), grown(140)))  # and is continued
    assert store.stats()["longest_chain"] == 2 and same(restore(scanned(store.root), range(140)), grown(140))


def test_tails_that_are_of_no_use_are_left_behind(tmp_path):
    """Each turn's answer came back in other tokens than it was generated in."""
    store, said = scanned(tmp_path / "c"), []
    for turn in range(5):
        said = [*said, *range(20)]
        caches = grown(len(said))
        tail = [900 + turn] * 5
        longer = grown(len(said) + 5)
        save(store, job([*said, *tail], longer))
    last = [*said, 904, 904, 904, 904, 904]
    chain = entry_of(store, last).chain
    assert len(chain) == 5 and all(one.length > child.start for one, child in zip(chain, chain[1:], strict=False))
    assert compact(store, entry_of(store, last))
    assert len(entry_of(store, last).chain) == 1
    assert same(restore(scanned(store.root), last), grown(105))
    assert caches


@pytest.mark.parametrize("kind", ["quantized", "hybrid"])
def test_every_kind_of_tensor_comes_along(tmp_path, kind):
    def caches(n):
        return [quantized(n, [n])] if kind == "quantized" else [*grown(n), state(n)]

    store = scanned(tmp_path / "c")
    for n in (64, 128, 192):
        save(store, job(range(n), caches(n)))
    entry = entry_of(store, range(192))
    assert len(entry.chain) == 3
    assert compact(store, entry)
    store = scanned(tmp_path / "c")
    assert len(entry_of(store, range(192)).chain) == 1
    assert dumped(restore(store, range(192))) == dumped(caches(192))
    if kind == "hybrid":  # its shorter ones serve what it cannot
        assert dumped(restore(store, range(128))) == dumped(caches(128))


def test_what_others_continue_stays(tmp_path):
    store = scanned(tmp_path / "c")
    talk(store, 4)
    fork = [*range(40), *range(500, 520)]
    save(store, job(fork, grown(60)))
    assert not store.catalog.ends(9) and {e.length for e in store.catalog.ends(3)} == {60, 80}
    assert compact(store, entry_of(store, range(80)))
    again = scanned(tmp_path / "c")
    assert same(restore(again, fork), grown(60)) and same(restore(again, range(80)), grown(80))


@pytest.mark.parametrize("which", [0, 2, 5], ids=["root", "middle", "end"])
def test_damage_is_found_and_not_copied(tmp_path, which):
    store = scanned(tmp_path / "c")
    tokens = talk(store, 6)
    entry = entry_of(store, tokens)
    path = entry.chain[which].path
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    assert not compact(store, entry)
    assert store.stats()["corrupt"] == 1 and not path.exists() and not list((store.root / "tmp").iterdir())
    assert restore(store, tokens) is None
    for left in entries(store.root):
        meta_of(left)  # sound
    with pytest.raises(BadEntry):
        meta_of(next((store.root / "quarantine").iterdir()))


def test_it_evicts_nothing(tmp_path):
    store = scanned(tmp_path / "c", 1_200_000)
    other = save(store, job(range(90_000, 90_400)))
    tokens = talk(store, 12, step=40, dim=32)
    assert other.exists()
    store.max_bytes = store._directory.max_bytes = store.stats()["bytes"] + 300_000
    with pytest.raises(DirectoryFull):
        compact(store, entry_of(store, tokens))
    assert other.exists() and len(entry_of(store, tokens).chain) == 12


@pytest.mark.parametrize("what", ["continued", "deleted"])
def test_what_happens_to_the_chain_meanwhile_counts(tmp_path, what):
    store = scanned(tmp_path / "c")
    tokens = talk(store, 4)
    entry = entry_of(store, tokens)
    done = []

    def meanwhile():
        if not done:
            done.append(save(store, job(range(100), grown(100))) if what == "continued" else entry.path.unlink())
        return True

    compact(store, entry, meanwhile)
    again = scanned(tmp_path / "c")
    if what == "continued":
        assert same(restore(again, range(100)), grown(100)) and len(entry_of(again, range(100)).chain) == 5
    else:
        assert again.find(FINGERPRINT, "", token_key(tokens), 80).length == 60
    assert not list((store.root / "tmp").iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    tokens = talk(store, 4)
    entry, before = entry_of(store, tokens), store.stats()["bytes"]

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    for at in ("pwrite", "fsync"):
        open_files = len(os.listdir("/dev/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, at, full)
            with pytest.raises(OSError, match="No space"):
                compact(store, entry)
        assert not list((store.root / "tmp").iterdir()) and len(os.listdir("/dev/fd")) == open_files
    assert store.storing.measure() == before and same(restore(store, tokens), grown(80))


@pytest.mark.parametrize("what", ["continued", "replaced"])
def test_what_another_process_did_to_a_chain_is_not_written_for_over_and_over(tmp_path, what):
    """And the other chains have their turn."""
    store = scanned(tmp_path / "c")
    longest, other = talk(store, 5, seed=1), talk(store, 4, seed=2)
    path = entry_of(store, longest).path
    if what == "continued":
        more = range(longest.start, longest.stop + 20)
        save(scanned(store.root), job(more, grown(120, seed=1)))
    else:
        os.replace(shutil.copy2(path, tmp_path / "same"), path)
    compactor = Compactor(store, lambda: False, every=0.01, resting=0.0, long=3)
    deadline = time.monotonic() + 10
    while len(entry_of(store, other).chain) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert compactor.close()
    assert store.stats()["compacted_bytes"] == entry_of(store, other).path.stat().st_size
    again = scanned(store.root)
    assert same(restore(again, longest), grown(100, seed=1)) and same(restore(again, other), grown(80, seed=2))
    if what == "continued":
        assert same(restore(again, more), grown(120, seed=1))


def test_long_chains_that_rest_are_chosen(tmp_path):
    store = scanned(tmp_path / "c")
    talk(store, 5, seed=1), talk(store, 3, seed=2)
    assert choose(store.catalog, 4, 3600) is None and choose(store.catalog, 6, 0) is None
    assert len(choose(store.catalog, 2, 0).chain) == 5
    assert compaction.LONG > 20, "a conversation of 20 turns writes its new tokens only"


def test_chains_that_read_too_much_for_nothing_are_chosen(tmp_path):
    """An uncuttable family whose answers come back in other tokens: every parent is read to its end, and used in part."""
    store, said = scanned(tmp_path / "c"), []
    for turn in range(4):
        said = [*said, *range(turn * 100, turn * 100 + 25)]
        tail = [9000 + turn] * (0 if turn == 3 else len(said) - 2)
        n = len(said) + len(tail)
        save(store, job([*said, *tail], [*grown(n), state(n)]))
        chosen = choose(store.catalog, 99, 0)
        assert (chosen is None) == (turn < 3), turn
    assert chosen.length == 100 and sum(p.length - c.start for p, c in zip(chosen.chain, chosen.chain[1:], strict=False)) >= 100
    expected = dumped(restore(store, said))
    assert compact(store, chosen)
    store = scanned(store.root)
    assert dumped(restore(store, said)) == expected and choose(store.catalog, 99, 0) is None


def test_the_thread_makes_way_and_ends_at_once(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    first, second = talk(store, 5, seed=1), talk(store, 5, seed=2)
    busy, begun = threading.Event(), threading.Event()
    pieces = compaction._pieces

    def watched(*args):
        for piece in pieces(*args):
            begun.set()
            busy.wait(0.02)
            yield piece

    monkeypatch.setattr(compaction, "_pieces", watched)
    busy.set()
    compactor = Compactor(store, busy.is_set, every=0.02, resting=0.0, long=3)
    time.sleep(0.2)
    assert store.stats()["compacted"] == 0 and not begun.is_set()
    busy.clear()
    assert begun.wait(10)
    busy.set()
    time.sleep(0.1)
    written = store.stats()["compacted_bytes"]
    time.sleep(0.2)
    assert store.stats()["compacted_bytes"] == written and store.stats()["compacted"] < 2
    started = time.monotonic()
    assert compactor.close(10) and time.monotonic() - started < 5
    assert not list((store.root / "tmp").iterdir())
    compactor = Compactor(store, lambda: False, every=0.02, resting=0.0, long=3)
    deadline = time.monotonic() + 20
    while store.stats()["longest_chain"] > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert compactor.close(10) and store.stats()["longest_chain"] == 1
    for tokens, seed in ((first, 1), (second, 2)):
        assert same(restore(store, tokens), grown(100, seed=seed))
