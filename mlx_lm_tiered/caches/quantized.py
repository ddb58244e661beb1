"""QuantizedKVCache: triples of packed values, scales and biases per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..schemes.caches import PARTS
from .attention import TOKEN_AXIS
from .kind import Dump, Tensor, Trimmed, room, share, total_nbytes
from .untrusted import FLOATS, Reader

# Upstream converts a plain cache at some token; later tokens attended to rounded
# keys, earlier ones did not. A run resumed before that token would compute others.
BOUND = "minimum_reusable_offset"


def read_format(reader: Reader) -> tuple[int, int]:
    """Bits and group size, such as mlx can quantize to. Raises ValueError."""
    bits = reader.integer("bits", 2, 8)
    group_size = reader.integer("group_size", 32, 128)
    if bits == 7 or group_size not in (32, 64, 128):
        raise reader.fault(f"nothing is quantized to {bits} bits in groups of {group_size}")
    return bits, group_size


def check_triple(reader: Reader, side: str, triple: Sequence[mx.array], bits: int, group_size: int) -> None:
    """Whether packed values, scales and biases (each of four dimensions) have shapes that belong together. Raises ValueError."""
    packed, scales, biases = triple
    if scales.shape != biases.shape or scales.dtype != biases.dtype:
        raise reader.fault(f"scales and biases of the {side} do not belong together")
    if packed.shape[:3] != scales.shape[:3] or packed.shape[3] * 32 != scales.shape[3] * group_size * bits:
        raise reader.fault(f"the {side} have impossible shapes")


class QuantizedKind(Trimmed):
    """Cuts down to the token at which it was converted, kept in the attribute `minimum_reusable_offset`."""

    name = "kv-quantized"
    class_name = "mlx_lm.models.cache.QuantizedKVCache"

    def signature(self, cache: Any) -> str:
        return f"kv:quant:{cache.bits}:{cache.group_size}"

    def empty(self, cache: Any) -> bool:
        return cache.keys is None or cache.offset == 0

    def length(self, cache: Any) -> int | None:
        return None if self.empty(cache) else cache.offset

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.empty(cache) or self.minimum_reusable(cache) <= n <= cache.offset

    def stays_cuttable(self, cache: Any) -> bool:
        return hasattr(cache, BOUND)

    def minimum_reusable(self, cache: Any) -> int:
        if self.empty(cache):
            return 0
        return min(getattr(cache, BOUND, cache.offset), cache.offset)

    def observe(self, cache: Any) -> None:
        if not hasattr(cache, BOUND):
            setattr(cache, BOUND, cache.offset)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)(group_size=cache.group_size, bits=cache.bits)
        if hasattr(cache, BOUND):
            setattr(lent, BOUND, getattr(cache, BOUND))
        if self.empty(cache) or n == 0:
            return lent
        capacity = cache.keys[0].shape[TOKEN_AXIS]
        lent.offset = cache.offset if n is None else n
        slots = capacity if n is None else room(n, cache.step, capacity)
        # Upstream writes into the three arrays in place: each needs a handle of its own.
        cut = share if slots >= capacity else lambda a: a[..., :slots, :]
        lent.keys, lent.values = tuple(map(cut, cache.keys)), tuple(map(cut, cache.values))
        return lent

    def dump(self, cache: Any) -> Dump:
        fields = {"offset": 0, "bits": cache.bits, "group_size": cache.group_size, BOUND: getattr(cache, BOUND, None)}
        if self.empty(cache):
            return Dump(fields, {})
        fields["offset"] = cache.offset
        tensors = {
            f"{side}_{part}": Tensor(array[..., : cache.offset, :], TOKEN_AXIS)
            for side, triple in (("keys", cache.keys), ("values", cache.values))
            for part, array in zip(PARTS, triple, strict=True)
        }
        return Dump(fields, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays)
        bits, group_size = read_format(reader)
        cache = self.cache_class()(group_size=group_size, bits=bits)
        bound = reader.optional_integer(BOUND)
        if bound is not None:
            setattr(cache, BOUND, bound)
        cache.offset = reader.integer("offset")
        if cache.offset:
            cache.keys, cache.values = self._triple(reader, "keys", cache), self._triple(reader, "values", cache)
            if cache.keys[0].shape[:3] != cache.values[0].shape[:3] or cache.keys[1].dtype != cache.values[1].dtype:
                raise reader.fault("keys and values do not belong together")
        reader.end()
        return cache

    def _triple(self, reader: Reader, side: str, cache: Any) -> tuple[mx.array, mx.array, mx.array]:
        packed = reader.array(f"{side}_packed", 4, (mx.uint32,))
        scales = reader.array(f"{side}_scales", 4, FLOATS)
        biases = reader.array(f"{side}_biases", 4, FLOATS)
        check_triple(reader, side, (packed, scales, biases), cache.bits, cache.group_size)
        if 0 in packed.shape[:2]:
            raise reader.fault(f"the {side} have impossible shapes")
        if packed.shape[TOKEN_AXIS] < cache.offset:
            raise reader.fault(f"{packed.shape[TOKEN_AXIS]} slots cannot hold {cache.offset} tokens")
        return packed, scales, biases

    def nbytes(self, cache: Any) -> int:
        return 0 if cache.keys is None else total_nbytes([*cache.keys, *cache.values])
