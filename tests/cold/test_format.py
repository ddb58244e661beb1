"""The bytes of an entry: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from cold_helpers import FINGERPRINT, job, plain, save, scanned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mlx_lm_tiered.cold import arrays as arrays_module
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold import reader
from mlx_lm_tiered.cold.arrays import MAX_ROOM, MLX_DTYPES, STEP, capacities, spec_of, to_bytes
from mlx_lm_tiered.cold.checking import BadEntry, ForeignEntry
from mlx_lm_tiered.cold.meta import Meta, TensorSpec
from mlx_lm_tiered.cold.reader import Assembly, open_entry
from mlx_lm_tiered.cold.writer import EntryWriter
from mlx_lm_tiered.index.keys import token_key


def write(path, arrays, tokens=(1, 2, 3), grow=None, **fields):
    """An entry file of these arrays, without a store."""
    specs = tuple(spec_of(name, array, (grow or {}).get(name)) for name, array in arrays.items())
    meta = Meta(FINGERPRINT, "", len(tokens), specs, [], **fields)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    writer = EntryWriter(path, fd, meta, token_key(tokens), lambda done: None)
    for name, array in arrays.items():
        data = to_bytes(array)
        for start in range(0, max(1, len(data)), 1000):
            writer.write(name, data[start : start + 1000])
    writer.commit()
    return path


def read(path, verify=True):
    with open_entry(path) as reader:
        key, assembly = reader.key(), Assembly(reader.header.meta)
        for _ in assembly.allocation():
            pass
        assembly.fill(reader, reader.header.meta.length, verify)
        return key, assembly.finish()


def random_array(dtype, shape):
    count = int(np.prod(shape)) * dtype.size
    raw = np.frombuffer(random.Random(str(dtype)).randbytes(count), np.uint8)
    if dtype == mx.bool_:
        return mx.array((raw & 1).astype(np.bool_).reshape(shape))
    return mx.array(raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", sorted(MLX_DTYPES))
@pytest.mark.parametrize(("shape", "grow"), [((2, 3, 5, 4), 2), ((7,), None), ((1, 300, 2), 1), ((2, 2), 0)])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, name, shape, grow):
    array = random_array(MLX_DTYPES[name], shape)
    _, back = read(write(tmp_path / "x", {"a": array}, grow={"a": grow}))
    found = back["a"]
    assert found.dtype == array.dtype
    cut = found if grow is None else mx.take(found, mx.arange(shape[grow]), axis=grow)
    assert cut.shape == array.shape
    assert bytes(to_bytes(cut)) == bytes(to_bytes(array))
    if grow is not None:
        room = found.shape[grow] - shape[grow]
        assert found.shape[grow] % STEP == 0 and room >= STEP


def test_odd_shapes_come_back(tmp_path):
    arrays = {"scalar": mx.array(3.5), "empty": mx.zeros((2, 0, 4)), "strided": mx.arange(60).reshape(3, 4, 5)[:, ::2, 1:].swapaxes(0, 2)}
    _, back = read(write(tmp_path / "x", arrays, grow={"empty": 1}))
    assert {n: a.shape for n, a in back.items()} == {n: a.shape for n, a in arrays.items()}
    assert all(mx.array_equal(back[n], a).item() for n, a in arrays.items())


def test_many_short_rows_come_back(tmp_path):
    """More runs than one vectored read may have."""
    array = mx.random.normal((40, 50, 3, 2))
    _, back = read(write(tmp_path / "x", {"a": array}, grow={"a": 2}))
    assert mx.array_equal(back["a"][:, :, :3], array).item()


def test_tensors_larger_than_a_piece_come_back(tmp_path):
    array = mx.random.normal((1, 2, 30_000, 32))
    _, back = read(write(tmp_path / "x", {"a": array}, grow={"a": 2}))
    assert mx.array_equal(back["a"][:, :, :30_000], array).item()


def test_systems_without_vectored_reads_read_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_PREADV", reader._pread_one)
    array = mx.random.normal((2, 3, 5, 4))
    _, back = read(write(tmp_path / "x", {"a": array}, grow={"a": 2}))
    assert mx.array_equal(back["a"][:, :, :5], array).item()


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """A system may return less than was asked for, also within a piece."""
    draw = random.Random(1)

    def short(fd, batch, at):
        return os.preadv(fd, [batch[0][: draw.randrange(1, len(batch[0]) + 1)]] if draw.random() < 0.5 else batch, at)

    monkeypatch.setattr(reader, "_PREADV", short)
    array = mx.random.normal((20, 3, 5, 4))
    _, back = read(write(tmp_path / "x", {"a": array}, grow={"a": 2}))
    assert mx.array_equal(back["a"][:, :, :5], array).item()


def test_without_shared_memory_arrays_come_through_copies(tmp_path, monkeypatch):
    """As on CUDA, where numpy cannot look into mlx's buffers."""
    for name, dtype in MLX_DTYPES.items():
        array = random_array(dtype, (2, 5, 4))
        monkeypatch.setattr(arrays_module, "shared_memory", lambda: False)
        _, back = read(write(tmp_path / "x", {"a": array}, grow={"a": 1}))
        monkeypatch.undo()
        assert back["a"].dtype == dtype, name
        assert bytes(to_bytes(back["a"][:, :5])) == bytes(to_bytes(array)), name


def test_tokens_come_back_also_those_that_name_images(tmp_path):
    tokens = [5, -1, -(1 << 59), 1 << 59, 0]
    key, _ = read(write(tmp_path / "x", {"a": mx.zeros((2,))}, tokens))
    assert key == token_key(tokens)


def test_other_programs_can_read_the_file(tmp_path):
    store = scanned(tmp_path / "c")
    caches = plain(20)
    path = save(store, job(range(20), caches))
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        assert file.get_tensor("tokens").tolist() == list(range(20))
        assert np.array_equal(file.get_tensor("0.keys"), np.array(caches[0].keys[:, :, :20]))
    assert metadata["fingerprint"] == FINGERPRINT
    assert json.loads(metadata["provenance"]) == {"mlx": "test"}
    assert json.loads(metadata["signatures"]) == ["kv:plain", "kv:plain"]
    body = struct.unpack("<Q", path.read_bytes()[:8])[0] + 8
    assert body % 4096 == 0
    assert set(mx.load(str(path))) >= {"tokens", "0.keys", "1.values"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    path = write(folder / "x", {"a": mx.random.normal((2, 9)), "b": mx.arange(7)}, tokens=range(11), provenance={"a": [1]})
    return path.read_bytes(), folder / "y"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_noticed(sound, data):
    content, path = sound
    at = data.draw(st.integers(0, len(content) - 1)) if data.draw(st.booleans()) else data.draw(st.integers(0, 2000))
    flipped = bytearray(content)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(flipped)
    with pytest.raises(BadEntry):
        read(path)


def test_every_byte_of_the_body_counts(sound):
    content, path = sound
    body = struct.unpack("<Q", content[:8])[0] + 8
    for at in range(body, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        with pytest.raises(BadEntry):
            read(path)


def test_truncation_is_noticed_at_any_length(sound):
    content, path = sound
    for length in [*range(0, 64), *range(64, len(content), 61), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(BadEntry):
            read(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(BadEntry):
        read(path)


def sealed(table, body=b"", zero_sums=2):
    """A file whose header checksum is right, whatever the header says."""
    text = table if isinstance(table, bytes) else json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    header = bytearray(struct.pack("<Q", len(text)) + text)
    start = 8 + len(b'{"__metadata__":{"checksum":"')
    header[start : start + 32] = b"0" * 32
    header[start : start + 32] = xxhash.xxh3_128_hexdigest(header).encode()
    return bytes(header) + body


def hostile_table():
    """A sound small header, as JSON, to be made unsound."""
    meta = Meta(FINGERPRINT, "", 1, (TensorSpec("a", "F32", (1, 1, 4), 1),), [])
    header = bytes(fmt.layout(meta))
    return json.loads(header[8:]), b"\0" * 24


def poke(table, *path, value):
    for step in path[:-1]:
        table = table[step]
    table[path[-1]] = value


M = "__metadata__"
HOSTILE = {
    "offsets overlap": ("a", "data_offsets", [4, 20]),
    "a gap": ("a", "data_offsets", [16, 32]),
    "offsets backwards": ("a", "data_offsets", [24, 8]),
    "beyond the file": ("a", "data_offsets", [8, 1 << 40]),
    "negative": ("a", "data_offsets", [-8, 8]),
    "offset is a float": ("a", "data_offsets", [8, 24.0]),
    "offset is a bool": ("a", "data_offsets", [True, 24]),
    "three offsets": ("a", "data_offsets", [8, 24, 24]),
    "shape too large": ("a", "shape", [1 << 31, 1 << 31, 1 << 31]),
    "shape larger than the bytes": ("a", "shape", [1, 1, 5]),
    "shape negative": ("a", "shape", [-1, -1, 4]),
    "shape not a list": ("a", "shape", {"0": 4}),
    "too many dimensions": ("a", "shape", [1] * 40 + [4]),
    "unknown dtype": ("a", "dtype", "F8_E4M3"),
    "dtype is a list": ("a", "dtype", ["F32"]),
    "extra field": ("a", "x", 1),
    "tokens of another dtype": ("tokens", "dtype", "U64"),
    "tokens of another shape": ("tokens", "shape", [1, 1]),
    "length disagrees": (M, "length", "2"),
    "length is no number": (M, "length", "1e3"),
    "length in other digits": (M, "length", "\u0661"),
    "length has many digits": (M, "length", "1" * 5000),
    "minimum beyond the end": (M, "minimum_reusable", "2"),
    "grow axis outside": (M, "grow_axes", "[null,3]"),
    "grow axis negative": (M, "grow_axes", "[null,-1]"),
    "grow axes missing": (M, "grow_axes", "[null]"),
    "grow axes no list": (M, "grow_axes", "{}"),
    "checksums missing": (M, "checksums", "00"),
    "metadata not strings": (M, "role", 5),
    "descriptors nested": (M, "caches", "[" * 5000 + "]" * 5000),
    "descriptors nested moderately": (M, "caches", "[" * 60 + "]" * 60),
    "descriptors no JSON": (M, "caches", "[1,"),
    "descriptors with NaN": (M, "caches", "[NaN]"),
    "descriptors with duplicate keys": (M, "caches", '{"a":1,"a":2}'),
    "descriptors with a huge number": (M, "caches", "1" * 10_000),
    "provenance no object": (M, "provenance", "[]"),
    "signatures no strings": (M, "signatures", "[1]"),
    "other program": (M, "format", "pt"),
}


def refused(path, content):
    path.write_bytes(content)
    with pytest.raises(BadEntry) as caught:
        read(path)
    text = str(caught.value)
    assert text.endswith(".") and len(text) < 300
    return caught.value


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, case):
    table, body = hostile_table()
    poke(table, *HOSTILE[case][:-1], value=HOSTILE[case][-1])
    refused(tmp_path / "x", sealed(table, body))


@pytest.mark.parametrize(
    ("place", "text"), [("namespace", "\ud800"), ("role", "\ud800"), ("provenance", '{"mlx":"\\ud800"}'), ("provenance", '{"\\ud800":"mlx"}')]
)
def test_half_a_character_is_refused_and_a_scan_outlives_it(tmp_path, place, text):
    """Text that no encoding has can be neither hashed nor printed."""
    save(scanned(tmp_path / "c"), job(range(20), plain(20)))
    table, body = hostile_table()
    table[M]["checksums"] = fmt.digest(body[:8]) + fmt.digest(body[8:])
    poke(table, M, place, value=text)
    hostile = tmp_path / "c" / "v1" / FINGERPRINT / f"{0:032x}.safetensors"
    hostile.write_bytes(sealed(table, body))
    with pytest.raises(BadEntry), open_entry(hostile):
        pass
    store = scanned(tmp_path / "c")
    assert store.find(FINGERPRINT, "", token_key(range(20)), 20).length == 20
    assert store.stats()["scans"][FINGERPRINT]["scanned"] == 2


def test_the_unchanged_header_is_accepted_up_to_its_sums(tmp_path):
    """Else the cases above would prove nothing."""
    table, body = hostile_table()
    (tmp_path / "x").write_bytes(sealed(table, body))
    with open_entry(tmp_path / "x") as reader:
        assert reader.header.meta.tensors == (TensorSpec("a", "F32", (1, 1, 4), 1),)


def test_another_format_version_is_foreign_not_damaged(tmp_path):
    table, body = hostile_table()
    table[M]["version"] = "1"
    assert isinstance(refused(tmp_path / "x", sealed(table, body)), ForeignEntry)


def test_a_header_without_tensors_or_metadata_is_refused(tmp_path):
    table, _ = hostile_table()
    refused(tmp_path / "x", sealed({M: table[M]}))
    table[M] = {"checksum": "0" * 32, "checksums": "0" * 32}
    refused(tmp_path / "x", sealed(table, b"\0" * 24))


@pytest.mark.parametrize("length", [0, 7, 4088, 1 << 24, (1 << 63) - 8, (1 << 64) - 8])
def test_header_lengths_are_bounded_before_reading(tmp_path, length):
    refused(tmp_path / "x", struct.pack("<Q", length) + b'{"__metadata__":{"checksum":"' + b" " * 3000)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=8,
    ),
    place=st.sampled_from([(M,), ("a",), ("tokens",), *[(M, k) for k in ("caches", "grow_axes", "length", "signatures")], ("a", "shape"), ("a", "data_offsets")]),
    as_json=st.booleans(),
)
def test_fuzzed_headers_never_do_anything_else(tmp_path, value, place, as_json):
    table, body = hostile_table()
    poke(table, *place, value=json.dumps(value) if as_json else value)
    path = tmp_path / "x"
    path.write_bytes(sealed(table, body))
    try:
        with open_entry(path) as reader:
            assert reader.header.meta.length == 1
    except BadEntry:
        assert path.exists()


def test_room_cannot_be_used_to_exhaust_memory():
    """A tensor that is short along its token axis and wide elsewhere would grow 500-fold."""
    wide = TensorSpec("a", "U8", (1, 1, 64 << 20), 1)
    assert capacities((wide,)) == [wide.shape]
    assert 512 * wide.nbytes > MAX_ROOM


def test_a_link_a_fifo_a_directory_and_a_device_are_refused(tmp_path, sound):
    content, _ = sound
    (tmp_path / "real").write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "folder", "fifo"):
        with pytest.raises(BadEntry), open_entry(tmp_path / name):
            pass
    with pytest.raises(BadEntry), open_entry(Path("/dev/null")):
        pass


def test_what_no_reader_would_accept_is_not_written(tmp_path):
    for meta in (
        Meta(FINGERPRINT, "", 1, (TensorSpec("tokens", "F32", (1,)),), []),
        Meta(FINGERPRINT, "", 0, (), []),
        Meta(FINGERPRINT, "", 1, (), [[[]]] * 100 + [[[[]]]] * 3, minimum_reusable=5),
        Meta(FINGERPRINT, "", 1, (), float("nan")),
    ):
        with pytest.raises(ValueError):
            fmt.layout(meta)


def test_tensors_are_written_in_order_and_whole(tmp_path):
    meta = Meta(FINGERPRINT, "", 1, (TensorSpec("a", "U8", (4,)), TensorSpec("b", "U8", (4,))), [])
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT, 0o600)
    writer = EntryWriter(tmp_path / "x", fd, meta, token_key([1]), lambda done: None)
    with pytest.raises(ValueError):
        writer.write("b", memoryview(b"1234"))
    with pytest.raises(ValueError):
        writer.write("a", memoryview(b"12345"))
    writer.write("a", memoryview(b"1234"))
    with pytest.raises(ValueError):
        writer.commit()
    writer.abort()
    writer.abort()
    assert not (tmp_path / "x").exists()
