"""Who decides a token behind a draft. Each rule leaves the distribution of tokens as it is without drafts."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlx_lm_hooks import SpeculativeRow

from .source import Draft


class Rule(Protocol):
    """Samples a row's tokens where some were drafted. A draft is accepted where the sampled token is the drafted one."""

    draws: bool  # whether drafts may be drawn at random, if they say from what

    def together(self, row: SpeculativeRow) -> bool:
        """Whether several positions may be decided at once."""

    def following(self, row: SpeculativeRow, logits: mx.array, draft: Draft) -> list[int]:
        """The tokens behind each of the positions of `logits` (positions, vocabulary). `draft` has those drafted there: one for each position, or one fewer."""


class Target:
    """The row's own sampler decides: the same tokens as without drafts, for the same random numbers."""

    draws = False

    def together(self, row: SpeculativeRow) -> bool:
        return row.together

    def following(self, row: SpeculativeRow, logits: mx.array, draft: Draft) -> list[int]:
        return row.sample(logits)


class Rejection:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): the same distribution, and more drafts are accepted where they were drawn at random."""

    draws = True

    def together(self, row: SpeculativeRow) -> bool:
        return row.independent

    def following(self, row: SpeculativeRow, logits: mx.array, draft: Draft) -> list[int]:
        return row.sample(logits, lambda logprobs: accepted_or_else(row.probabilities(logprobs), draft))


def accepted_or_else(target: mx.array, draft: Draft) -> mx.array:
    """A token for each row of `target` (positions, vocabulary), the model's probabilities p; (positions,) uint32.

    Drafted token d, drawn from q, is taken with probability min(1, p(d) / q(d)), else one is drawn from
    max(p - q, 0): together that is p. A certain draft has a q of one token. Behind the last draft, p itself.
    """
    count = len(draft.tokens)
    if count == 0:
        return mx.random.categorical(mx.log(target))
    drafted = mx.array(draft.tokens, mx.uint32).reshape(-1, 1)
    p = target[:count]
    share = mx.take_along_axis(p, drafted, axis=-1)
    if draft.probabilities is None:
        chance = share
        rest = mx.put_along_axis(p, drafted, mx.array(0.0, p.dtype), axis=-1)
    else:
        q = draft.probabilities
        chance = share / mx.take_along_axis(q, drafted, axis=-1)
        rest = mx.maximum(p - q, 0.0)
    # Of equal p and q rounding may leave nothing; then either is right.
    rest = mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)
    others = mx.random.categorical(mx.log(mx.concatenate([rest, target[count:]])))
    accepted = mx.random.uniform(shape=share.shape) < chance
    return mx.concatenate([mx.where(accepted, drafted, others[:count, None]).reshape(-1), others[count:]]).astype(mx.uint32)
