"""The keys and values that an assistant reads: those of one sequence in a cache of the model, for one query that comes after all of them.

Attention to all of them does not depend on their order, so a ring is read as it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from ...schemes.lockstep import Lockstep
from ..rollback import singles


class Borrowed(NamedTuple):
    """Keys and values of so many tokens, each an array (1, heads, tokens, width) or what the cache's own attention takes for one."""

    keys: Any
    values: Any
    tokens: int


def borrowed(cache: Any, most: int | None = None) -> Borrowed | None:
    """What a cache holds, without copying it where it is in one piece; the newest `most` tokens where given. Let go of it before the model's next forward, which then writes in place.

    None where the cache holds nothing, or another number of sequences than one.
    """
    one = list(singles([cache]))
    if len(one) != 1:
        return None
    cache = one[0]
    if not isinstance(cache, Lockstep):
        return _cut(cache, most)
    parts = [_cut(part, most) for part in cache.parts]
    if None in parts:
        return None
    if cache.record is not None:
        records, _, tokens = parts[0]  # type: ignore[misc]
        return Borrowed(*cache.held(records, tokens), tokens)
    keys, values, tokens = zip(*parts, strict=True)
    return Borrowed(cache.keys_of(keys), cache.values_of(values), tokens[0])


def _cut(part: Any, most: int | None) -> Borrowed | None:
    if hasattr(part, "alone"):  # over blocks (see `paged`)
        read = part.alone(most)
        return None if read is None else Borrowed(*read)
    if part.keys is None or part.keys.shape[0] != 1:
        return None
    start, stop, ordered = _span(part)
    sides: tuple[Any, ...] = (part.keys, part.values)
    if most is not None and stop - start > most:
        sides, start = tuple(map(ordered, sides)), stop - most
    if stop <= start:
        return None
    keys, values = (side[:, :, start:stop] for side in sides)
    return Borrowed(keys, values, stop - start)


def _span(part: Any) -> tuple[int, int, Callable[[mx.array], mx.array]]:
    """The slots that hold tokens, first and behind the last, and what puts those of a ring in the order of the tokens."""
    slots = part.keys.shape[2]
    padding = getattr(part, "left_padding", None)
    first = 0 if padding is None else max(int(padding.item()), 0)
    if not hasattr(part, "max_size"):
        return first, int(part.offset) if padding is None else part._idx, lambda side: side
    seen = part.offset if padding is None else part._offset
    if padding is None:
        return first, min(seen, slots), part._temporal_order
    if part.rotated:
        # In order the oldest token is in the slot that is written next.
        at = part._idx
        return first, slots, lambda side: mx.roll(side, -at, axis=2)  # type: ignore[call-arg]
    return first, min(part._idx, slots), lambda side: side
