"""Lists of caches: what holds for several caches at once, and CacheList, which is such a list."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from .kind import Dump, InconsistentLength, Kind, Tensor, kind_named, kind_of

# Upstream nests once; a bound keeps a hostile file from exhausting the stack.
DEEPEST = 8


def common_length(caches: Sequence[Any]) -> int | None:
    lengths = {n for c in caches if (n := kind_of(c).length(c)) is not None}
    if len(lengths) > 1:
        raise InconsistentLength(f"caches hold {', '.join(map(str, sorted(lengths)))} tokens")
    return lengths.pop() if lengths else None


def all_can_cut(caches: Sequence[Any], n: int) -> bool:
    return n >= 0 and (n == common_length(caches) or all(kind_of(c).can_cut(c, n) for c in caches))


def lend_all(caches: Sequence[Any], n: int | None) -> list[Any]:
    if n is not None and n == common_length(caches):
        n = None
    return [kind_of(c).lend(c, n) for c in caches]


def dump_all(caches: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    descriptors: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for i, cache in enumerate(caches):
        kind = kind_of(cache)
        fields, held = kind.dump(cache)
        descriptors.append({"kind": kind.stored_as(cache), "fields": fields})
        tensors |= {f"{i}.{name}": tensor for name, tensor in held.items()}
    return descriptors, tensors


def load_all(descriptors: Any, arrays: Mapping[str, mx.array]) -> list[Any]:
    """The caches of descriptors. Raises ValueError for what `dump_all` cannot have made."""
    if not isinstance(descriptors, list):
        raise ValueError("the descriptors of the caches are not a list")
    parts: list[dict[str, mx.array]] = [{} for _ in descriptors]
    places = {str(i): part for i, part in enumerate(parts)}
    for name, array in arrays.items():
        layer, _, field = name.partition(".")
        if layer not in places:
            raise ValueError(f"tensor {name[:40]!r} belongs to no cache")
        places[layer][field] = array
    caches = []
    for descriptor, part in zip(descriptors, parts, strict=True):
        if not isinstance(descriptor, dict) or descriptor.keys() != {"kind", "fields"}:
            raise ValueError("a cache's descriptor is not an object of kind and fields")
        name = descriptor["kind"]
        kind = kind_named(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"no cache is of kind {str(name)[:40]!r}")
        caches.append(kind.load(descriptor["fields"], part))
    common_length(caches)
    return caches


def check_depth(value: Any, deepest: int = 4 * DEEPEST) -> None:
    """Raise ValueError when containers are nested deeper; one CacheList is four containers."""
    level = [value]
    for _ in range(deepest):
        level = [v for c in level if isinstance(c, (list, dict)) for v in (c.values() if isinstance(c, dict) else c)]
        if not level:
            return
    if any(isinstance(v, (list, dict)) for v in level):
        raise ValueError("the descriptors of the caches are nested too deeply")


class ListKind(Kind):
    """CacheList: the caches of one layer, at any depth."""

    name = "list"
    class_name = "mlx_lm.models.cache.CacheList"

    def signature(self, cache: Any) -> str:
        return f"list({','.join(kind_of(c).signature(c) for c in cache.caches)})"

    def stored_signature(self, cache: Any) -> str:
        return f"list({','.join(kind_of(c).stored_signature(c) for c in cache.caches)})"

    def shared(self, cache: Any) -> dict[Hashable, int]:
        return {name: size for c in cache.caches for name, size in kind_of(c).shared(c).items()}

    def empty(self, cache: Any) -> bool:
        return all(kind_of(c).empty(c) for c in cache.caches)

    def length(self, cache: Any) -> int | None:
        return common_length(cache.caches)

    def can_cut(self, cache: Any, n: int) -> bool:
        return all_can_cut(cache.caches, n)

    def stays_cuttable(self, cache: Any) -> bool:
        return all(kind_of(c).stays_cuttable(c) for c in cache.caches)

    def minimum_reusable(self, cache: Any) -> int:
        return max((kind_of(c).minimum_reusable(c) for c in cache.caches), default=0)

    def observe(self, cache: Any) -> None:
        for c in cache.caches:
            kind_of(c).observe(c)

    def rest(self, cache: Any) -> None:
        for c in cache.caches:
            kind_of(c).rest(c)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        return type(cache)(*lend_all(cache.caches, n))

    def dump(self, cache: Any) -> Dump:
        descriptors, tensors = dump_all(cache.caches)
        return Dump({"caches": descriptors}, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        if not isinstance(fields, dict) or fields.keys() != {"caches"} or not fields["caches"]:
            raise ValueError("a list of caches has no caches")
        return self.cache_class()(*load_all(fields["caches"], arrays))

    def nbytes(self, cache: Any) -> int:
        return sum(kind_of(c).nbytes(c) for c in cache.caches)

    def row(self, cache: Any) -> Any | None:
        rows = [kind_of(c).row(c) for c in cache.caches]
        return None if any(row is None for row in rows) else type(cache)(*rows)
