"""Drafts by prompt lookup: what followed the last time that the sequence had these tokens. No weights.

The method is Saxena's "prompt lookup decoding" (2023), with an index instead of a
search: pairs of tokens, the last place of each, and for each place the one before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from .source import NONE, Draft, DraftCost, always

# Tokens that must agree before a draft, the pending one among them: at first, and after a draft of which something was right.
LEAST = 3
# At most that many are asked for, however often drafts were wrong or hopes vain.
MOST = 12
# Hopes in vain after which one token more is asked for. A hope costs the overlap of a step with the one before.
PATIENCE = 2
# Of the earlier places of a pair, how many of the latest are looked at; of a match, how many tokens are compared.
PLACES, LONGEST = 64, 32


class NGramSource:
    """Implements `DraftSource`."""

    name = "ngram"
    tokens = 8

    def refuses(self, model: Any) -> str:
        return ""

    def begin(self, model: Any = None) -> NGramDrafter:
        return NGramDrafter()

    def price(self, model: Any, step: float) -> DraftCost:
        return DraftCost()

    def report(self) -> None:
        return None


class NGramDrafter:
    """Implements `Drafter` over the sequence's own tokens, of which it keeps no copy.

    Where text repeats by chance, drafts soon cease: each one of which nothing was right
    asks for a longer match the next time, and so do hopes of which nothing came.
    """

    computed = 0

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # of a pair of tokens, the place of its second
        self._before = array("q")  # for each place, the place before of the same pair, or -1
        self._least = LEAST
        self._vain = 0

    def hopes(self, tokens: Sequence[int], worth: Callable[[int], bool] = always) -> bool:
        return bool(self._matches(tokens))

    def draft(
        self, tokens: Sequence[int], pending: int, most: int, caches: Sequence[Any] = (), probabilities: Callable[[Any], Any] | None = None
    ) -> Draft:
        found = [(length, place) for length, place in self._matches(tokens) if tokens[place + 1] == pending]
        if not found:
            self._vain += 1
            if self._vain % PATIENCE == 0:
                self._ask_for_more()
            return NONE
        length, place = max(found)
        drafts: list[int] = []
        # A short match promises little.
        for at in range(place + 2, place + 2 + min(most, length + 1)):
            # Behind the end a repetition goes on with what was drafted of it.
            past = at - len(tokens)
            drafts.append(tokens[at] if past < 0 else pending if past == 0 else drafts[past - 1])
        return Draft(drafts)

    def verified(self, drafted: int, accepted: int) -> None:
        if accepted:
            self._least, self._vain = LEAST, 0
        else:
            self._ask_for_more()

    def end(self) -> None:
        pass

    def _ask_for_more(self) -> None:
        self._least = min(self._least + 1, MOST)

    def _matches(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """How many tokens agree, and where the last of them is, of earlier places that agree with the end of `tokens`; the pending token is one more."""
        self._index(tokens)
        end, matches = len(tokens) - 1, []
        place = self._before[end] if end > 0 else -1
        for _ in range(PLACES):
            if place < 0:
                break
            same = 2
            while same < LONGEST and place >= same and tokens[place - same] == tokens[end - same]:
                same += 1
            if same + 1 >= self._least:
                matches.append((same, place))
            place = self._before[place]
        return matches

    def _index(self, tokens: Sequence[int]) -> None:
        for at in range(len(self._before), len(tokens)):
            if at == 0:
                self._before.append(-1)
                continue
            # Tokens are below 2^32; negative ones name image content, which nobody drafts.
            pair = tokens[at - 1] << 32 | tokens[at] & 0xFFFFFFFF
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = at
