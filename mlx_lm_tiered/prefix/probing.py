"""What a request would find, asked from outside: nothing is lent, read, counted as a lookup or made younger."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .ram import RamTier, usable_by

AROUND = 16  # tokens of the prompt before and behind the place where it diverges


class Look(NamedTuple):
    """What one tier has for a prompt: it would serve `hit` leading tokens.

    The stored sequence that shares most leading tokens has `length`, shares `common`
    and on disk lies in `file` (FINGERPRINT/NAME); all empty when nothing is stored.
    """

    hit: int = 0
    length: int = 0
    common: int = 0
    file: str = ""


def look_in_ram(ram: RamTier, namespace: Hashable, tokens: Sequence[int], key: bytes) -> Look:
    """The same for the RAM tier. Any thread."""
    index = ram.index_of(namespace)
    best = index.best(key, usable_by(tokens))
    closest = index.closest(key)
    hit = best[1] if best is not None else 0
    return Look(hit, closest[0].length, closest[1]) if closest is not None else Look(hit)


def answer(model: str, tokens: Sequence[int], looks: Mapping[str, Look], directory: str) -> dict[str, Any]:
    """What a probe tells of a prompt, from a look at each tier, the quickest first.

    `around` are tokens of the prompt only, which whoever asks has: what others said
    stays in files that only their owner can read.
    """
    tier = max(looks, key=lambda name: looks[name].hit)  # the first of equals
    nearest = max(looks, key=lambda name: looks[name].common)
    common = looks[nearest].common
    start = max(0, common - AROUND)
    return {
        "model": model,
        "prompt_tokens": len(tokens),
        "hit_tokens": looks[tier].hit,
        "hit_tier": tier if looks[tier].hit else None,
        "tiers": {name: look._asdict() for name, look in looks.items()},
        "nearest_tier": nearest if common else None,
        "directory": directory,
        "around": {"from": start, "tokens": list(tokens[start : common + AROUND])},
    }
