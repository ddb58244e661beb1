"""What an assistant needs of the model that it drafts for: its embedding, its last hidden state, and which of its caches to read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from .borrowed import Borrowed, borrowed
from .pairing import lending_layer, text_model

# Of longer chunks nobody wants the last hidden state: they are prefills, whose last token comes by itself.
LONGEST = 65


class Seen:
    """The hidden states behind the final norm that the model's last forward gave, (rows, tokens, hidden size), and which caches it was for."""

    def __init__(self) -> None:
        self.hidden: mx.array | None = None
        self.forwards = 0
        # The first of them, which must not live on for this.
        self._cache: Callable[[], Any] = lambda: None

    def note(self, hidden: mx.array, caches: Any) -> None:
        self.forwards += 1
        known = hidden.shape[1] <= LONGEST and caches
        self.hidden, self._cache = (hidden, weakref.ref(caches[0])) if known else (None, lambda: None)

    def of(self, caches: Sequence[Any]) -> bool:
        """Whether they are of the one sequence that these caches hold."""
        return self.hidden is not None and self.hidden.shape[0] == 1 and len(caches) > 0 and self._cache() is caches[0]


class Target:
    """A model of mlx-lm's ``gemma4`` or ``gemma4_text``, whose forwards are watched from now on. For one model once."""

    def __init__(self, model: Any, kinds: Iterable[str]):
        """`kinds` are the types of layers to read, of which the model has some with keys and values of their own (see `pairing`)."""
        self._trunk = text_model(model).model
        # The caches are in the order of the layers.
        self._lenders: dict[str, Any] = {kind: lending_layer(model, kind) for kind in kinds}
        self.window: int = self._trunk.config.sliding_window
        self.dtype: mx.Dtype = self._trunk.norm.weight.dtype
        self._seen = _watched(self._trunk)

    def embed(self, tokens: mx.array) -> mx.array:
        """What the model makes of token ids before its first layer: (..., hidden size)."""
        return self._trunk.embed_tokens(tokens) * self._trunk.embed_scale

    def hidden(self, caches: Sequence[Any], at: int | None = None) -> mx.array | None:
        """The hidden state (1, 1, hidden size) behind the last token, or behind token `at` of the last chunk; None when the last forward was not for this sequence alone."""
        if not self._seen.of(caches):
            return None
        hidden = self._seen.hidden
        assert hidden is not None
        last = hidden.shape[1] - 1
        at = last if at is None else min(at, last)
        return hidden[:, at : at + 1]

    @property
    def forwards(self) -> int:
        """How many forwards the model has done."""
        return self._seen.forwards

    def read(self, caches: Sequence[Any], most: int) -> dict[str, Borrowed] | None:
        """Keys and values by type of layer, of sliding layers the newest `most`; None where there are none of one sequence."""
        found = {}
        for kind, at in self._lenders.items():
            one = borrowed(caches[at], most if kind == "sliding_attention" else None)
            if one is None:
                return None
            found[kind] = one
        return found


def _watched(trunk: Any) -> Seen:
    """Have each call of a module note what it gave. The class is replaced, as calls look there; the module's members stay what they are."""
    there: Seen | None = getattr(type(trunk), "_seen", None)
    if there is not None:
        return there
    seen = Seen()

    class Watched(type(trunk)):  # type: ignore[misc]
        _seen = seen

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            hidden = super().__call__(*args, **kwargs)
            self._seen.note(hidden, kwargs.get("cache", args[1] if len(args) > 1 else None))
            return hidden

    Watched.__name__, Watched.__qualname__, Watched.__module__ = type(trunk).__name__, type(trunk).__qualname__, type(trunk).__module__
    trunk.__class__ = Watched
    return seen
