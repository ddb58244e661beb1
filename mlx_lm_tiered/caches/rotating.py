"""RotatingKVCache: a ring of the last `max_size` tokens behind the first `keep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from .attention import TOKEN_AXIS
from .kind import Dump, Kind, Tensor, room, share, total_nbytes
from .untrusted import Reader


def linear(cache: Any) -> bool:
    """Whether slot i is token i's for every i.

    True until the ring wraps or a chunk pushes tokens out; also right after one
    first chunk longer than the window, of which upstream keeps every token until
    the next update.
    """
    return cache._idx == cache.offset <= cache.keys.shape[TOKEN_AXIS]


def unwind_ring(cache: Any, n: int) -> None:
    """Take the last `n` tokens of a chunk of more than `n`, several, tokens back, wherever the ring had wrapped.

    Upstream puts the ring in order for such a chunk, drops what its first token does
    not see, and appends all of it: so what is left is what a chunk without those tokens leaves.
    The slots go with the tokens, because upstream takes slots beyond the window for tokens to drop.
    """
    cache.keys, cache.values = (array[..., : cache._idx - n, :] for array in (cache.keys, cache.values))
    cache._idx -= n
    cache.offset = cache.offset - n


class RotatingKind(Kind):
    """Cut only while nothing can have been dropped, which is up to the last token before `max_size`.

    Past that a ring may hold more slots than the window and still have lost its
    first tokens: a row that upstream extracts from a batch of prompts of different
    lengths has padding in their place, and nothing on it that says so.
    """

    name = "kv-rotating"
    class_name = "mlx_lm.models.cache.RotatingKVCache"

    def signature(self, cache: Any) -> str:
        return "kv:rotating-plain"

    def empty(self, cache: Any) -> bool:
        return cache.keys is None or cache.offset == 0

    def length(self, cache: Any) -> int | None:
        return None if self.empty(cache) else cache.offset

    def can_cut(self, cache: Any, n: int) -> bool:
        if self.empty(cache) or n == cache.offset:
            return True
        return 0 <= n < cache.offset < cache.max_size and linear(cache)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)(cache.max_size, keep=cache.keep)
        if self.empty(cache) or n == 0:
            return lent
        if n is None or n == cache.offset:
            lent.keys, lent.values = share(cache.keys), share(cache.values)
            lent.offset, lent._idx = cache.offset, cache._idx
            return lent
        slots = self._slots(n, cache, cache.keys.shape[TOKEN_AXIS])
        lent.keys, lent.values = cache.keys[..., :slots, :], cache.values[..., :slots, :]
        lent.offset = lent._idx = n
        return lent

    def _slots(self, n: int, cache: Any, capacity: int) -> int:
        """Slots of a linear buffer of `n` tokens. Upstream takes slots beyond `max_size` for tokens to drop, so there may be no slack there."""
        return n if n >= cache.max_size else room(n, cache.step, min(capacity, cache.max_size))

    def dump(self, cache: Any) -> Dump:
        fields = {"offset": 0, "keep": cache.keep, "max_size": cache.max_size, "_idx": 0}
        if self.empty(cache):
            return Dump(fields, {})
        fields |= {"offset": cache.offset, "_idx": cache._idx}
        if not linear(cache):
            return Dump(fields, {"keys": Tensor(cache.keys), "values": Tensor(cache.values)})
        axis = TOKEN_AXIS if cache.offset + cache.step <= cache.max_size else None
        keys, values = cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]
        return Dump(fields, {"keys": Tensor(keys, axis), "values": Tensor(values, axis)})

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays, self.elements)
        max_size = reader.integer("max_size", 1)
        cache = self.cache_class()(max_size, keep=reader.integer("keep", 0, max_size - 1))
        cache.offset, cache._idx = reader.integer("offset"), reader.integer("_idx")
        if cache.offset:
            cache.keys, cache.values = reader.keys_and_values(cache._idx)
            self._check_ring(reader, cache)
        elif cache._idx:
            raise reader.fault("an empty ring has no position")
        reader.end()
        return cache

    def _check_ring(self, reader: Reader, cache: Any) -> None:
        capacity = cache.keys.shape[TOKEN_AXIS]
        if linear(cache):
            slots = self._slots(cache.offset, cache, capacity) if capacity > cache.max_size else capacity
            if slots < capacity:
                cache.keys, cache.values = cache.keys[..., :slots, :], cache.values[..., :slots, :]
            return
        whole = cache._idx == capacity or capacity == cache.max_size
        if cache.offset < capacity or capacity < cache.max_size or not whole or cache._idx < cache.keep:
            raise reader.fault("offset, position and size of the ring contradict each other")

    def nbytes(self, cache: Any) -> int:
        return total_nbytes((cache.keys, cache.values))

    def unwinds(self, cache: Any, whole: bool) -> bool:
        return not whole

    def unwind(self, cache: Any, n: int) -> None:
        unwind_ring(cache, n)

    def row(self, cache: Any) -> Any | None:
        if self.empty(cache):
            return BatchRotatingKVCache(cache.max_size, [0])
        if cache.keys.shape[0] != 1:
            return None
        if not linear(cache) or cache.keys.shape[TOKEN_AXIS] > cache.max_size:
            return type(cache).merge([cache])
        row = BatchRotatingKVCache(cache.max_size, [0])
        # The arrays themselves, not new handles: a second handle would make the next step copy.
        row.keys, row.values = cache.keys, cache.values
        row.offset = mx.array([cache.offset])
        row._idx = row._offset = cache.offset
        return row
