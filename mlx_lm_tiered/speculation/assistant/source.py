"""Drafts by an assistant: for each the embedding of the token before and the hidden state behind it, over the model's own keys and values.

The method is Gemma 4's (transformers' `SinglePositionMultiTokenCandidateGenerator`). As
drafts only ever cost time, it is free what position they are drafted at and how much of
a sliding window they see; acceptance says which is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..costs import FIRST
from ..pricing import least
from ..source import NONE, Draft, DraftCost, always
from . import config

# Gemma 4's layers are imported with the first model: imported before the plugin's hooks are in place they would keep mlx-lm's attention.
if TYPE_CHECKING:
    from .model import AssistantModel
    from .target import Target


class AssistantSource:
    """Implements `DraftSource` with the assistant in the directory `path`, of which the weights are loaded with the first model.

    `position` says how the drafts of one round are placed: ``hold``, all at the pending token's place as transformers
    does, ``advance``, each a place further (mlx-optiq), or ``before``, all at the last known token's (other engines).
    `window` is how many of the newest tokens are read of sliding layers, at most and by default the model's window. Raises `config.BadArtifact`.
    """

    name = "assistant"

    def __init__(self, path: Path, position: str = "hold", window: int | None = None):
        self._path, self._position, self._window = path, position, window
        self.tokens = config.read(path).num_assistant_tokens
        self._assistant: AssistantModel | None = None
        self._target: Target | None = None
        self._model: Any = None

    def refuses(self, model: Any) -> str:
        from . import artifact, pairing
        from .target import Target

        self._target = self._model = None
        try:
            if self._assistant is None:
                self._assistant = artifact.load(self._path)
            pairing.check(self._assistant, model)
        except (config.BadArtifact, pairing.NotAPair) as error:
            return str(error)
        self._target, self._model = Target(model, self._assistant.config.heads), model
        # In another type it would have all keys and values converted for each draft.
        self._assistant.set_dtype(self._target.dtype)
        return ""

    def begin(self, model: Any) -> AssistantDrafter:
        if self._model is not model and (reason := self.refuses(model)):
            raise ValueError(reason)
        assert self._assistant is not None and self._target is not None
        return AssistantDrafter(self._assistant, self._target, self._position, self._window)

    def price(self, model: Any, step: float) -> DraftCost:
        from mlx_lm.models.cache import make_prompt_cache

        drafter, caches = self.begin(model), make_prompt_cache(model)
        mx.eval(model(mx.zeros((1, 2), mx.uint32), cache=caches))
        return DraftCost(least(lambda: _drafted(drafter, caches))[0] / FIRST)

    def report(self) -> dict[str, Any]:
        return {"model": str(self._path)}


def _drafted(drafter: AssistantDrafter, caches: Sequence[Any]) -> None:
    assert drafter.draft([0, 0], 0, FIRST, caches).tokens


class AssistantDrafter:
    """Implements `Drafter`. It holds nothing of the sequence but which token of its last round is the last one that was right."""

    computed = 0

    def __init__(self, assistant: AssistantModel, target: Target, position: str, window: int | None):
        self._assistant, self._target = assistant, target
        self._advance, self._before = position == "advance", position == "before"
        self._most = target.window if window is None else min(window, target.window)
        self._round: tuple[int, int] | None = None  # the model's forwards up to the last round's, and the token of its chunk

    def hopes(self, tokens: Sequence[int], worth: Callable[[int], bool] = always) -> bool:
        return True

    def draft(
        self, tokens: Sequence[int], pending: int, most: int, caches: Sequence[Any], probabilities: Callable[[Any], Any] | None = None
    ) -> Draft:
        at = self._round[1] if self._round is not None and self._round[0] == self._target.forwards else None
        hidden = self._target.hidden(caches, at)
        read = self._target.read(caches, self._most) if hidden is not None else None
        if hidden is None or read is None:
            return NONE  # others decoded with it; a step by itself comes first
        # The caches may hold more than the row's tokens: a script's, which others were in before.
        position = read["full_attention"].tokens if "full_attention" in read else len(tokens)
        shared = {kind: (one.keys, one.values) for kind, one in read.items()}
        drafts: Any = self._assistant.greedy(self._target.embed, pending, hidden, shared, position - self._before, most, self._advance).tolist()
        return Draft(drafts)

    def verified(self, drafted: int, accepted: int) -> None:
        self._round = self._target.forwards, accepted

    def end(self) -> None:
        self._round = None
