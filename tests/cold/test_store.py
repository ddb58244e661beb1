"""The store: finding, restoring, recency, supersession, the scan."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time

import mlx.core as mx
import pytest
from cold_helpers import (
    FINGERPRINT,
    IDENTITY,
    job,
    plain,
    recurrent,
    restore,
    same,
    save,
    scanned,
    wrapped,
)  # fmt: skip

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold import directory, scan
from mlx_lm_tiered.cold.listing import check, entries
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.identity import Identity
from mlx_lm_tiered.index.keys import token_key

OTHER = Identity("cd" * 16, {})


def find(store, tokens, limit=None, namespace=""):
    tokens = list(tokens)
    found = store.find(FINGERPRINT, namespace, token_key(tokens), len(tokens) if limit is None else limit)
    return found.length if found else 0


def test_an_entry_survives_a_restart_bit_for_bit(tmp_path):
    caches = plain(300, layers=3, dtype=mx.bfloat16)
    save(scanned(tmp_path / "c"), job(range(300), caches))
    store = scanned(tmp_path / "c")
    found = restore(store, range(300))
    assert found is not None and same(found, caches)
    stats = store.stats()
    assert stats["restores"] == 1 and stats["restored_tokens"] == 300 and stats["restore_seconds_last"] > 0


def test_the_first_step_after_a_restore_writes_in_place(tmp_path):
    save(scanned(tmp_path / "c"), job(range(256), plain(256)))
    (cache, _) = restore(scanned(tmp_path / "c"), range(256))
    shape = cache.keys.shape
    cache.update_and_fetch(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8)))
    assert cache.keys.shape == shape and cache.offset == 257


def test_a_wrapped_ring_and_a_recurrent_state_come_back(tmp_path):
    store = scanned(tmp_path / "c")
    ring, state = wrapped(41), recurrent()
    save(store, job(range(41), ring))
    save(store, job(range(500, 507), state))
    store = scanned(tmp_path / "c")
    back = restore(store, range(41))
    step = mx.ones((1, 2, 1, 8))
    for a, b in zip(ring, back, strict=True):
        for x, y in zip(a.update_and_fetch(step, step), b.update_and_fetch(step, step), strict=True):
            assert mx.array_equal(x, y).item()
    (found,) = restore(store, range(500, 507))
    assert all(mx.array_equal(found[i], state[0][i]).item() for i in (0, 1))


def test_find_serves_the_longest_prefix_that_may_be_cut(tmp_path):
    store = scanned(tmp_path / "c")
    save(store, job(range(40)))
    save(store, job(range(1000, 1041), wrapped(41)))
    assert find(store, range(50)) == 40
    assert find(store, range(40), limit=39) == 39
    assert find(store, [*range(20), 7]) == 20
    assert find(store, [7, *range(20)]) == 0
    assert find(store, range(50), namespace="other") == 0
    assert find(store, range(1000, 1041)) == 41
    assert find(store, range(1000, 1050)) == 41
    assert find(store, range(1000, 1041), limit=40) == 0
    assert store.find(OTHER.fingerprint, "", token_key(range(40)), 40) is None
    assert store.find(FINGERPRINT, "", b"", 0) is None


def test_the_minimum_reusable_offset_is_kept_and_honoured(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "minimum_reusable", lambda caches: 10)
    save(scanned(tmp_path / "c"), job(range(40)))
    store = scanned(tmp_path / "c")
    assert find(store, range(10)) == 10
    assert find(store, range(9)) == 0


def test_a_longer_entry_supersedes_what_it_can_serve(tmp_path):
    store = scanned(tmp_path / "c")
    short = save(store, job(range(20)))
    unrelated = save(store, job(range(5, 25)))
    long = save(store, job(range(40)))
    assert not short.exists() and unrelated.exists() and long.exists()
    assert store.stats()["entries"] == 2 and store.stats()["superseded"] == 1
    assert store.covers(FINGERPRINT, "", token_key(range(20)))
    assert not store.covers(FINGERPRINT, "", token_key(range(41)))


def test_an_uncuttable_entry_supersedes_nothing_but_its_like(tmp_path):
    store = scanned(tmp_path / "c")
    short = save(store, job(range(33), wrapped(33)))
    long = save(store, job(range(41), wrapped(41)))
    assert short.exists() and long.exists()
    assert save(store, job(range(41), wrapped(41))) == long
    assert store.stats()["entries"] == 2
    assert not store.covers(FINGERPRINT, "", token_key(range(40)))


def test_an_ancestor_below_the_minimum_reusable_offset_stays(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    short = save(store, job(range(20)))
    monkeypatch.setattr(kinds, "minimum_reusable", lambda caches: 30)
    save(store, job(range(40)))
    assert short.exists()


def test_recency_counts_uses_over_restarts(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SIDE_ROOM", 0)
    root = tmp_path / "c"
    store = scanned(root)
    paths = [save(store, job(range(1000 * i, 1000 * i + 100))) for i in range(4)]
    size = paths[0].stat().st_size
    store = scanned(root)
    restore(store, range(0, 100))
    store.touch(FINGERPRINT, "", token_key(range(1000, 1050)))
    used = [path.stat().st_mtime_ns for path in paths]
    assert used[2] < used[3] < used[0] < used[1]
    # A cap that two of them exceed.
    usage = store._directory.usage()
    scanned(root, usage - size - 4096)
    assert [path.exists() for path in paths] == [True, True, False, False]


def test_files_and_directories_are_for_the_owner_only(tmp_path):
    root = tmp_path / "c"
    old = os.umask(0)
    try:
        store = scanned(root)
        path = save(store, job(range(20)))
        path.write_bytes(b"broken")
        scanned(root)
    finally:
        os.umask(old)
    seen = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    assert any("quarantine/" in str(path) for path in seen)
    for path, mode in seen.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("when", ["before the scan", "after the scan"])
def test_a_damaged_file_is_a_miss_and_put_away_once(tmp_path, caplog, when):
    root = tmp_path / "c"
    path = save(scanned(root), job(range(50)))
    store = scanned(root) if when == "after the scan" else None
    content = bytearray(path.read_bytes())
    content[(len(content) - 5) if store else 100] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "mlx_lm_tiered"):
        store = store or scanned(root)
        assert restore(store, range(50)) is None
        assert restore(store, range(50)) is None
    assert len(caplog.records) == 1
    assert not path.exists() and len(list((root / "quarantine").iterdir())) == 1
    stats = store.stats()
    assert stats["corrupt"] == stats["quarantined"] == 1 and stats["entries"] == 0
    save(store, job(range(50)))
    assert restore(store, range(50)) is not None


def test_caches_that_do_not_fit_their_header_are_refused(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    monkeypatch.setattr(kinds, "load", lambda descriptors, arrays: plain(49))
    save(store, job(range(50)))
    assert restore(store, range(50)) is None
    assert store.stats()["quarantined"] == 1


def test_verification_is_measured_asked_for_or_left_out(tmp_path):
    root = tmp_path / "c"
    caches = plain(50)
    path = save(scanned(root), job(range(50), caches))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    found = restore(scanned(root, verify="never"), range(50))
    assert found is not None and not same(found, caches)
    assert restore(scanned(root, verify="always"), range(50)) is None
    with pytest.raises(ValueError):
        ColdStore(root, 1 << 20, verify="sometimes")


def test_automatic_verification_stops_where_hashing_costs_more_than_reading():
    from mlx_lm_tiered.cold.health import Checking

    checking = Checking("auto")
    assert checking.wanted()
    checking.measured(100, 1.0, 0.5)
    assert checking.wanted()
    for _ in range(10):
        checking.measured(100, 1.0, 5.0)
    wanted = [checking.wanted() for _ in range(32)]
    assert wanted.count(True) == 2
    for _ in range(20):
        checking.measured(100, 9.0, 5.0)
    assert checking.wanted()


def test_automatic_verification_checks_every_file_once(tmp_path, monkeypatch):
    root = tmp_path / "c"
    store = scanned(root)
    caches = {start: plain(50, seed=start) for start in (0, 1000, 2000)}
    for start, held in caches.items():
        save(store, job(range(start, start + 50), held))
    store = scanned(root)
    for _ in range(10):
        store._checking.measured(100, 1.0, 5.0)  # hashing does not pay here
    for path in sorted((root / "v1").rglob("*.safetensors"))[:2]:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    found = [restore(store, range(start, start + 50)) for start in caches]
    assert found.count(None) == 2
    assert all(f is None or same(f, held) for f, held in zip(found, caches.values(), strict=True))
    (whole,) = (start for start, f in zip(caches, found, strict=True) if f is not None)
    hashed = []
    monkeypatch.setattr("mlx_lm_tiered.cold.restore.Assembly.fill", _noting(hashed))
    restore(store, range(whole, whole + 50))
    assert hashed == [False]


def _noting(hashed):
    from mlx_lm_tiered.cold.reader import Assembly

    fill = Assembly.fill

    def noting(self, reader, until, verify):
        hashed.append(verify)
        fill(self, reader, until, verify)

    return noting


def test_links_in_the_directory_are_not_followed(tmp_path):
    root = tmp_path / "c"
    path = save(scanned(root), job(range(50)))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    store = scanned(root)
    assert store.stats()["entries"] == 0 and path.is_symlink()
    folder = path.parent
    path.unlink()
    folder.rmdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    folder.symlink_to(outside)
    with pytest.raises(OSError):
        save(store, job(range(50)))
    assert list(outside.iterdir()) == []


def test_entries_of_other_models_are_counted_and_kept(tmp_path, caplog):
    root = tmp_path / "c"
    store = scanned(root)
    save(store, job(range(50)))
    writer_path = store._directory.entry_path(OTHER.fingerprint, "", token_key(range(60)))
    from mlx_lm_tiered.cold.arrays import to_bytes
    from mlx_lm_tiered.cold.jobs import describe

    other = job(range(60), identity=OTHER)
    meta, tensors = describe(other)
    writer = store.begin(*other.place, meta)
    for name, array in tensors.items():
        writer.write(name, to_bytes(array))
    writer.commit()
    with caplog.at_level(logging.INFO, "mlx_lm_tiered"):
        store = scanned(root)
    (line,) = [r.getMessage() for r in caplog.records if "scanned" in r.getMessage()]
    assert "scanned 1, indexed 1, skipped: 1 other models" in line
    assert writer_path.exists() and store.stats()["entries"] == 1
    # A swapped-in model finds its own.
    store.attach(OTHER.fingerprint)
    assert store.wait_scanned(10)
    assert store.find(OTHER.fingerprint, "", token_key(range(60)), 60).length == 60


def test_the_scan_of_many_entries_delays_nothing_and_loses_nothing(tmp_path, monkeypatch):
    root = tmp_path / "c"
    store = scanned(root)
    first = save(store, job(range(64)))
    content = first.read_bytes()
    # Other tokens in the same file: the tokens' and the header's checksums are made anew.
    import struct

    from mlx_lm_tiered.cold import format as fmt
    from mlx_lm_tiered.cold.family import entry_name

    header = fmt.parse(content[: 8 + struct.unpack("<Q", content[:8])[0]], len(content))
    count = 400
    for i in range(count):
        tokens = [i + 10] * 64
        raw = struct.pack("<64q", *tokens)
        head = fmt.layout(header.meta)
        fmt.seal(head, [fmt.digest(raw), *header.checksums[1:]])
        (first.parent / entry_name("", token_key(tokens))).write_bytes(head + raw + content[len(head) + len(raw) :])
    # No file is read before we say so.
    looked, real = threading.Event(), scan.read_segment
    monkeypatch.setattr(scan, "read_segment", lambda path: real(path) if looked.wait(30) else None)
    started = time.perf_counter()
    store = ColdStore(root, 1 << 30)
    store.attach(FINGERPRINT)
    assert store.find(FINGERPRINT, "", token_key([1, 2]), 2) is None
    ready = time.perf_counter() - started
    during = list(range(7000, 7064))
    save(store, job(during))
    assert store.stats()["scanning"] and ready < 1
    looked.set()
    assert store.wait_scanned(60)
    assert store.stats()["entries"] == count + 2
    assert find(store, during) == 64


def test_the_listing_names_everything_and_what_is_wrong(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    good = save(store, job(range(50), role="system"))
    bad = save(store, job(range(100, 150)))
    bad.write_bytes(bad.read_bytes()[:-1])
    listed = {item.path: item for item in entries(root)}
    assert set(listed) == {good, bad} == {item.path for item in store.entries()}
    meta = listed[good].meta
    assert (meta.length, meta.role, meta.signatures, meta.provenance) == (50, "system", ("kv:plain", "kv:plain"), IDENTITY.provenance)
    assert listed[bad].meta is None and listed[bad].problem
    assert check(good) == "" and check(bad)
    content = bytearray(good.read_bytes())
    content[-1] ^= 1
    good.write_bytes(content)
    assert "checksum" in check(good)


def test_clear_deletes_what_is_ours_and_nothing_else(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    path = save(store, job(range(50)))
    note = root / "v1" / "note.txt"
    note.write_text("mine")
    assert store.clear(OTHER.fingerprint) == 0 and path.exists()
    assert store.clear() == 1 and not path.exists() and note.exists()
    assert find(store, range(50)) == 0


def test_restoring_takes_the_entry_and_at_most_one_tensor_more(tmp_path):
    """Peaks of mlx and of the process, measured in a process of its own."""
    layers, tokens = 8, 8192
    save(scanned(tmp_path / "c"), job(range(tokens), plain(tokens, layers=layers, dim=64)))
    script = """
import json, resource, sys, pathlib
import mlx.core as mx
from cold_helpers import scanned, restore
store = scanned(pathlib.Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
mx.reset_peak_memory()
caches = restore(store, range(int(sys.argv[2])))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([mx.get_peak_memory(), sum(c.nbytes for c in caches), caches[0].keys.nbytes, after - before]))
"""
    from pathlib import Path

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    output = subprocess.run([sys.executable, "-c", script, tmp_path / "c", str(tokens)], env=environment, capture_output=True, text=True, check=True)
    peak, entry, tensor, grown = json.loads(output.stdout)
    assert entry > 60e6
    assert peak <= entry + tensor
    assert grown <= entry + tensor + 8e6
