"""What the header of a segment says, as values: its tensors, whose tokens it holds, and what it continues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TOKENS = "tokens"

# Bytes per element of the safetensors dtypes that mlx has too.
DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's place in an entry. `dtype` is safetensors' name; `grow_axis` is the token axis, if it has one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    grow_axis: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]

    def resized(self, tokens: int) -> TensorSpec:
        """The same tensor with so many slots along its grow axis."""
        axis = self.grow_axis
        assert axis is not None
        return replace(self, shape=(*self.shape[:axis], tokens, *self.shape[axis + 1 :]))


@dataclass(frozen=True)
class CompanionMeta:
    """What a header says of companion state: schema, version, JSON scalars, and the names of its tensors, without `COMPANION`."""

    schema: str
    version: int
    scalars: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What a reader must know to use it: SCHEMA/VERSION."""
        return f"{self.schema}/{self.version}"


@dataclass(frozen=True)
class Meta:
    """What an entry's header says, apart from where its bytes are.

    `length` counts tokens; `descriptors` and `signatures` are the caches' (see
    `caches.dump`, `caches.signatures`), one per layer; no prefix shorter than `minimum_reusable` may be cut from the
    entry, and none at all unless `cuttable`. `created` is nanoseconds since 1970.

    Of a segment, `start` is the first token it holds, `parent` the name of the file
    with the tokens before it (see `directory.entry_name`), `parent_checksum` that
    file's own, and `parts` says for each tensor whether it holds the tokens from
    `start` on only. Empty `parts` are those of a whole entry. `companion` goes with
    all `length` tokens, never with fewer; its tensors are the last of `tensors`.
    """

    fingerprint: str
    namespace: str
    length: int
    tensors: tuple[TensorSpec, ...]
    descriptors: Any
    signatures: tuple[str, ...] = ()
    cuttable: bool = False
    minimum_reusable: int = 0
    role: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    created: int = 0
    start: int = 0
    parent: str = ""
    parent_checksum: str = ""
    parts: tuple[bool, ...] = ()
    companion: CompanionMeta | None = None

    @property
    def all_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors in file order, the tokens first, as they are in the file."""
        return (TensorSpec(TOKENS, "I64", (self.length - self.start,)), *self.tensors)

    @property
    def by_token(self) -> tuple[bool, ...]:
        """For each tensor, whether slot i along its grow axis belongs to token `start` + i, so that a segment may hold the rest."""
        return self.parts or tuple(s.grow_axis is not None and s.shape[s.grow_axis] == self.length for s in self.tensors)

    @property
    def token_bytes(self) -> int:
        """The bytes of the tensors along tokens."""
        return sum(spec.nbytes for spec, part in zip(self.tensors, self.by_token, strict=True) if part)

    @property
    def whole(self) -> tuple[TensorSpec, ...]:
        """The tensors without the tokens, as they are once the parents' parts are in place."""
        return tuple(
            spec.resized(self.length) if part else spec for spec, part in zip(self.tensors, self.by_token, strict=True)
        )


@dataclass(frozen=True)
class Header:
    """A checked header. `body` is where the tensors start; `checksums` and `offsets` (from `body`) go with `meta.all_tensors`; `checksum` is the header's own, and so stands for the whole file."""

    meta: Meta
    body: int
    offsets: tuple[int, ...]
    checksums: tuple[str, ...]
    checksum: str
