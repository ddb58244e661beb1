"""Caches with one slot per token: KVCache, ConcatenateKVCache, ChunkedKVCache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from .kind import Dump, Kind, Tensor, Trimmed, room, share, total_nbytes
from .untrusted import Reader

TOKEN_AXIS = 2


class _Tokens(Kind):
    """`keys` and `values` of shape (batch, heads, slots, dim) with the first tokens in the first slots."""

    def empty(self, cache: Any) -> bool:
        return cache.keys is None or cache.offset == 0

    def length(self, cache: Any) -> int | None:
        return None if self.empty(cache) else cache.offset

    def can_cut(self, cache: Any, n: int) -> bool:
        return 0 <= n <= cache.offset or self.empty(cache)

    def nbytes(self, cache: Any) -> int:
        return total_nbytes((cache.keys, cache.values))


def _cut_arrays(cache: Any, slots: int) -> tuple[mx.array, mx.array]:
    """New handles; views of the first `slots` where that is less than all."""
    if slots >= cache.keys.shape[TOKEN_AXIS]:
        return share(cache.keys), share(cache.values)
    return cache.keys[..., :slots, :], cache.values[..., :slots, :]


class _FromFirst(_Tokens):
    """Caches that keep every token, the first one in the first slot."""

    def stays_cuttable(self, cache: Any) -> bool:
        return True

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)()
        if self.empty(cache) or n == 0:
            return lent
        lent.offset = cache.offset if n is None else n
        lent.keys, lent.values = _cut_arrays(cache, self._slots(cache, n))
        return lent

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays, self.elements)
        cache = self.cache_class()()
        cache.offset = reader.integer("offset")
        if cache.offset:
            cache.keys, cache.values = reader.keys_and_values(cache.offset)
            self._check(reader, cache)
        reader.end()
        return cache

    def _slots(self, cache: Any, n: int | None) -> int:
        """How many slots go with `n` tokens, or all, that are lent."""
        raise NotImplementedError

    def _check(self, reader: Reader, cache: Any) -> None:
        """Refuse loaded arrays that such a cache cannot have."""


class PlainKind(Trimmed, _FromFirst):
    """KVCache: grows in steps, so slots behind `offset` are slack."""

    name = "kv"
    class_name = "mlx_lm.models.cache.KVCache"

    def signature(self, cache: Any) -> str:
        return "kv:plain"

    def _slots(self, cache: Any, n: int | None) -> int:
        capacity = cache.keys.shape[TOKEN_AXIS]
        return capacity if n is None else room(n, cache.step, capacity)

    def dump(self, cache: Any) -> Dump:
        if self.empty(cache):
            return Dump({"offset": 0}, {})
        return Dump({"offset": cache.offset}, _token_tensors(cache, cache.offset))

    def fields(self, cache: Any, offset: int) -> dict[str, Any]:
        return {"offset": offset}

    def row(self, cache: Any) -> Any | None:
        row = BatchKVCache([0])
        if self.empty(cache):
            return row
        if cache.keys.shape[0] != 1:
            return None
        # The arrays themselves, not new handles: a second handle would make the next step copy.
        row.keys, row.values = cache.keys, cache.values
        row.offset = mx.array([cache.offset])
        row._idx = cache.offset
        return row


class ConcatenateKind(_FromFirst):
    """ConcatenateKVCache: no slack.

    Upstream's `trim` lowers `offset` alone and the next update appends behind the
    tokens that were to go, so a trimmed one is lent and dumped cut to its offset.
    """

    name = "kv-concat"
    class_name = "mlx_lm.models.cache.ConcatenateKVCache"

    def signature(self, cache: Any) -> str:
        return "kv:concat"

    def _slots(self, cache: Any, n: int | None) -> int:
        return cache.offset if n is None else n

    def dump(self, cache: Any) -> Dump:
        if self.empty(cache):
            return Dump({"offset": 0}, {})
        tensors = _token_tensors(cache, cache.offset)
        return Dump({"offset": cache.offset}, {name: Tensor(t.array) for name, t in tensors.items()})

    def _check(self, reader: Reader, cache: Any) -> None:
        if cache.keys.shape[TOKEN_AXIS] != cache.offset:
            raise reader.fault("it has slots without tokens")


class ChunkedKind(_Tokens):
    """ChunkedKVCache: as KVCache, but the slots begin at token `start_position`."""

    name = "kv-chunked"
    class_name = "mlx_lm.models.cache.ChunkedKVCache"

    def signature(self, cache: Any) -> str:
        return "kv:chunked"

    def can_cut(self, cache: Any, n: int) -> bool:
        if self.empty(cache) or n == cache.offset:
            return True
        # Once its front is gone, what a shorter run would still hold may be gone too.
        return cache.start_position == 0 and 0 <= n < cache.offset

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)(cache.chunk_size)
        if self.empty(cache) or n == 0:
            return lent
        capacity = cache.keys.shape[TOKEN_AXIS]
        lent.offset = cache.offset if n is None else n
        lent.start_position = cache.start_position
        held = lent.offset - lent.start_position
        slots = capacity if n is None else room(held, cache.step, capacity)
        lent.keys, lent.values = _cut_arrays(cache, slots)
        return lent

    def dump(self, cache: Any) -> Dump:
        fields = {"offset": 0, "chunk_size": cache.chunk_size, "start_position": 0}
        if self.empty(cache):
            return Dump(fields, {})
        fields |= {"offset": cache.offset, "start_position": cache.start_position}
        return Dump(fields, _token_tensors(cache, cache.offset - cache.start_position))

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays)
        cache = self.cache_class()(reader.integer("chunk_size", 1))
        cache.offset = reader.integer("offset")
        cache.start_position = reader.integer("start_position", 0, cache.offset)
        if cache.offset:
            cache.keys, cache.values = reader.keys_and_values(cache.offset - cache.start_position)
        reader.end()
        return cache


def _token_tensors(cache: Any, held: int) -> dict[str, Tensor]:
    return {
        "keys": Tensor(cache.keys[..., :held, :], TOKEN_AXIS),
        "values": Tensor(cache.values[..., :held, :], TOKEN_AXIS),
    }
