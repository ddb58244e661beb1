"""Companion state on disk: whole or not at all."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from cold_helpers import FINGERPRINT, IDENTITY, flush, grown, job, recurrent, same, save, scanned

from mlx_lm_hooks import Companion
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.checking import BadEntry, ForeignEntry
from mlx_lm_tiered.cold.jobs import Job, describe
from mlx_lm_tiered.cold.reader import open_entry
from mlx_lm_tiered.cold.spill import SpillQueue
from mlx_lm_tiered.index.keys import token_key

PLACE = "companion:draft/1"
HELD = Companion("draft", 1, {"rows": [1, 2], "text": "x"}, {"hidden": mx.arange(5), "keys": mx.ones((2, 3), mx.bfloat16)})


def beside(tokens: int, companion: Companion = HELD, caches: list | None = None, namespace: str = PLACE) -> Job:
    return Job(IDENTITY, namespace, token_key(range(tokens)), grown(tokens) if caches is None else caches, "user", companion=companion)


def found(store, tokens: int):
    return store.find(FINGERPRINT, PLACE, token_key(range(tokens)), tokens)


def equal(a: Companion, b: Companion) -> bool:
    return (a.schema, a.version, a.scalars) == (b.schema, b.version, b.scalars) and all(
        mx.array_equal(a.tensors[name], b.tensors[name]).item() for name in {*a.tensors, *b.tensors}
    )


def test_it_comes_back_with_exactly_its_tokens_and_through_chains(tmp_path):
    store = scanned(tmp_path / "cold")
    save(store, job(range(100), grown(100)))
    for n in (160, 200):
        save(store, beside(n, Companion("draft", 1, {"n": n}, {"hidden": mx.arange(n)})))
    for one in (store, scanned(store.root)):
        for n in (160, 200):
            entry = found(one, n).entry
            caches = one.restore(entry)
            assert entry.length == n and caches.companion.scalars == {"n": n} and caches.companion.tensors["hidden"].size == n
            assert same(caches, grown(n))
        assert [e.start for e in found(one, 200).entry.chain] == [0, 100, 160]


def test_purely_recurrent_state_has_it_too(tmp_path):
    store = scanned(tmp_path / "cold")
    caches = recurrent()
    save(store, beside(50, caches=caches))
    back = scanned(store.root)
    restored = back.restore(found(back, 50).entry)
    assert equal(restored.companion, HELD) and mx.array_equal(restored[0][0], caches[0][0])


def test_the_queue_writes_it_and_no_longer_entry_stands_in_for_it(tmp_path):
    store = scanned(tmp_path / "cold")
    queue = SpillQueue(store, busy=lambda: False, debounce=0)
    try:
        bytes_before = queue.stats()["pending_bytes"]
        queue.offer(beside(100))
        plain = sum(cache.nbytes for cache in grown(100))
        assert queue.stats()["pending_bytes"] - bytes_before == plain + HELD.tensors["hidden"].nbytes + HELD.tensors["keys"].nbytes
        queue.offer(job(range(150), grown(150)))
        queue.offer(beside(150))
        assert flush(queue).durable
    finally:
        queue.close()
    for n in (100, 150):
        assert equal(store.restore(found(store, n).entry).companion, HELD) and found(store, n).entry.length == n
    # Covered is what is there with its companion state, not what a longer entry could serve of the caches.
    assert not store.covers(FINGERPRINT, PLACE, token_key(range(120)))
    assert store.covers(FINGERPRINT, "", token_key(range(120)))


def test_a_reader_of_the_version_before_leaves_it_alone(tmp_path, monkeypatch):
    store = scanned(tmp_path / "cold")
    path = save(store, beside(60))
    plain = save(store, job(range(500, 560)))
    monkeypatch.setattr(fmt, "COMPANION_VERSION", "")  # one that only knows the other
    with pytest.raises(ForeignEntry), open_entry(path):
        pass
    old = scanned(store.root)
    assert found(old, 60) is None and path.exists() and not list((store.root / "quarantine").iterdir())
    with open_entry(plain) as reader:
        assert reader.header.meta.companion is None


def header_with(tmp_path, change) -> bytes:
    """A header whose companion state was changed before it was sealed."""
    meta, _ = describe(beside(10))
    text = bytes(fmt.layout(meta))[8:]
    table = json.loads(text)
    change(table)
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % fmt.ALIGNMENT)
    header = bytearray(len(text).to_bytes(8, "little") + text)
    fmt.seal(header, ())
    return bytes(header)


def edit(**values):
    def change(table):
        beside_it = json.loads(table["__metadata__"]["companion"])
        table["__metadata__"]["companion"] = json.dumps(beside_it | values)

    return change


def version(text: str):
    return lambda table: table["__metadata__"].update(version=text)


@pytest.mark.parametrize(
    "change",
    [
        edit(tensors=["hidden"]), edit(tensors=["keys", "hidden"]), edit(tensors=["hidden", "keys", "more"]), edit(tensors=[]),
        edit(tensors="hidden"), edit(schema="../x"), edit(schema=3), edit(version=-1), edit(version=True), edit(version="1"),
        edit(scalars=[1]), edit(scalars={"x": "y" * (2 << 20)}), edit(more=1), version("2"),
        lambda table: table["__metadata__"].pop("companion"),
        lambda table: table["__metadata__"].update(companion="{"),
    ],
)  # fmt: skip
def test_what_no_writer_writes_is_refused(tmp_path, change):
    sound = header_with(tmp_path, lambda table: None)
    size = len(sound) + fmt.file_size(describe(beside(10))[0]) - len(fmt.layout(describe(beside(10))[0]))
    assert fmt.parse(sound, size).meta.companion.kind == "draft/1"
    changed = header_with(tmp_path, change)
    with pytest.raises(BadEntry):
        fmt.parse(changed, size - len(sound) + len(changed))


def test_a_flipped_bit_of_it_is_noticed(tmp_path):
    store = scanned(tmp_path / "cold", verify="always")
    path = save(store, beside(60))
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    again = scanned(store.root, verify="always")
    assert again.restore(found(again, 60).entry) is None and again.stats()["quarantined"] == 1
