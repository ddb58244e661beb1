"""How far a KV scheme's logits are from full precision's: teacher-forced over the last half of a text, given its first half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_lm_tiered.schemes.spec import PLAIN, Spec

from .in_process import prefilled, scheme
from .text import first_tokens


class Quality:
    """A model's text, and what full precision says about it. At least half of the text is past every start of `specs`."""

    def __init__(self, model: Any, tokenizer: Any, specs: Sequence[Spec], text_tokens: int):
        self._model = model
        self.text = first_tokens(tokenizer, max(text_tokens, *(4 * spec.start for spec in specs)))
        self._full = self._logits(PLAIN)[0]

    def of(self, spec: Spec) -> tuple[dict[str, float], list[Any]]:
        """`kl`, the mean Kullback-Leibler divergence in nats, and `top1`, how often the best token is the same; and the caches that hold the text."""
        other, caches = self._logits(spec)
        kl = (mx.exp(self._full) * (self._full - other)).sum(axis=-1).mean()
        same = mx.argmax(self._full, axis=-1) == mx.argmax(other, axis=-1)
        nats: Any = kl.item()
        share: Any = same.mean().item()
        return {"kl": nats, "top1": share}, caches

    def _logits(self, spec: Spec) -> tuple[mx.array, list[Any]]:
        """Log probabilities after each token of the last half."""
        half = len(self.text) // 2
        with scheme(spec):
            caches = prefilled(self._model, self.text[:half])
            logits = self._model(mx.array([self.text[half:]]), cache=caches)[0].astype(mx.float32)
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(logits)
        return logits, caches
