"""One length for all ranks: a prefix is used only when every one of them has it, to the same token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm_hooks import Taken

ROUNDS = 6  # of one request; then nobody uses anything


class Together:
    """Has the ranks agree on what each took of one request. `gather` is the contract's (see `Ranks.gather`).

    Every rank says how many tokens it can give. Where all say the same, that is used.
    Else each looks for the longest that it can give within the shortest of these, and
    says that: a cache that cannot be cut (a ring, recurrent state) has another entry,
    or a shorter one, or none. All see the same numbers, so all have the same rounds.
    """

    def __init__(self, gather: Callable[[Sequence[int]], list[list[int]]]):
        self._gather = gather
        self._counts: Counter[str] = Counter()

    def take(self, offer: Callable[[int | None], Taken | None]) -> Taken | None:
        """What `offer(most)` gives, once every rank gives as much: at most so many tokens, or all it can (None). It must not raise."""
        most, first = None, None
        for _ in range(ROUNDS):
            taken = offer(most)
            length = taken.length if taken is not None else 0
            first = length if first is None else first
            lengths = [of for (of,) in self._gather([length])]
            self._counts["rounds"] += 1
            most = min(lengths)
            if most == 0:
                break
            if max(lengths) == most:
                self._counts["agreed"] += 1
                self._counts["shortened"] += length < first
                return taken
        self._counts["given_up"] += bool(first)
        return None

    def report(self) -> dict[str, Any]:
        """Requests that used a prefix on all ranks (`agreed`), of these with less than this rank had (`shortened`); those that this rank had something for and others not (`given_up`); gathers."""
        return {name: self._counts[name] for name in ("agreed", "shortened", "given_up", "rounds")}
