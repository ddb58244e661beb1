"""Drafts by a smaller model of the same vocabulary: mlx-lm's ``--draft-model``, for requests that batch and prefixes that are reused.

Leviathan, Kalman and Matias (2023), "Fast inference from transformers via speculative decoding".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from .. import caches as kinds
from .following import Following, new_caches
from .pricing import least
from .source import NONE, Draft, DraftCost, always
from .vocabulary import mismatch, size

# Tokens of the sequence that the draft model computes at a time while it catches up, beside a step of the request.
CHUNK = 512
# As many as it may be behind and draft all the same: they go with the pending token.
BEHIND = 32
# Tokens forwarded together to see what catching up takes.
PIECE = 16


class Prefixes(Protocol):
    """Where the draft model's caches of a sequence are kept for others that begin like it; one for each sequence."""

    def ready(self, tokens: Sequence[int]) -> bool:
        """Whether a `take` of these tokens finds what there is without waiting. Asked with the same tokens until it is so."""

    def take(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """Caches that hold the first tokens, fewer than all, and how many; the caller owns them."""

    def put(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Store caches that hold the tokens; the caller gives them up."""

    def keep(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Store a copy where caches that have grown could not serve these tokens any more; the caller goes on with its own."""

    def cancel(self) -> None:
        """Nothing will be taken."""


# Whether memory has room for a model's caches: of the model, given what makes them, of so many tokens, computed so many at a time.
Fits = Callable[[Any, Callable[[Any], list[Any]], int, int], bool]


class Pair(NamedTuple):
    """A draft model with the numbers of logits that it and the model that answers have."""

    model: Any
    size: int
    target_size: int


class DraftModelSource:
    """Implements `DraftSource` over the model of a directory. `target` says where the model that answers came from, if that is known."""

    name = "draft"
    tokens = 3  # mlx-lm's default

    def __init__(
        self,
        path: Path,
        prefixes: Callable[[], Prefixes | None] = lambda: None,
        target: Callable[[], Path | None] = lambda: None,
        fits: Fits = lambda *wanted: True,
    ):
        self._path = path
        self._fits = fits
        self._prefixes = prefixes
        self._target = target
        self._model: Any = None
        self._pair: Pair | None = None
        self._counts: Counter[str] = Counter()

    def refuses(self, model: Any) -> str:
        from mlx_lm import utils

        if self._model is None:
            loaded = utils.load_model(self._path)[0]
            kinds.check(new_caches(loaded))
            self._model = loaded
        self._pair = Pair(self._model, *(size(one, new_caches(one)) for one in (self._model, model)))
        return mismatch(self._path, self._pair.size, self._target(), self._pair.target_size)

    def begin(self, model: Any) -> DraftModelDrafter:
        assert self._pair is not None
        return DraftModelDrafter(self._pair, self._prefixes(), self._fits, self._counts)

    def price(self, model: Any, step: float) -> DraftCost:
        assert self._model is not None
        caches = new_caches(self._model)
        draft, piece = least(lambda: _forward(self._model, caches, 1), lambda: _forward(self._model, caches, PIECE))
        return DraftCost(draft, min(piece / PIECE, draft))

    def report(self) -> dict[str, Any]:
        return {"model": str(self._path), "reused_tokens": self._counts["reused"], "computed_tokens": self._counts["computed"]}


class DraftModelDrafter:
    """Implements `Drafter`. The draft model's caches hold a prefix of the sequence and catch up with it beside plain steps: at first, and when others decoded with it."""

    def __init__(self, pair: Pair, prefixes: Prefixes | None, fits: Fits, counts: Counter[str]):
        self._pair = pair
        self._fits = fits
        self._counts = counts
        self._prefixes = prefixes
        self._following: Following | None = None
        self._tokens: Sequence[int] = ()
        self._first: list[int] = []  # what there was of them at first
        self._fitting = 0  # of the tokens, how many the draft model is known to have
        self.computed = 0

    def hopes(self, tokens: Sequence[int], worth: Callable[[int], bool] = always) -> bool:
        self.computed = 0
        self._tokens = tokens
        if not self._has(tokens):
            return False
        if self._following is None:
            self._first = self._first or list(tokens)
            if self._prefixes is not None and not self._prefixes.ready(self._first):
                return False
            self._following = self._begun(self._first)
        following = self._following
        behind = len(tokens) - following.held
        if behind > BEHIND:
            if not (worth(behind) and self._fits(self._pair.model, new_caches, behind, CHUNK)):
                return False
            # Without the last token: what holds all of a request's tokens does not serve the same request again.
            first = len(self._first) - 1
            piece = tokens[following.held : min(following.held + CHUNK, first if following.held < first else len(tokens))]
            following.forward(piece)
            following.compute()
            self._counts["computed"] += len(piece)
            self.computed = len(piece)
            if self._prefixes is not None and 0 <= first - following.held <= BEHIND:
                self._prefixes.keep(self._first[: following.held], following.caches)
            return False  # it would wait for that
        return True

    def draft(
        self, tokens: Sequence[int], pending: int, most: int, caches: Sequence[Any] = (), probabilities: Callable[[Any], Any] | None = None
    ) -> Draft:
        following = self._following
        if following is None or not 0 <= pending < self._pair.size:
            return NONE
        drawn: list[mx.array] = []

        def choose(logits: mx.array) -> mx.array:
            logits = logits[:, : self._pair.target_size]
            if probabilities is None:
                return mx.argmax(logits, axis=-1)
            logits = logits.astype(mx.float32)
            likely = probabilities(self._padded(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
            drawn.append(likely)
            # A token that the draft model does not have cannot be forwarded by it; nothing draws it.
            return mx.random.categorical(mx.log(likely))

        behind = [*tokens[following.held :], pending]
        self._counts["computed"] += len(behind)
        drafts = mx.concatenate(following.draft(behind, most, choose))
        likely = mx.concatenate(drawn) if drawn else None
        mx.eval(drafts, [] if likely is None else likely)
        found: Any = drafts.tolist()
        return Draft(found, likely)

    def verified(self, drafted: int, accepted: int) -> None:
        assert self._following is not None
        self._following.settle(accepted)

    def end(self) -> None:
        following, self._following = self._following, None
        if self._prefixes is None:
            return
        if following is None:
            self._prefixes.cancel()
        elif following.held and following.settled:
            self._prefixes.put(list(self._tokens[: following.held]), following.caches)

    def _begun(self, tokens: Sequence[int]) -> Following:
        taken = self._prefixes.take(tokens) if self._prefixes is not None else None
        caches, held = taken if taken is not None else (new_caches(self._pair.model), 0)
        self._counts["reused"] += held
        return Following(self._pair.model, caches, held)

    def _has(self, tokens: Sequence[int]) -> bool:
        """Whether the draft model has all tokens: not those that stand for image content, nor those past its vocabulary."""
        while self._fitting < len(tokens) and 0 <= tokens[self._fitting] < self._pair.size:
            self._fitting += 1
        return self._fitting == len(tokens)

    def _padded(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities over the vocabulary of the model that answers; tokens that the draft model does not have are impossible."""
        missing = self._pair.target_size - logprobs.shape[-1]
        return logprobs if missing <= 0 else mx.pad(logprobs, [(0, 0), (0, missing)], constant_values=-mx.inf)


def _forward(model: Any, caches: list[Any], tokens: int) -> None:
    mx.eval(model(mx.array([[0] * tokens]), cache=caches))
