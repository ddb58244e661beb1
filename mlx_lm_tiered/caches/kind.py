"""What a cache class must answer to be kept, lent, cut and written, and the registry of those that do."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, overload

import mlx.core as mx


class UnknownCacheClass(Exception):
    """No kind is registered for a cache's class; the text names the class."""


class InconsistentLength(ValueError):
    """Caches that belong together hold different numbers of tokens."""


class Later(NamedTuple):
    """An array that is made when it is needed, and by then of this shape and type. `make(start)` gives what it has from token `start` on, to be computed before the cache is written to."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    make: Callable[[int], mx.array]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


class Tensor(NamedTuple):
    """One array of a cache. `grow_axis` is the axis along which it may come back
    longer than it was dumped, the room behind the last token; None if it may not."""

    array: mx.array | Later
    grow_axis: int | None = None


def made(array: mx.array | Later) -> mx.array:
    """The array itself; one that was made is computed. Generation thread only."""
    if not isinstance(array, Later):
        return array
    array = array.make(0)
    mx.eval(array)
    return array


def since(array: mx.array | Later, axis: int | None, start: int) -> mx.array:
    """What an array has from token `start` on, tokens being along an axis; to be computed before the cache is written to. Generation thread only."""
    if isinstance(array, Later):
        return array.make(start)
    if start == 0:
        return array
    assert axis is not None
    return array[(slice(None),) * axis + (slice(start, None),)]


class Dump(NamedTuple):
    """A cache as JSON-able fields and named arrays without slack."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor]


class Kind:
    """What one cache class answers. One object per class, without state of its own.

    `name` is the word in descriptors and files; it must never change its meaning.
    `class_name` is the class's module and qualified name. A subclass of a known
    class is unknown: it may hold or mean something else.
    """

    name: str
    class_name: str
    # Types that keys and values of a loaded cache may have.
    elements: tuple[mx.Dtype, ...] = (mx.float16, mx.bfloat16, mx.float32)

    def cache_class(self) -> type:
        """The class itself, its module imported on demand."""
        module, _, attribute = self.class_name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    def signature(self, cache: Any) -> str:
        """How the cache stores what it holds, e.g. ``kv:quant:8:64``."""
        raise NotImplementedError

    def stored_as(self, cache: Any) -> str:
        """The name of the kind whose form it has on disk."""
        return self.name

    def stored_signature(self, cache: Any) -> str:
        """The signature of what is stored of it."""
        return self.signature(cache)

    def quantized(self, cache: Any) -> bool:
        """Whether a KV scheme has quantized what it holds."""
        return False

    def empty(self, cache: Any) -> bool:
        """Whether the cache is as good as new."""
        raise NotImplementedError

    def length(self, cache: Any) -> int | None:
        """Tokens the cache has seen; None if it is empty or does not count."""
        raise NotImplementedError

    def can_cut(self, cache: Any, n: int) -> bool:
        """Whether `lend` to exactly `n` tokens gives the state of a fresh run over them."""
        raise NotImplementedError

    def minimum_reusable(self, cache: Any) -> int:
        """No prefix of fewer tokens than this may be reused."""
        return 0

    def stays_cuttable(self, cache: Any) -> bool:
        """Whether every prefix that can be cut out now can still be cut out when the cache has grown."""
        return False

    def lend(self, cache: Any, n: int | None = None) -> Any:
        """A new cache over the same buffers, cut to `n` tokens, which `can_cut` must allow.

        Whatever the borrower does, the lender keeps its values: every array has a
        new handle, and mlx copies a buffer with two handles before it writes to it.
        """
        raise NotImplementedError

    def dump(self, cache: Any) -> Dump:
        """Everything the cache holds."""
        raise NotImplementedError

    def fields(self, cache: Any, offset: int) -> dict[str, Any]:
        """Of a dump, had this empty cache `offset` tokens. Of kinds that paged caches are stored as."""
        raise NotImplementedError

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        """The cache that was dumped. Raises ValueError for anything `dump` cannot have made."""
        raise NotImplementedError

    def nbytes(self, cache: Any) -> int:
        """Bytes of the arrays the cache holds, slack included."""
        raise NotImplementedError

    def shared(self, cache: Any) -> dict[Hashable, int]:
        """What of its bytes other caches may hold as well, and then is there once: a name for each part, and its bytes."""
        return {}

    def observe(self, cache: Any) -> None:
        """Note what bounds the reuse of a cache that just took a chunk of tokens."""

    def rest(self, cache: Any) -> None:
        """The cache is stored: nothing will be written to it any more."""

    def order(self, cache: Any) -> None:
        """Before a chunk of several tokens: put what upstream's mask for such a chunk expects in order into that order."""

    def unwinds(self, cache: Any, whole: bool) -> bool:
        """Whether `unwind` can take tokens of the chunk that comes next back: all but its first, or the `whole` chunk."""
        return False

    def unwind(self, cache: Any, n: int) -> None:
        """Take the last `n` tokens of the last chunk, one of several tokens, back, as if they had never come. `unwinds` must have allowed it."""
        raise NotImplementedError

    def row(self, cache: Any) -> Any | None:
        """The cache as a batch of one over the same buffers, or None if upstream must merge."""
        return None


class Trimmed(Kind):
    """Caches of which the last tokens can always go by their own `trim`."""

    def unwinds(self, cache: Any, whole: bool) -> bool:
        return True

    def unwind(self, cache: Any, n: int) -> None:
        cache.trim(n)


_by_class: dict[str, Kind] = {}
_by_name: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Make a kind known. Raises ValueError when its name or class is taken."""
    if kind.class_name in _by_class or kind.name in _by_name:
        raise ValueError(f"a kind for {kind.class_name} or named {kind.name} is registered already")
    _by_class[kind.class_name] = kind
    _by_name[kind.name] = kind


def kinds() -> list[Kind]:
    """All registered kinds."""
    return list(_by_class.values())


def class_name(cache: Any) -> str:
    cls = type(cache)
    return f"{cls.__module__}.{cls.__qualname__}"


def kind_of(cache: Any) -> Kind:
    """The kind of a cache's exact class. Raises UnknownCacheClass."""
    name = class_name(cache)
    kind = _by_class.get(name)
    if kind is None:
        raise UnknownCacheClass(f"no kind for cache class {name}")
    return kind


def kind_named(name: str) -> Kind | None:
    return _by_name.get(name)


@overload
def share(array: mx.array) -> mx.array: ...
@overload
def share(array: None) -> None: ...
def share(array: mx.array | None) -> mx.array | None:
    """A new handle on the same buffer."""
    return None if array is None else array[...]


def total_nbytes(arrays: Iterable[mx.array | None]) -> int:
    return sum(a.nbytes for a in arrays if a is not None)


def room(n: int, step: int, capacity: int) -> int:
    """Slots to keep when cutting to `n` of `capacity`: the next token's included, in whole steps."""
    return min(capacity, (n // step + 1) * step)
