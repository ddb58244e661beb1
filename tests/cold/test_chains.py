"""Chains under everything at once, against a simple model; and chains that somebody made up."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
from cold_helpers import FINGERPRINT, disk_bytes, grown, job, restore, same, save, scanned
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold import catalog, directory
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.directory import DirectoryFull
from mlx_lm_tiered.cold.family import entry_name
from mlx_lm_tiered.cold.meta import Meta, TensorSpec
from mlx_lm_tiered.index.keys import token_key

CAP = 400_000


def numbers(tokens, computed):
    """What a run that computed the tokens in its own way got: each value depends on the token, its place, and the run."""
    caches = grown(len(tokens), seed=1)
    for cache in caches:
        for place in range(0, len(tokens), 16):
            cache.keys[:, :, place : place + 16] += sum(tokens[place : place + 16]) % 97 + computed
    return caches


class Chains(RuleBasedStateMachine):
    """Two processes' stores on one directory. The model: what was ever saved, by tokens; whatever is found is one of those, bit for bit."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "c"
        self.saved: dict[tuple[int, ...], list[list]] = {}
        self.tampered = False
        self.stores = []

    @initialize()
    def start(self):
        self.stores = [scanned(self.root, CAP, verify="always"), scanned(self.root, CAP, verify="always")]

    @rule(who=st.integers(0, 1), talk=st.integers(0, 2), turns=st.integers(1, 6), fork=st.integers(0, 2), computed=st.sampled_from([0, 0, 0, 1]))
    def put(self, who, talk, turns, fork, computed):
        tokens = [talk * 1000 + t for t in range(turns * 32)]
        tokens[len(tokens) - 16 * fork :] = [t + 500 * fork for t in tokens[len(tokens) - 16 * fork :]] if fork else []
        caches = numbers(tokens, computed)
        try:
            save(self.stores[who], job(tokens, kinds.lend(caches)))
        except DirectoryFull:
            return
        self.saved.setdefault(tuple(tokens), []).append(caches)
        self.look(self.stores[who], tokens)
        if not self.tampered:
            found = restore(self.stores[who], tokens)
            # Those of another run stay where others continue them.
            assert any(same(found, one) for one in self.saved[tuple(tokens)])

    def teardown(self):
        for tokens in list(self.saved):
            for store in self.stores:
                self.look(store, list(tokens))
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root.parent)

    @rule(who=st.integers(0, 1))
    def restart(self, who):
        self.stores[who].close()
        self.stores[who] = scanned(self.root, CAP, verify="always")

    @rule(who=st.integers(0, 1))
    def clear(self, who):
        self.stores[who].clear()

    @rule(at=st.integers(0, 100), how=st.sampled_from(["delete", "cut", "flip", "swap"]), place=st.integers(0, 1 << 20))
    def tamper(self, at, how, place):
        found = sorted((self.root / "v1").rglob("*.safetensors"))
        if not found:
            return
        path = found[at % len(found)]
        content = bytearray(path.read_bytes())
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: place % len(content)])
        elif how == "flip":
            content[place % len(content)] ^= 1 << place % 8
            path.write_bytes(content)
        else:
            other = found[(at + 1) % len(found)]
            path.write_bytes(other.read_bytes())
        self.tampered = True

    @rule(who=st.integers(0, 1), data=st.data())
    def get(self, who, data):
        if not self.saved:
            return
        tokens = list(data.draw(st.sampled_from(sorted(self.saved))))
        tokens += data.draw(st.sampled_from([[], [7, 7]]))
        self.look(self.stores[who], tokens)

    def look(self, store, tokens):
        """Whatever is found for these tokens is right."""
        found = store.find(FINGERPRINT, "", token_key(tokens), len(tokens))
        if found is None:
            return
        caches = store.restore(found.entry)
        if caches is None:
            again = store.find(FINGERPRINT, "", token_key(tokens), len(tokens))
            assert again is None or again.entry is not found.entry
            return
        caches = kinds.lend(caches, found.length)
        stored = [kinds.lend(c, found.length) for t, runs in self.saved.items() for c in runs if list(t[: found.length]) == tokens[: found.length]]
        assert any(same(caches, one) for one in stored)

    @invariant()
    def the_cap_holds(self):
        if self.root.exists():
            assert disk_bytes(self.root) <= CAP

    @invariant()
    def what_is_known_has_its_chain(self):
        for store in self.stores:
            for entry in list(store._catalog._paths.values()):
                assert all(store._catalog.at(one.path) is one for one in entry.chain)
        if not self.tampered and self.root.exists():
            found = directory.Directory(self.root, 0).files()
            names = {f.name for f in found if f.kind == "entry"}
            assert all(f.parent in names for f in found if f.kind == "entry" and f.parent)


Chains.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
test_chains = Chains.TestCase


def forge(root, tokens, start, parent="", parent_checksum="", length=None, tensors=None, sizes=None):
    """A file whose checksums are right, whatever it claims. Returns its path and checksum."""
    length = len(tokens) if length is None else length
    held = length - start
    tensors = tensors or {"0.keys": (1, 2, held, 8), "0.values": (1, 2, held, 8)}
    specs = tuple(TensorSpec(name, "F32", shape, 2) for name, shape in tensors.items())
    meta = Meta(
        FINGERPRINT, "", length, specs, [kinds.dump(grown(length, layers=1)).descriptors[0]], ("kv:plain",), True, 1, "user",
        start=start, parent=parent, parent_checksum=parent_checksum, parts=(True,) * len(specs),
    )  # fmt: skip
    head = fmt.layout(meta)
    body = [struct.pack(f"<{held}q", *tokens[start:length]), *(bytes(spec.nbytes) for spec in specs)]
    checksum = fmt.seal(head, [fmt.digest(part) for part in body])
    path = root / "v1" / FINGERPRINT / entry_name("", token_key(tokens), parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(head) + b"".join(body))
    return path, checksum


def name_of(tokens):
    return entry_name("", token_key(tokens))[:32]


def unusable(root, *paths):
    """A store that finds nothing of these, and is none the worse for it."""
    store = scanned(root)
    for path in paths:
        assert store._catalog.at(path) is None
    save(store, job(range(9000, 9050), grown(50)))
    assert restore(store, range(9000, 9050)) is not None
    store.close()
    return store


def test_a_forged_chain_is_accepted_when_it_is_sound(tmp_path):
    """Else the cases below would prove nothing."""
    tokens = list(range(30))
    path, checksum = forge(tmp_path, tokens[:20], 0)
    child, _ = forge(tmp_path, tokens, 20, name_of(tokens[:20]), checksum)
    store = scanned(tmp_path)
    assert store._catalog.at(child) is not None and store.stats()["longest_chain"] == 2


def test_a_circle_of_parents_is_unusable_and_can_be_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SIDE_ROOM", 0)
    a, b = list(range(20)), list(range(30))
    paths = [
        forge(tmp_path, b, 20, name_of(a), "ab" * 16)[0],
        forge(tmp_path, a, 10, name_of(b), "ab" * 16)[0],
        forge(tmp_path, list(range(40)), 10, name_of(range(40)), "ab" * 16)[0],
    ]
    unusable(tmp_path, *paths)
    usage = directory.Directory(tmp_path, 0).usage()
    scanned(tmp_path, usage - 1).close()
    assert not all(path.exists() for path in paths)
    store = scanned(tmp_path)
    store.clear()
    assert not any(path.exists() for path in paths)


def test_chains_without_end_are_cut_off(tmp_path):
    tokens = list(range(400))
    checksum, parent, paths = "", "", []
    for n in range(1, 400):
        path, checksum = forge(tmp_path, tokens[:n], n - 1, parent, checksum)
        parent = path.name[:32]
        paths.append(path)
    store = scanned(tmp_path)
    assert store.stats()["longest_chain"] == catalog.MAX_CHAIN and store.stats()["entries"] == catalog.MAX_CHAIN
    assert store.stats()["scans"][FINGERPRINT]["without parent"] == 399 - catalog.MAX_CHAIN
    assert len(restore(store, range(catalog.MAX_CHAIN))) == 1
    assert store.clear() == 399


@pytest.mark.parametrize("case", ["starts beyond its parent", "starts before its parent does", "other tensors", "other shape", "other tokens"])
def test_children_that_do_not_fit_their_parent_serve_nothing(tmp_path, case):
    tokens = list(range(40))
    root, root_checksum = forge(tmp_path, tokens[:20], 0)
    middle, checksum = forge(tmp_path, tokens[:30], 15, name_of(tokens[:20]), root_checksum)
    parent = name_of(tokens[:30])
    if case == "starts beyond its parent":
        child, _ = forge(tmp_path, tokens, 31, parent, checksum)
    elif case == "starts before its parent does":
        child, _ = forge(tmp_path, tokens, 12, parent, checksum)
    elif case == "other tensors":
        child, _ = forge(tmp_path, tokens, 30, parent, checksum, tensors={"0.keys": (1, 2, 10, 8), "0.other": (1, 2, 10, 8)})
    elif case == "other shape":
        child, _ = forge(tmp_path, tokens, 30, parent, checksum, tensors={"0.keys": (1, 2, 10, 8), "0.values": (1, 99, 10, 8)})
    else:
        child, _ = forge(tmp_path, [*range(30), *range(50, 60)], 30, parent, checksum)
        child = child.rename(child.with_name(entry_name("", token_key(tokens), parent)))
    store = scanned(tmp_path)
    assert restore(store, tokens) is None
    assert restore(store, tokens[:30]) is not None
    assert store.stats()["entries"] == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("start", "1"), ("start", "-1"), ("parent", "x"), ("parent_checksum", "ab" * 16), ("parent", "../../etc/passwd" * 2), ("parts", "[true]"),
        ("parts", "[true,1,1]"), ("parts", "{}"), ("start", "99"),
    ],
)  # fmt: skip
def test_headers_that_contradict_themselves_are_damaged(tmp_path, key, value):
    tokens = list(range(20))
    path, _ = forge(tmp_path, tokens, 0)
    content = path.read_bytes()
    size = 8 + struct.unpack("<Q", content[:8])[0]
    table = json.loads(content[8:size])
    table["__metadata__"][key] = value
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    head = bytearray(struct.pack("<Q", len(text)) + text)
    at = 8 + len(b'{"__metadata__":{"checksum":"')
    head[at : at + 32] = b"0" * 32
    fmt.seal(head, [])
    path.write_bytes(bytes(head) + content[size:])
    # The scan looks at what the index needs; the restore at all of it, before anything is allocated.
    store = scanned(tmp_path)
    assert restore(store, tokens) is None
    assert store.stats()["corrupt"] == store.stats()["quarantined"] == 1
    store.close()
    unusable(tmp_path, path)
