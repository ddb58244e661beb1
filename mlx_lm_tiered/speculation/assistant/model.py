"""The module of a Gemma 4 assistant: layers without keys and values of their own, which attend to the target's.

The computation is `Gemma4AssistantForCausalLM.forward` of Hugging Face transformers
5.24 (`models/gemma4_assistant/modeling_gemma4_assistant.py`), for one position of one
sequence. With e the target's embedding of a token, scaled, and t the target's hidden
state of the position before, behind its final norm:

    h = pre_projection([e, t]);  h = layer(h) for all layers;  h = norm(h)
    logits = h · E^T, without a softcap;  the next draft's t = post_projection(h)

The layers are mlx-lm's own Gemma 4 layers, built as if all of them shared the keys
and values of earlier ones.

The centroid head knows which C clusters the vocabulary falls into: it scores their
centroids, and computes logits only of the V/C tokens of each of the best k. Other
tokens get the least of these logits less one, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from .config import AssistantConfig


class BorrowedKV(NamedTuple):
    """Keys and values of one target layer, as attention is to have them: all are attended to, in any order.

    Plain ones are arrays (1, KV heads, tokens, head dimension). Quantized ones are what
    the cache hands to attention, with its `bits` and `group_size`: mlx-lm's triples, or
    those of a KV scheme of ours, whose attention then stands in for mlx-lm's.
    """

    keys: Any
    values: Any
    bits: int | None = None
    group_size: int | None = None


class _Passing:
    """Stands where a layer expects its cache: it adds no keys and values, and says how those that are there are quantized."""

    def __init__(self, bits: int, group_size: int | None):
        self.bits, self.group_size = bits, group_size

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values


class Backbone(nn.Module):
    """Layers, final norm, and the embeddings of tokens, of which only the head makes use."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, place) for place in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, h: mx.array, shared_kv: Mapping[str, BorrowedKV | tuple[Any, Any]], position: int) -> mx.array:
        borrowed = {name: BorrowedKV(*kv) for name, kv in shared_kv.items()}
        for layer in self.layers:
            kv = borrowed[layer.layer_type]
            cache = None if kv.bits is None else _Passing(kv.bits, kv.group_size)
            h, _, _ = layer(h, None, cache, shared_kv=(kv.keys, kv.values), offset=position)
        return self.norm(h)


class MaskedEmbedding(nn.Module):
    """Which tokens the centroid head computes logits of. `token_ordering` (V,) has the tokens cluster by cluster."""

    def __init__(self, args: ModelArgs, centroids: int, top_k: int):
        super().__init__()
        self.centroids = nn.Linear(args.hidden_size, centroids, bias=False)
        self.token_ordering = mx.zeros((args.vocab_size,), mx.uint32)
        self.top_k = top_k

    def candidates(self, h: mx.array) -> mx.array:
        """The tokens (k · V/C,) of the best k clusters for `h` (1, 1, D)."""
        scores = self.centroids(h).reshape(-1)
        clusters = mx.argpartition(-scores, self.top_k - 1)[: self.top_k]
        return self.token_ordering.reshape(scores.size, -1)[clusters].reshape(-1)


class AssistantModel(nn.Module):
    """An assistant of random weights, its head a centroid head or a tied one; `artifact.load` makes one of an artifact."""

    def __init__(self, config: AssistantConfig, centroid_head: bool):
        super().__init__()
        self.config = config
        width, backbone = config.text.hidden_size, config.backbone_hidden_size
        args = ModelArgs(**vars(config.text))
        self.model = Backbone(args)
        self.pre_projection = nn.Linear(2 * backbone, width, bias=False)
        self.post_projection = nn.Linear(width, backbone, bias=False)
        self.masked_embedding = None
        if centroid_head:
            assert config.num_centroids is not None and config.centroid_intermediate_top_k is not None
            self.masked_embedding = MaskedEmbedding(args, config.num_centroids, config.centroid_intermediate_top_k)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, shared_kv: Mapping[str, BorrowedKV | tuple[Any, Any]], position: int
    ) -> tuple[mx.array, mx.array]:
        """Logits (1, 1, V) of the token behind the one of which `embedded` (1, 1, H) is the target's scaled embedding, and the next draft's hidden (1, 1, H).

        `hidden` (1, 1, H) is the target's behind its final norm, or what the draft before
        returned; `shared_kv` has keys and values by layer type; `position` is the token's, for RoPE.
        """
        h = self.inner(embedded, hidden, shared_kv, position)
        return self.logits(h), self.post_projection(h)

    def greedy(
        self,
        embed: Callable[[mx.array], mx.array],
        token: int | mx.array,
        hidden: mx.array,
        shared_kv: Mapping[str, BorrowedKV | tuple[Any, Any]],
        position: int,
        count: int,
        advance: bool,
    ) -> mx.array:
        """The `count` likeliest drafts (count,) behind `token`, as one graph that nothing has evaluated.

        `embed` makes the target's scaled embeddings (1, 1, H) of tokens (1, 1). Each
        draft's position is `position`, or with `advance` one more than the draft's before.
        """
        drafts: list[mx.array] = []
        last = mx.array(token).reshape(1, 1)
        for place in range(count):
            h = self.inner(embed(last), hidden, shared_kv, position + place if advance else position)
            last = self.argmax(h)
            drafts.append(last)
            hidden = self.post_projection(h)
        return mx.concatenate(drafts, axis=1)[0]

    def inner(self, embedded: mx.array, hidden: mx.array, shared_kv: Mapping[str, BorrowedKV | tuple[Any, Any]], position: int) -> mx.array:
        """The assistant's own hidden state (1, 1, D), behind its final norm; both heads and the next hidden are computed from it."""
        return self.model(self.pre_projection(mx.concatenate([embedded, hidden], axis=-1)), shared_kv, position)

    def logits(self, h: mx.array) -> mx.array:
        """Of all tokens (1, 1, V), for `h` (1, 1, D)."""
        if self.masked_embedding is None:
            return self.model.embed_tokens.as_linear(h)
        tokens, chosen = self._chosen(h)
        others = mx.broadcast_to(chosen.min() - 1, (self.config.text.vocab_size,))
        return mx.put_along_axis(others, tokens, chosen, axis=0)[None, None]

    def argmax(self, h: mx.array) -> mx.array:
        """The token (1, 1) of the highest logit, the first one of several. With a centroid head nothing is made for the whole vocabulary."""
        if self.masked_embedding is None:
            return mx.argmax(self.model.embed_tokens.as_linear(h), axis=-1)
        tokens, chosen = self._chosen(h)
        return mx.where(chosen == chosen.max(), tokens, self.config.text.vocab_size).min().reshape(1, 1)

    def _chosen(self, h: mx.array) -> tuple[mx.array, mx.array]:
        """The tokens of the best clusters, and their logits, each (k · V/C,)."""
        assert self.masked_embedding is not None
        tokens = self.masked_embedding.candidates(h)
        return tokens, self.model.embed_tokens(tokens) @ h.reshape(-1)
