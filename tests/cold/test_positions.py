"""Every class of byte position of a stored chain's files, flipped, cut off, added or exchanged: noticed by who reads it, and never served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cold_helpers import FINGERPRINT, job, restore, save, scanned

from mlx_lm_tiered.cold.health import Checking
from mlx_lm_tiered.cold.reader import open_entry
from mlx_lm_tiered.cold.restore import Damaged, Lost, Restore
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.index.keys import token_key
from support.token_caches import FAMILIES, content, make

LENGTHS = (20, 45, 70)
TALK = tuple(range(70))
OTHER = tuple(range(500, 570))  # another conversation of the same lengths


def flips(path: Path) -> Iterator[tuple[str, int]]:
    """One or more positions of every class of bytes in a file, with the class's name."""
    data = path.read_bytes()
    with open_entry(path) as reader:
        header = reader.header
    yield from (("length field", at) for at in range(8))
    text = data[8 : header.body].decode()
    end = len(text.rstrip(" "))
    yield from (("header's braces", 8 + at) for at in (0, end - 1))
    metadata = json.loads(text)["__metadata__"]
    for key in metadata:
        at = 8 + text.index(f'"{key}":')
        value = at + len(key) + 4  # behind its opening quote
        yield f"name of {key}", at + 1
        yield from ((f"value of {key}", place) for place in {value, value + max(0, len(metadata[key]) - 1)})
    for spec in header.meta.all_tensors:
        at = 8 + text.index(f'"{spec.name}":{{')
        yield f"name of tensor {spec.name}", at + 1
        yield from ((f"table entry of {spec.name}", place) for place in range(at + len(spec.name) + 4, at + len(spec.name) + 44, 6))
    yield from (("padding", 8 + place) for place in (end, len(text) - 1) if end < len(text))
    for spec, offset in zip(header.meta.all_tensors, header.offsets, strict=True):
        first, last = header.body + offset, header.body + offset + spec.nbytes - 1
        yield from ((f"tensor {spec.name}", place) for place in {first, (first + last) // 2, last})


def cuts(path: Path) -> Iterator[tuple[str, int]]:
    """Every class of lengths that the file may be cut to."""
    size = path.stat().st_size
    with open_entry(path) as reader:
        body, offsets = reader.header.body, reader.header.offsets
    yield from ((f"cut to {n}", n) for n in (0, 1, 7, 8, 9, 200))
    places = {body // 2, body - 1, body, body + 1, size - 1, *(body + at + d for at in offsets[1:] for d in (-1, 0, 1))}
    yield from ((f"cut to {n}", n) for n in sorted(places) if 0 <= n < size)


def spoiled(path: Path, family: list[Path]) -> Iterator[tuple[str, bytes]]:
    """What may stand in the place of a file, and why it is wrong."""
    data = path.read_bytes()
    for what, at in flips(path):
        yield f"{what} ({at})", data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    for what, length in cuts(path):
        yield what, data[:length]
    yield "a byte more", data + b"\0"
    yield "a block more", data + bytes(4096)
    yield "twice", data + data
    yield "zeros", bytes(len(data))
    yield from ((f"the file of {other.name}", other.read_bytes()) for other in family if other != path)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def stored(root: Path, family: str) -> tuple[ColdStore, dict[int, Path]]:
    """A store with two growing conversations; the files of the first by their lengths."""
    store = scanned(root, verify="always")
    paths = {}
    for tokens in (OTHER, TALK):
        for length in LENGTHS:
            paths[length] = save(store, job(tokens[:length], make(family, tokens[:length])))
    return store, paths


def entries(store: ColdStore) -> dict[int, Any]:
    found = {n: store.find(FINGERPRINT, "", token_key(TALK[:n]), n) for n in LENGTHS}
    assert all(f is not None and f.length == f.entry.length for f in found.values())
    return {n: f.entry for n, f in found.items() if f is not None}


def test_no_position_goes_unnoticed(tmp_path: Path, family: str) -> None:
    """Both ways to read a chain, at once and in pieces, fail at the file that is wrong."""
    store, paths = stored(tmp_path / "c", family)
    known = entries(store)
    files = sorted((tmp_path / "c" / "v1").rglob("*.safetensors"))
    assert len(files) == 2 * len(LENGTHS)
    cases = 0
    for length, path in paths.items():
        sound = path.read_bytes()
        dependent = [n for n in LENGTHS if any(one.path == path for one in known[n].chain)]
        for what, data in spoiled(path, files):
            path.write_bytes(data)
            for n in dependent:
                reading = Restore(known[n], Checking("always"), lambda fd: None)
                cases += 1
                try:
                    if cases % 2:
                        reading.read()
                    else:
                        for _ in reading.steps():
                            continue
                    caches = reading.caches()
                except (Damaged, Lost) as error:
                    assert error.entry in known[n].chain, what
                    continue
                # Only a parent's own state, which its children have no use for, may go unnoticed.
                assert n > length and what.startswith("tensor") and content(caches) == content(make(family, TALK[:n])), what
        path.write_bytes(sound)
        for n in LENGTHS:
            reading = Restore(known[n], Checking("always"), lambda fd: None)
            reading.read()
            assert content(reading.caches()) == content(make(family, TALK[:n]))
    assert cases > 300


# One of each kind of damage.
KINDS = ("length field", "value of checksums", "value of caches", "padding", "tensor tokens", "tensor 0.", "cut to 9", "a byte more", "the file of")


@pytest.mark.parametrize("when", ["while it is indexed", "before the start"])
def test_a_store_serves_none_of_it(tmp_path: Path, family: str, when: str) -> None:
    """The damaged file is a miss and so is what continues it; everything else is served; the next entry is stored again."""
    root = tmp_path / "c"
    store, paths = stored(root, family)
    chained = {n: {one.path for one in entry.chain} for n, entry in entries(store).items()}
    store.close()
    shutil.copytree(root, tmp_path / "sound")
    files = sorted((root / "v1").rglob("*.safetensors"))
    for number, kind in enumerate(KINDS):
        length = LENGTHS[number % len(LENGTHS)]
        path = paths[length]
        data = next((data for what, data in spoiled(path, files) if what.startswith(kind)), None)
        assert data is not None, kind
        if when == "before the start":
            path.write_bytes(data)
        store = scanned(root, verify="always")
        if when != "before the start":
            path.write_bytes(data)
        for n in LENGTHS[::-1]:
            caches = restore(store, TALK[:n])
            if path in chained[n]:
                assert caches is None, (kind, length, n)
            else:
                assert content(caches) == content(make(family, TALK[:n])), (kind, length, n)
            assert content(restore(store, OTHER[:n])) == content(make(family, OTHER[:n]))
        save(store, job(TALK, make(family, TALK)))
        assert content(restore(store, TALK)) == content(make(family, TALK)), kind
        store.close()
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "sound", root)
