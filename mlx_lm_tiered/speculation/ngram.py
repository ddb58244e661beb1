"""Drafts by prompt lookup: what followed the last time that the sequence had these tokens. No weights.

The method is Saxena's "prompt lookup decoding" (2023), with an index instead of a
search: pairs of tokens, the last place of each, and for each place the one before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

# Tokens that must agree before a draft, the pending one among them: at first, and after a draft of which something was right.
LEAST = 3
# Of the earlier places of a pair, how many of the latest are looked at; of a match, how many tokens are compared.
PLACES, LONGEST = 64, 32


class NGramSource:
    """Implements `DraftSource`."""

    name = "ngram"
    tokens = 8

    def begin(self, model: Any = None) -> NGramDrafter:
        return NGramDrafter()


class NGramDrafter:
    """Implements `Drafter` over the sequence's own tokens, of which it keeps no copy."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # of a pair of tokens, the place of its second
        self._before = array("q")  # for each place, the place before of the same pair, or -1
        self._least = LEAST

    def hopes(self, tokens: Sequence[int]) -> bool:
        self._index(tokens)
        # A match of LEAST with the pending token needs that of the pair before it.
        return len(tokens) > 1 and self._before[-1] >= 0

    def draft(self, tokens: Sequence[int], pending: int, most: int, caches: Sequence[Any] = ()) -> list[int]:
        self._index(tokens)
        place, length = self._longest(tokens, pending)
        if length < self._least:
            return []
        drafts: list[int] = []
        # A short match promises little.
        for at in range(place + 2, place + 2 + min(most, length)):
            # Behind the end a repetition goes on with what was drafted of it.
            past = at - len(tokens)
            drafts.append(tokens[at] if past < 0 else pending if past == 0 else drafts[past - 1])
        return drafts

    def verified(self, drafted: int, accepted: int) -> None:
        """Each draft of which nothing was right asks for a longer match: where text repeats by chance drafts soon cease."""
        self._least = LEAST if accepted else min(self._least + 1, LONGEST)

    def _index(self, tokens: Sequence[int]) -> None:
        for at in range(len(self._before), len(tokens)):
            if at == 0:
                self._before.append(-1)
                continue
            # Tokens are below 2^32; negative ones name image content, which nobody drafts.
            pair = tokens[at - 1] << 32 | tokens[at] & 0xFFFFFFFF
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = at

    def _longest(self, tokens: Sequence[int], pending: int) -> tuple[int, int]:
        """Of the places of the last pair before `pending`, the latest of the longest match behind which the sequence had `pending`, and that match's tokens."""
        end = len(tokens) - 1
        best, length = -1, 0
        place = self._before[end] if end > 0 else -1
        for _ in range(PLACES):
            if place < 0:
                break
            if tokens[place + 1] == pending:
                same = 2
                while same < LONGEST and place >= same and tokens[place - same] == tokens[end - same]:
                    same += 1
                if same + 1 > length:
                    best, length = place, same + 1
            place = self._before[place]
        return best, length
