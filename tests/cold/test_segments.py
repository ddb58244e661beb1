"""Entries that hold only what they add to another: written, proven, restored, superseded, evicted, scanned."""

from __future__ import annotations

import errno
import os
import random
import time

import mlx.core as mx
import pytest
from cold_helpers import FINGERPRINT, flush, grown, job, plain, restore, same, save, scanned
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold import catalog, directory, reader, segments
from mlx_lm_tiered.cold.listing import check, entries
from mlx_lm_tiered.cold.reader import open_entry
from mlx_lm_tiered.cold.spill import SpillQueue
from mlx_lm_tiered.index.keys import token_key


def header(path):
    with open_entry(path) as opened:
        return opened.header


def meta(path):
    return header(path).meta


def files(root):
    return sorted((root / "v1").rglob("*.safetensors"))


def talk(store, *lengths, **sizes):
    """Save a growing conversation; the paths."""
    return [save(store, job(range(n), grown(n, **sizes))) for n in lengths]


def test_a_growing_conversation_writes_its_new_tokens_only(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    paths = talk(store, 300, 420, 900, dim=64)
    assert [(meta(p).start, meta(p).length) for p in paths] == [(0, 300), (300, 420), (420, 900)]
    assert all(p.exists() for p in paths)
    stats = store.stats()
    per_token = 2 * 2 * 2 * 64 * 4
    assert stats["new_token_bytes"] == 900 * per_token
    assert stats["written_bytes"] == sum(p.stat().st_size for p in paths) < 1.1 * 900 * (per_token + 8)
    assert (stats["entries"], stats["segments"], stats["longest_chain"], stats["continued"]) == (3, 2, 3, 2)
    for store in (store, scanned(root)):
        for n in (300, 420, 900):
            assert same(restore(store, range(n)), grown(n, dim=64))


@pytest.mark.parametrize("seed", range(3))
def test_files_are_found_in_any_order(tmp_path, monkeypatch, seed):
    root = tmp_path / "c"
    talk(scanned(root), *range(20, 200, 20))
    walk = directory.Directory.files
    shuffle = random.Random(seed).shuffle

    def shuffled(self):
        found = walk(self)
        shuffle(found)
        return found

    monkeypatch.setattr(directory.Directory, "files", shuffled)
    store = scanned(root)
    assert store.stats()["entries"] == 9 and store.stats()["longest_chain"] == 9
    assert store.stats()["scans"][FINGERPRINT]["indexed"] == 9
    assert same(restore(store, range(180)), grown(180))


def quantized(tokens, steps):
    """A quantized cache that grew in these steps; every token's numbers are its own."""
    cache = kinds.kind_of(KVCache()).cache_class()().to_quantized(group_size=32, bits=4)
    values = mx.random.normal((1, 2, 600, 32), key=mx.random.key(1))
    kinds.observe([cache])
    for start, stop in zip([0, *steps], [*steps, tokens], strict=True):
        cache.update_and_fetch(values[:, :, start:stop], values[:, :, start:stop] + 1)
    return cache


def ring(tokens, size):
    cache = RotatingKVCache(max_size=size, keep=0)
    values = mx.random.normal((1, 2, 2000, 8), key=mx.random.key(2))
    for start in range(0, tokens, 10):
        cache.update_and_fetch(values[:, :, start : start + 10], values[:, :, start : start + 10])
    return cache


def state(tokens):
    cache = ArraysCache(size=2)
    cache[0], cache[1] = (mx.random.normal((1, 4, 8), key=mx.random.key(tokens + i)) for i in (0, 1))
    return cache


def chunked(tokens):
    (cache,) = grown(tokens, layers=1, kind=lambda: ChunkedKVCache(10_000))
    return cache


def concatenated(tokens):
    (cache,) = grown(tokens, layers=1, kind=ConcatenateKVCache)
    return cache


ALONE = {
    "plain": lambda n: grown(n, layers=1)[0],
    "quantized": lambda n: quantized(n, [10, 33]),
    "long ring": lambda n: ring(n, 1000),
    "ring that fills up": lambda n: ring(n, 330),
    "wrapped ring": lambda n: ring(n, 16),
    "recurrent": state,
    "chunked": chunked,
    "concatenated": concatenated,
}


def dumped(caches):
    found = kinds.dump(caches)
    return found.descriptors, {name: (tensor.array.dtype, tensor.array.tolist()) for name, tensor in found.tensors.items()}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("companion", [False, True], ids=["alone", "beside a plain one"])
def test_every_kind_comes_back_from_a_chain(tmp_path, name, companion):
    root = tmp_path / "c"
    store = scanned(root)
    lengths = (60, 150, 160, 320, 400)

    def made(n):
        return [*(grown(n, layers=1) if companion else []), ALONE[name](n)]

    for n in lengths:
        save(store, job(range(n), made(n)))
    if companion or name in ("plain", "quantized", "long ring", "chunked"):
        assert store.stats()["continued"] == 4
    store = scanned(root)
    for n in lengths:
        found = store.find(FINGERPRINT, "", token_key(range(n)), n)
        if found is not None and found.length == n:
            caches = store.restore(found.entry)
            caches = kinds.lend(caches, n) if found.entry.length > n else caches
            assert dumped(caches) == dumped(made(n))
    assert dumped(restore(store, range(400))) == dumped(made(400))


def test_a_prefix_needs_no_more_than_the_files_that_hold_it(tmp_path, monkeypatch):
    root = tmp_path / "c"
    paths = talk(scanned(root), *range(100, 1001, 100), dim=64)
    store = scanned(root)
    read = []
    preadv = reader._PREADV
    monkeypatch.setattr(reader, "_PREADV", lambda fd, batch, at: read.append(count := preadv(fd, batch, at)) or count)
    found = store.find(FINGERPRINT, "", token_key([*range(250), -5]), 251)
    assert found is not None and found.length == 250 and found.entry.path == paths[2]
    caches = kinds.lend(store.restore(found.entry), 250)
    assert same(caches, grown(250, dim=64))
    assert sum(read) == 300 * 2 * 2 * 2 * 64 * 4


@pytest.mark.parametrize(("token", "kept"), [(50, 0), (150, 1), (250, 2)])
def test_other_numbers_for_the_same_tokens_are_not_continued(tmp_path, token, kept):
    store = scanned(tmp_path / "c")
    paths = talk(store, 100, 200, 300)
    other = grown(400)
    other[1].values[0, 1, token, 3] += 1e-3  # one number of one token of one layer
    last = save(store, job(range(400), other))
    assert meta(last).start == 100 * kept
    # Those that nobody continues any more are served by the new one.
    assert [path.exists() for path in paths] == [True] * kept + [False] * (3 - kept)
    assert same(restore(scanned(store.root), range(400)), other)


def test_the_queue_writes_whole_what_cannot_continue(tmp_path):
    store = scanned(tmp_path / "c")
    queue = SpillQueue(store, lambda: False, debounce=0.0)
    try:
        queue.offer(job(range(100), grown(100)))
        assert flush(queue).durable
        queue.offer(job(range(150), grown(150)))
        assert flush(queue).durable
        other = grown(200, seed=5)
        queue.offer(job(range(200), kinds.lend(other)))
        result = flush(queue)
        assert result.durable and result.failed == 0 and queue.stats()["failed"] == 0
        assert (store.stats()["continued"], store.stats()["not_identical"]) == (1, 1)
        assert same(restore(scanned(store.root), range(200)), other)
        assert list((store.root / "tmp").iterdir()) == []
    finally:
        queue.close()


def test_conversations_that_part_share_what_they_have_in_common(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    (base,) = talk(store, 300)
    left, right = grown(400), grown(380)
    a = save(store, job([*range(300), *range(1000, 1100)], left))
    b = save(store, job([*range(300), *range(2000, 2080)], right))
    assert meta(a).start == meta(b).start == 300 and base.exists()
    store = scanned(root)
    assert same(restore(store, [*range(300), *range(1000, 1100)]), left)
    assert same(restore(store, [*range(300), *range(2000, 2080)]), right)


def test_an_answer_that_came_back_in_other_tokens_is_cut_off(tmp_path):
    """A chat template may drop or spell anew the end of what was generated: the rest is continued all the same."""
    root = tmp_path / "c"
    store = scanned(root)
    (first,) = talk(store, 300)
    tokens = [*range(280), *range(1000, 1100)]
    caches = grown(380)
    for cache in caches:
        cache.keys[:, :, 280:] += 1
    second = save(store, job(tokens, caches))
    assert (meta(second).start, meta(second).parent) == (280, first.name[:32])
    third_tokens = [*tokens[:350], *range(5000, 5050)]
    third = save(store, job(third_tokens, grown_on(caches, 350, 400)))
    assert meta(third).start == 350
    store = scanned(root)
    assert same(restore(store, range(300)), grown(300))
    assert same(restore(store, tokens), caches)
    assert same(restore(store, third_tokens), grown_on(caches, 350, 400))


def grown_on(caches, cut, tokens):
    """These caches cut and continued."""
    longer = kinds.lend(caches, cut)
    for cache in longer:
        more = mx.full((1, 2, tokens - cut, 8), 0.5)
        cache.update_and_fetch(more, more)
    return longer


def test_a_long_useless_tail_is_not_kept_alive(tmp_path):
    """Two chats that share a short system prompt have nothing to do with each other."""
    store = scanned(tmp_path / "c")
    (first,) = talk(store, 900)
    second = save(store, job([*range(100), *range(1000, 1100)], grown(200)))
    assert meta(second).start == 0


def test_the_part_before_a_long_useless_tail_is_continued(tmp_path):
    store = scanned(tmp_path / "c")
    first, second = talk(store, 100, 900)
    third = save(store, job([*range(120), *range(1000, 1100)], grown(220)))
    assert (meta(third).start, meta(third).parent) == (100, first.name[:32])
    assert same(restore(scanned(store.root), [*range(120), *range(1000, 1100)]), grown(220))


def test_what_may_not_be_reused_so_early_is_not_continued(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    talk(store, 100)
    monkeypatch.setattr(kinds, "minimum_reusable", lambda caches: 120)
    assert meta(talk(store, 200)[0]).start == 0


def test_a_chain_at_its_longest_is_followed_by_a_whole_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "MAX_CHAIN", 4)
    monkeypatch.setattr(segments, "MAX_CHAIN", 4)
    root = tmp_path / "c"
    store = scanned(root)
    fork = [*range(20), *range(500, 520)]
    save(store, job(range(20), grown(20)))
    save(store, job(fork, grown(40)))
    paths = talk(store, 40, 60, 80)
    (whole,) = talk(store, 100)
    assert meta(whole).start == 0 and store.stats()["compactions"] == 1
    assert not any(path.exists() for path in paths)
    # The first segment is the fork's as well.
    assert len(files(root)) == 3 and same(restore(store, fork), grown(40))
    (next_,) = talk(store, 120)
    assert meta(next_).start == 100
    store = scanned(root)
    assert same(restore(store, range(120)), grown(120)) and same(restore(store, fork), grown(40))


@pytest.mark.parametrize("fault", ["deleted", "flipped header", "flipped body", "another of these tokens", "replaced by a link"])
@pytest.mark.parametrize("when", ["before the scan", "after the scan"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_broken_parent_makes_misses_of_those_that_need_it(tmp_path, fault, when, which):
    root = tmp_path / "c"
    paths = talk(scanned(root), 100, 200, 300, 400)
    broken = paths[which]
    store = scanned(root) if when == "after the scan" else None
    if fault == "deleted":
        broken.unlink()
    elif fault.startswith("flipped"):
        content = bytearray(broken.read_bytes())
        content[500 if fault == "flipped header" else -3] ^= 1
        broken.write_bytes(content)
    elif fault == "replaced by a link":
        broken.rename(tmp_path / "elsewhere")
        broken.symlink_to(tmp_path / "elsewhere")
    else:
        other = scanned(tmp_path / "other")
        twins = [save(other, job(range(n), grown(n, seed=7))) for n in (100, 200)]
        broken.write_bytes(twins[which].read_bytes())
    store = store or scanned(root)
    assert restore(store, range(400)) is None
    assert restore(store, range(300)) is None
    if which == 1:
        assert same(restore(store, range(100)), grown(100))
    found = restore(store, range(100 * (which + 1)))
    assert found is None or fault == "another of these tokens" and same(found, grown(100 * (which + 1), seed=7))
    stats = store.stats()
    assert stats["read_errors"] == 0
    # What was lost can be stored again.
    save(store, job(range(400), grown(400)))
    assert same(restore(scanned(root), range(400)), grown(400))


def test_what_lacks_its_parent_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SIDE_ROOM", 0)
    root = tmp_path / "c"
    store = scanned(root)
    old = save(store, job(range(5000, 5100), plain(100)))
    first, second = talk(store, 100, 200)
    first.unlink()
    store = scanned(root)
    assert store.stats()["scans"][FINGERPRINT]["without parent"] == 1
    usage = store._directory.usage()
    scanned(root, usage - 4096)
    assert old.exists() and not second.exists()


def test_eviction_takes_the_end_of_the_chain_used_least(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SIDE_ROOM", 0)
    root = tmp_path / "c"
    store = scanned(root)
    a = talk(store, 100, 200, 300)
    b = [save(store, job(range(3000, 3000 + n), grown(n, seed=3))) for n in (100, 200)]
    assert store.touch(FINGERPRINT, "", token_key(range(200)))
    assert a[1].stat().st_mtime_ns > b[1].stat().st_mtime_ns > a[2].stat().st_mtime_ns
    gone = []
    while len(files(root)) > 1:
        before = set(files(root))
        store = scanned(root, store._directory.usage() - 4096)
        (went,) = before - set(files(root))
        gone.append(went)
        assert store.stats()["scans"][FINGERPRINT]["without parent"] == 0
    assert gone == [a[2], b[1], b[0], a[1]]


def test_no_time_stamp_makes_a_parent_go_before_its_children(tmp_path, monkeypatch):
    """Times may come back from a backup in any order."""
    monkeypatch.setattr(directory, "SIDE_ROOM", 0)
    root = tmp_path / "c"
    store = scanned(root)
    first, second, third = talk(store, 100, 200, 300)
    lone = save(store, job(range(5000, 5100), grown(100, seed=2)))
    lately = time.time_ns() - 10**12  # nothing is so old that it goes for that
    for age, path in enumerate((third, lone, second, first)):
        os.utime(path, ns=(lately - age * 10**9,) * 2)
    order = []
    while len(files(root)) > 1:
        before = set(files(root))
        scanned(root, store._directory.usage() - 4096).close()
        order += before - set(files(root))
    assert order == [lone, third, second]
    assert scanned(root).clear() == 1


def test_clearing_ignores_time_stamps_too(tmp_path, monkeypatch):
    root = tmp_path / "c"
    store = scanned(root)
    paths = talk(store, 100, 200, 300)
    for age, path in enumerate(reversed(paths)):
        os.utime(path, ns=(time.time_ns() - (age + 1) * 10**9,) * 2)
    order = []
    unlink = type(paths[0]).unlink
    monkeypatch.setattr(type(paths[0]), "unlink", lambda self, **options: order.append(self) or unlink(self, **options))
    assert store.clear() == 3 and order == paths[::-1]


def test_making_room_for_a_child_spares_its_chain_and_keeps_others_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SIDE_ROOM", 0)
    root = tmp_path / "c"
    store = scanned(root)
    (base,) = talk(store, 100)
    other = [*range(100), *range(5000, 5400)]
    forks = [save(store, job(other[:n], grown(n))) for n in (200, 300, 400)]
    usage = store._directory.usage()
    store = scanned(root, usage + 4096)
    (child,) = talk(store, 220)
    assert meta(child).start == 100 and base.exists()
    left = [path.exists() for path in forks]
    assert left == sorted(left, reverse=True) and not all(left)
    assert scanned(root).stats()["scans"][FINGERPRINT]["without parent"] == 0


def test_a_parent_deleted_while_its_child_is_written_is_noticed(tmp_path):
    store = scanned(tmp_path / "c")
    (first,) = talk(store, 100)
    from mlx_lm_tiered.cold.arrays import to_bytes
    from mlx_lm_tiered.cold.jobs import describe
    from mlx_lm_tiered.cold.store import NotIdentical

    child = job(range(200), grown(200))
    described, tensors = describe(child)
    writer = store.begin(*child.place, described)
    for name, array in tensors.items():
        writer.write(name, to_bytes(array))
    first.unlink()
    with pytest.raises(NotIdentical):
        writer.commit()
    writer.abort()
    assert files(store.root) == [] and list((store.root / "tmp").iterdir()) == []
    assert meta(save(store, child)).start == 0


def test_a_parent_found_damaged_while_its_child_is_put_in_place(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    (first,) = talk(store, 100)
    publish = directory.Directory.publish

    def meanwhile(self, partial, path):
        publish(self, partial, path)
        monkeypatch.undo()
        store._catalog.forget(first)

    monkeypatch.setattr(directory.Directory, "publish", meanwhile)
    (second,) = talk(store, 200)
    assert meta(second).start == 0 and same(restore(scanned(store.root), range(200)), grown(200))


@pytest.mark.parametrize("cut", [False, True])
def test_a_parent_that_cannot_be_read_is_not_continued(tmp_path, monkeypatch, cut):
    store = scanned(tmp_path / "c")
    (first,) = talk(store, 100)
    tokens = [*range(90), *range(500, 600)] if cut else list(range(190))
    pread = os.pread

    def broken(fd, size, at):
        if at >= 4096 or not cut:
            raise OSError(errno.EIO, "I/O error")
        return pread(fd, size, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        second = save(store, job(tokens, grown(190)))
    assert meta(second).start == 0
    assert same(restore(scanned(store.root), tokens), grown(190))


def test_tokens_that_others_continue_keep_their_file(tmp_path):
    """Another process that computed the same tokens with other numbers must not take the ground from under a chain."""
    ours, theirs = scanned(tmp_path / "c"), scanned(tmp_path / "c")
    first, second = talk(ours, 100, 200)
    content = first.read_bytes()
    assert save(theirs, job(range(100), grown(100, seed=9))) == first
    assert first.read_bytes() == content
    assert same(restore(theirs, range(100)), grown(100))
    assert same(restore(ours, range(200)), grown(200))


def test_two_processes_continue_the_same_entry(tmp_path):
    ours = scanned(tmp_path / "c")
    talk(ours, 100)
    theirs = scanned(tmp_path / "c")
    talk(ours, 200)
    b = save(theirs, job([*range(100), *range(700, 800)], grown(200)))
    assert meta(b).start == 100
    c = talk(theirs, 300)[0]
    assert meta(c).start == 100  # it does not know of ours
    for store in (ours, theirs, scanned(tmp_path / "c")):
        assert restore(store, range(200)) is not None
    assert same(restore(scanned(tmp_path / "c"), range(300)), grown(300))


def test_an_entry_does_not_continue_itself(tmp_path):
    """Its fork, deleted by another process, would lead to it."""
    store = scanned(tmp_path / "c")
    (first,) = talk(store, 200)
    tokens = [*range(180), *range(900, 1000)]
    fork = save(store, job(tokens, grown(280)))
    assert meta(fork).start == 180
    fork.unlink()
    assert talk(store, 200) == [first]
    assert meta(first).start == 0 and same(restore(scanned(store.root), range(200)), grown(200))


def test_durable_means_the_whole_chain(tmp_path):
    store = scanned(tmp_path / "c")
    first, second = talk(store, 100, 200)
    assert store.covers(FINGERPRINT, "", token_key(range(200)))
    first.unlink()
    assert not store.covers(FINGERPRINT, "", token_key(range(200)))
    assert store.stats()["entries"] == 0


def test_the_listing_says_what_lacks_its_parent(tmp_path):
    store = scanned(tmp_path / "c")
    first, second, third = talk(store, 100, 200, 300)
    assert all(item.problem == "" for item in entries(store.root)) and check(third) == ""
    first.unlink()
    assert {item.path: bool(item.problem) for item in entries(store.root)} == {second: True, third: True}


def test_a_restore_needs_the_entry_and_one_tensor(tmp_path):
    talk(scanned(tmp_path / "c"), *range(200, 2001, 200), layers=8, dim=256)
    store = scanned(tmp_path / "c")
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches = restore(store, range(2000))
    peak = mx.get_peak_memory() - before
    assert peak <= sum(c.nbytes for c in caches) + caches[0].keys.nbytes


def test_entries_of_the_format_before_are_left_alone_until_room_is_needed(tmp_path, monkeypatch):
    from mlx_lm_tiered.cold import format as fmt

    root = tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "VERSION", "1")
        (old,) = [save(scanned(root), job(range(100), grown(100)))]
    store = scanned(root)
    assert store.stats()["entries"] == 0 and store.stats()["corrupt"] == 0 and old.exists()
    assert restore(store, range(100)) is None
    talk(store, 100)
    assert same(restore(scanned(root), range(100)), grown(100))
