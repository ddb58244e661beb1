"""One segment of a stored prefix is one valid safetensors file, and this module knows its bytes.

A segment holds the tokens from `start` on; those before are its parent's, a segment
too, which its header names by file and by content. Without a parent it is a whole entry.

Layout (https://huggingface.co/docs/safetensors, "Format"): 8 bytes little-endian
header length, a JSON header padded with spaces, the tensors one behind the other.
Ours adds: the body starts at a multiple of 4096 bytes; the first tensor is
``tokens`` (I64); ``__metadata__`` says what is stored and carries checksums.

The header comes before the body but carries the body's checksums, so their width is
fixed and they stand at a fixed place, right behind the header's own checksum. A
writer lays the header out first, writes the body, then fills the checksums in.

- ``checksum``: xxh3_128 over the whole header, length field included, with these 32
  digits zeroed. Tells every flipped bit of the header.
- ``checksums``: xxh3_64 of each tensor, 16 hex digits each, in file order.

An entry with companion state (see `mlx_lm_hooks.Companion`) has another version, so
that readers who know nothing of it leave the file alone instead of restoring half of
it. Its tensors are the last, whole in every file, under names that begin with
``companion.``.

A file is untrusted input: every number is checked before anything is allocated.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from typing import Any

import xxhash

from .checking import BadEntry, ForeignEntry, counts, json_object, number_of, parse_json, strings, text_of
from .meta import DTYPES, TOKENS, CompanionMeta, Header, Meta, TensorSpec

FORMAT = "mlx-lm-tiered-kv"
VERSION = "2"
COMPANION_VERSION = "3"  # of entries with companion state
COMPANION = "companion."  # how the names of its tensors begin
MAX_COMPANION_TEXT = 1 << 20
ALIGNMENT = 4096
MAX_HEADER = 8 << 20
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 8

_NAME = re.compile(r"[0-9a-f]{32}")  # of files, and their checksums
_SCHEMA = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PREFIX = b'{"__metadata__":{"checksum":"'
_MIDDLE = b'","checksums":"'
_HASH_AT = 8 + len(_PREFIX)  # of the header's own checksum, from the start of the file
_SUMS_AT = _HASH_AT + 32 + len(_MIDDLE)


def digest(data: Any) -> str:
    """The checksum of a tensor's bytes."""
    return xxhash.xxh3_64_hexdigest(data)


def file_size(meta: Meta, header: bytearray | None = None) -> int:
    """Bytes of the finished file; `header` is what `layout` makes of `meta`, from a caller who has it."""
    return len(layout(meta) if header is None else header) + sum(spec.nbytes for spec in meta.all_tensors)


def layout(meta: Meta) -> bytearray:
    """The header's bytes, its length field included, with all checksums still zero; `seal` fills them in.

    Raises ValueError for what no reader would accept.
    """
    tensors = meta.all_tensors
    if len({spec.name for spec in tensors}) != len(tensors) or len(tensors) > MAX_TENSORS:
        raise ValueError("Tensor names are not unique, or there are too many.")
    metadata = {
        "checksum": "0" * 32,
        "checksums": "0" * 16 * len(tensors),
        "format": FORMAT,
        "version": VERSION if meta.companion is None else COMPANION_VERSION,
        "fingerprint": meta.fingerprint,
        "namespace": meta.namespace,
        "length": str(meta.length),
        "start": str(meta.start),
        "parent": meta.parent,
        "parent_checksum": meta.parent_checksum,
        "cuttable": "true" if meta.cuttable else "false",
        "minimum_reusable": str(meta.minimum_reusable),
        "role": meta.role,
        "created": str(meta.created),
        "grow_axes": _compact([spec.grow_axis for spec in tensors]),
        "parts": _compact([True, *meta.by_token]),
        "caches": _compact(meta.descriptors),
        "signatures": _compact(meta.signatures),
        "provenance": _compact(dict(meta.provenance)),
    }
    if (companion := meta.companion) is not None:
        metadata["companion"] = _compact(
            {"schema": companion.schema, "version": companion.version, "scalars": dict(companion.scalars), "tensors": companion.tensors}
        )
    table: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for spec in tensors:
        table[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = _compact(table).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"The header has {len(text)} bytes, more than {MAX_HEADER}.")
    header = bytearray(struct.pack("<Q", len(text)) + text)
    sealed = bytearray(header)
    seal(sealed, ())
    try:
        parse(bytes(sealed), len(header) + offset)
    except BadEntry as error:
        raise ValueError(f"No reader would accept this entry: {error}") from error
    return header


def seal(header: bytearray, checksums: Sequence[str]) -> str:
    """Fill the tensors' checksums and the header's own into what `layout` made; returns the latter."""
    sums = "".join(checksums).encode()
    header[_SUMS_AT : _SUMS_AT + len(sums)] = sums
    checksum = xxhash.xxh3_128_hexdigest(header)
    header[_HASH_AT : _HASH_AT + 32] = checksum.encode()
    return checksum


def header_length(start: bytes, size: int) -> int:
    """Bytes of the header, length field included, from the first 8 bytes of a file of `size` bytes. Raises BadEntry."""
    if len(start) < 8:
        raise BadEntry("The file is shorter than a header.")
    (length,) = struct.unpack("<Q", start[:8])
    if length > MAX_HEADER or 8 + length > size:
        raise BadEntry(f"The header claims {length} bytes in a file of {size}.")
    if length < _SUMS_AT or (8 + length) % ALIGNMENT:
        raise BadEntry(f"The header claims {length} bytes, which no writer of this format writes.")
    return 8 + length


def check_seal(header: bytes) -> str:
    """The header's own checksum, once it is what `seal` filled in. Raises BadEntry."""
    if header[8:_HASH_AT] != _PREFIX or header[_HASH_AT + 32 : _SUMS_AT] != _MIDDLE:
        raise BadEntry("The file is not an entry of this program.")
    zeroed = bytearray(header)
    zeroed[_HASH_AT : _HASH_AT + 32] = b"0" * 32
    if header[_HASH_AT : _HASH_AT + 32] != xxhash.xxh3_128_hexdigest(zeroed).encode():
        raise BadEntry("The header does not match its checksum.")
    return header[_HASH_AT : _HASH_AT + 32].decode()


def parse(header: bytes, size: int) -> Header:
    """Check the header of a file of `size` bytes, and read it. Raises BadEntry."""
    checksum = check_seal(header)
    table = json_object(parse_json(header[8:]), "header")
    texts = json_object(table.pop("__metadata__", None), "metadata")
    if not all(isinstance(value, str) for value in texts.values()):
        raise BadEntry("The metadata holds something that is not a string.")
    if texts.get("format") != FORMAT:
        raise BadEntry("The file is not an entry of this program.")
    if texts.get("version") not in (VERSION, COMPANION_VERSION):
        raise ForeignEntry("The file has another format version.")
    if not 1 <= len(table) <= MAX_TENSORS:
        raise BadEntry(f"The file claims {len(table)} tensors.")
    specs, offsets = _tensors(table, parse_json(text_of(texts, "grow_axes")), size - len(header))
    length = number_of(texts, "length")
    start, parent, parent_checksum = number_of(texts, "start"), text_of(texts, "parent"), text_of(texts, "parent_checksum")
    if not continues(start, parent, parent_checksum):
        raise BadEntry("The metadata does not say whose tokens come before.")
    if start >= length or specs[0] != TensorSpec(TOKENS, "I64", (length - start,)):
        raise BadEntry("The first tensor is not the tokens.")
    parts = _parts(parse_json(text_of(texts, "parts")), specs, length - start)
    minimum = number_of(texts, "minimum_reusable")
    if minimum > length:
        raise BadEntry("The minimum reusable offset is beyond the last token.")
    sums = text_of(texts, "checksums")
    if len(sums) != 16 * len(specs):
        raise BadEntry("There is not one checksum for each tensor.")
    companion = _companion(texts.get("companion"), texts["version"] == COMPANION_VERSION, specs[1:], parts)
    meta = Meta(
        fingerprint=text_of(texts, "fingerprint"),
        namespace=text_of(texts, "namespace"),
        length=length,
        tensors=specs[1:],
        descriptors=parse_json(text_of(texts, "caches")),
        signatures=strings(parse_json(text_of(texts, "signatures"))),
        cuttable=text_of(texts, "cuttable") == "true",
        minimum_reusable=minimum,
        role=text_of(texts, "role"),
        provenance=json_object(parse_json(text_of(texts, "provenance")), "provenance"),
        created=number_of(texts, "created"),
        start=start,
        parent=parent,
        parent_checksum=parent_checksum,
        parts=parts,
        companion=companion,
    )
    return Header(meta, len(header), offsets, tuple(sums[i : i + 16] for i in range(0, len(sums), 16)), checksum)


def continues(start: int, parent: str, parent_checksum: str) -> bool:
    """Whether a header says whose the tokens before `start` are, or that there are none."""
    if not start:
        return parent == parent_checksum == ""
    return bool(_NAME.fullmatch(parent) and _NAME.fullmatch(parent_checksum))


def _parts(value: Any, specs: tuple[TensorSpec, ...], tokens: int) -> tuple[bool, ...]:
    """Which tensors but the first hold the tokens from the start on, of which there are `tokens`."""
    if not isinstance(value, list) or len(value) != len(specs) or not all(type(part) is bool for part in value):
        raise BadEntry("The metadata does not say which tensors are parts.")
    for spec, part in zip(specs[1:], value[1:], strict=True):
        if part and (spec.grow_axis is None or spec.shape[spec.grow_axis] != tokens):
            raise BadEntry(f"Tensor {spec.name[:80]!r} is no part for {tokens} tokens.")
    return tuple(value[1:])


def _companion(text: str | None, wanted: bool, specs: tuple[TensorSpec, ...], parts: tuple[bool, ...]) -> CompanionMeta | None:
    """The companion state of a header, which entries of its version have and no others."""
    named = [spec.name for spec in specs if spec.name.startswith(COMPANION)]
    if (text is not None) != wanted or (named and not wanted):
        raise BadEntry("The metadata and the version disagree about companion state.")
    if text is None:
        return None
    if len(text) > MAX_COMPANION_TEXT:
        raise BadEntry("The companion state's scalars are too long.")
    value = json_object(parse_json(text), "companion state")
    if value.keys() != {"schema", "version", "scalars", "tensors"}:
        raise BadEntry("The companion state has other fields than schema, version, scalars and tensors.")
    schema, version = value["schema"], value["version"]
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema) or not counts([version], 1 << 31):
        raise BadEntry("The companion state has no proper schema.")
    names = strings(value["tensors"])
    if named != [COMPANION + name for name in names] or named != [spec.name for spec in specs[len(specs) - len(names) :]]:
        raise BadEntry("The companion state's tensors are not the last ones.")
    if any(parts[len(parts) - len(names) :]):
        raise BadEntry("The companion state's tensors are not whole.")
    return CompanionMeta(schema, version, json_object(value["scalars"], "companion state's scalars"), names)


def _tensors(table: dict[str, Any], grow_axes: Any, size: int) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Every tensor of the table, in file order, and its offset in a body of `size` bytes."""
    if not isinstance(grow_axes, list) or len(grow_axes) != len(table):
        raise BadEntry("There is not one grow axis for each tensor.")
    specs, offsets, end = [], [], 0
    for (name, entry), axis in zip(table.items(), grow_axes, strict=True):
        entry = json_object(entry, f"entry of tensor {name[:80]!r}")
        if entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise BadEntry(f"Tensor {name[:80]!r} has other fields than its dtype, shape and offsets.")
        dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise BadEntry(f"Tensor {name[:80]!r} has an unknown dtype.")
        if not counts(shape, 1 << 31) or len(shape) > MAX_DIMENSIONS or not counts(span, 1 << 48) or len(span) != 2:
            raise BadEntry(f"Tensor {name[:80]!r} has an impossible shape or offset.")
        if axis is not None and not counts([axis], len(shape)):
            raise BadEntry(f"Tensor {name[:80]!r} has an impossible grow axis.")
        spec = TensorSpec(name, dtype, tuple(shape), axis)
        if span[0] != end or span[1] != end + spec.nbytes:
            raise BadEntry(f"Tensor {name[:80]!r} is not where the tensor before it ends, or not as long as its shape says.")
        specs.append(spec)
        offsets.append(end)
        end = span[1]
    if end != size:
        raise BadEntry(f"The tensors take {end} bytes, the file has {size} for them.")
    return tuple(specs), tuple(offsets)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


