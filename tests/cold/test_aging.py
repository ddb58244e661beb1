"""Entries of fingerprints that nothing uses any more go: first under the cap, and in the end without it."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from cold_helpers import FINGERPRINT, IDENTITY, grown, job, restore, save, scanned

from mlx_lm_tiered.cold import aging
from mlx_lm_tiered.cold.aging import UNUSED
from mlx_lm_tiered.identity import Identity, environment

HERE = {name: environment()[name] for name in ("mlx", "mlx_lm")}
CURRENT = replace(IDENTITY, provenance=HERE)


def identity(digits: str, **made: str) -> Identity:
    return Identity(digits * 16, {**HERE, **made})


def age(paths, seconds: float) -> None:
    stamp = time.time_ns() - int(seconds * 1e9)
    for path in paths:
        os.utime(path, ns=(stamp, stamp))


def entries(root) -> set:
    return set((root / "v1").rglob("*.safetensors"))


def test_a_stale_fingerprint_goes_before_a_live_one_and_a_used_one_after(tmp_path):
    """Whose model it is does not matter to the cap, only when it was used."""
    root, cap = tmp_path / "c", 700_000
    store = scanned(root, cap)
    stale = [save(store, job(range(1000 * i, 1000 * i + 200), identity=identity("01", mlx="0.1"))) for i in range(3)]
    live = [save(store, job(range(1000 * i, 1000 * i + 200))) for i in range(3)]
    age(stale[:2], 500)
    age(live, 300)
    age(stale[2:], 100)  # someone with the other version used it since
    gone = []
    for i in range(10, 30):
        before = entries(root)
        save(store, job(range(1000 * i, 1000 * i + 200)))
        gone += sorted(before - entries(root), key=[*stale[:2], *live, stale[2]].index)
        if len(gone) >= 6:
            break
    assert set(gone[:2]) == set(stale[:2]) and set(gone[2:5]) == set(live) and gone[5] == stale[2]


@pytest.mark.parametrize(
    ("made", "days", "goes"),
    [
        ({"mlx": "0.1"}, 31, True), ({"mlx_lm": "0.1"}, 31, True), ({"mlx": "0.1"}, 29, False), ({}, 400, False),
    ],
    ids=["another mlx", "another mlx-lm", "used lately", "this one's"],
)  # fmt: skip
def test_far_below_the_cap_what_nothing_here_can_use_goes_after_a_month(tmp_path, made, days, goes):
    root = tmp_path / "c"
    store = scanned(root)
    other = identity("01", **made)
    paths = [save(store, job(range(n), grown(n), identity=other)) for n in (30, 60, 90)]
    live = save(store, job(range(30), identity=CURRENT))
    age(paths, days * 24 * 3600)
    store.close()
    store = scanned(root)
    assert entries(root) == ({live} if goes else {live, *paths})
    assert store.stats()["aged_out"] == (3 if goes else 0)
    assert (root / "v1" / other.fingerprint).exists() != goes
    assert restore(store, range(30)) is not None


def test_one_use_spares_a_whole_fingerprint(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    paths = [save(store, job(range(1000 * i, 1000 * i + 50), identity=identity("01", mlx="0.1"))) for i in range(3)]
    age(paths[:2], 2 * UNUSED)
    assert aging.age_out(store._directory) == []


def test_damaged_files_and_what_lacks_its_parent_go_too(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    root_file, child = (save(store, job(range(n), grown(n), identity=CURRENT)) for n in (30, 60))
    whole = save(store, job(range(500, 530), identity=CURRENT))
    bad = root / "quarantine" / f"{'0' * 32}.17.bad"
    bad.write_bytes(b"x" * 100)
    root_file.unlink()
    age([child, whole], 2 * UNUSED)
    aging.age_out(store._directory)
    assert entries(root) == {whole} and bad.exists()
    age([bad], 2 * UNUSED)
    aging.age_out(store._directory)
    assert not bad.exists() and entries(root) == {whole}


def test_a_server_that_runs_for_long_ages_too(tmp_path):
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    from mlx_lm_tiered.cold.store import ColdStore

    clock = Clock()
    store = ColdStore(tmp_path / "c", 1 << 30, clock=clock)
    store.attach(FINGERPRINT)
    assert store.wait_scanned(10)
    save(scanned(tmp_path / "c"), job(range(30), identity=identity("01", mlx="0.1")))
    (old,) = entries(store.root)
    ours = save(store, job(range(30), identity=replace(IDENTITY, provenance={"mlx": "0.1"})))
    age([old, ours], 2 * UNUSED)
    clock.now += 25 * 3600
    store.attach(FINGERPRINT)
    assert store._indexing.wait_looked(10)
    assert entries(store.root) == {ours}, "what is served here stays"
    store.close()
