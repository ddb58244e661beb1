"""The assistant's module: drafts as one graph, its two heads, and attention over keys and values in every form that a target's cache has."""

from __future__ import annotations

import assistants
import mlx.core as mx
import pytest

from mlx_lm_hooks import disable, enable
from mlx_lm_tiered.schemes.caches import RotatingQuantizedKVCache
from mlx_lm_tiered.schemes.turbo import TurboQuantKVCache
from mlx_lm_tiered.speculation.assistant.artifact import load
from mlx_lm_tiered.speculation.assistant.model import BorrowedKV
from mlx_lm_tiered.turboquant import codec

TOKENS = 40


@pytest.fixture(params=assistants.KINDS)
def kind(request, tmp_path):
    return request.param


@pytest.fixture
def assistant(kind, tmp_path):
    return load(assistants.write(tmp_path, assistants.config(kind), assistants.tensors(kind)))


@pytest.fixture
def wide(tmp_path, monkeypatch):
    """An assistant with heads of 64, as quantized caches need them, and keys and values for it."""
    monkeypatch.setattr(assistants, "HEAD_DIM", dict.fromkeys(assistants.HEAD_DIM, 64))
    made = load(assistants.write(tmp_path, assistants.config("centroid"), assistants.tensors("centroid")))
    return made, arrays(assistants.borrowed("centroid", TOKENS))


def arrays(borrowed):
    return {name: tuple(mx.array(side) for side in pair) for name, pair in borrowed.items()}


def apart(assistant, first, second):
    """How far apart the outputs are over two forms of the same keys and values."""
    embedded, hidden, _ = map(mx.array, assistants.inputs())
    one, other = (assistant(embedded, hidden, kv, TOKENS) for kv in (first, second))
    return max(mx.abs(a - b).max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("advance", [False, True])
def test_drafts_as_one_graph_are_those_of_single_calls(assistant, kind, advance):
    kv = arrays(assistants.borrowed(kind, TOKENS))
    _, hidden, _ = map(mx.array, assistants.inputs())
    table = mx.random.normal((assistants.V, assistants.H), key=mx.random.key(1))
    together = assistant.greedy(lambda tokens: table[tokens], 3, hidden, kv, TOKENS, 6, advance)
    token, single = mx.array([[3]]), []
    for place in range(6):
        logits, hidden = assistant(table[token], hidden, kv, TOKENS + place * advance)
        token = mx.argmax(logits, axis=-1)
        single.append(token.item())
    assert together.tolist() == single
    assert len(set(single)) > 1


def test_positions_advance_only_where_they_are_to(assistant, kind):
    kv = arrays(assistants.borrowed(kind, TOKENS))
    embedded, hidden, _ = map(mx.array, assistants.inputs())
    here, there = (assistant(embedded, hidden, kv, place)[0] for place in (TOKENS, TOKENS + 1))
    assert mx.abs(here - there).max() > 1e-3


@pytest.mark.parametrize("equal", [False, True])
def test_the_likeliest_token_is_the_first_of_the_highest_logits(assistant, equal):
    if equal:
        weight = assistant.model.embed_tokens.weight
        assistant.model.embed_tokens.weight = mx.broadcast_to(weight[:1], weight.shape)
    for key in range(8):
        h = mx.random.normal((1, 1, assistants.D), key=mx.random.key(key))
        assert assistant.argmax(h).item() == mx.argmax(assistant.logits(h)).item()


def test_the_centroid_head_computes_the_best_clusters_and_puts_the_rest_below(assistant, kind):
    if not kind.startswith("centroid"):
        assert assistant.masked_embedding is None
        return
    h = mx.random.normal((1, 1, assistants.D), key=mx.random.key(4))
    logits, whole = assistant.logits(h)[0, 0], assistant.model.embed_tokens.as_linear(h)[0, 0]
    scores = (assistant.masked_embedding.centroids.weight @ h[0, 0]).tolist()
    best = sorted(range(assistants.CENTROIDS), key=scores.__getitem__)[-assistants.TOP :]
    chosen = assistant.masked_embedding.token_ordering.reshape(assistants.CENTROIDS, -1)[mx.array(best)].reshape(-1).tolist()
    least = min(logits[token].item() for token in chosen)
    for token in range(assistants.V):
        expected = whole[token].item() if token in chosen else least - 1
        assert logits[token].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_attends_to_mlx_lms_quantized_keys_and_values(wide, bits):
    assistant, plain = wide
    packed = {name: [mx.quantize(side, group_size=64, bits=bits) for side in pair] for name, pair in plain.items()}
    read = {name: tuple(mx.dequantize(*side, group_size=64, bits=bits) for side in pair) for name, pair in packed.items()}
    assert apart(assistant, {name: BorrowedKV(*pair, bits, 64) for name, pair in packed.items()}, read) < 1e-5
    assert apart(assistant, plain, read) > 1e-3


def test_attends_to_the_caches_of_a_scheme(wide):
    assistant, plain = wide
    full, ring = TurboQuantKVCache(key_bits=8, value_bits=4), RotatingQuantizedKVCache(16, 0, bits=8, group_size=64)
    for start, stop in ((0, 20), *((place, place + 1) for place in range(20, TOKENS))):
        held = {
            name: BorrowedKV(*cache.update_and_fetch(*(side[:, :, start:stop] for side in plain[name])), cache.bits, cache.group_size)
            for name, cache in (("full_attention", full), ("sliding_attention", ring))
        }
    keys, values = plain["full_attention"]
    read = {
        "full_attention": (codec.decode_keys(codec.encode_keys(keys, 8), 8), codec.decode_values(codec.encode_values(values, 4), 4)),
        "sliding_attention": tuple(
            mx.dequantize(*mx.quantize(side[:, :, -16:], group_size=64, bits=8), group_size=64, bits=8) for side in plain["sliding_attention"]
        ),
    }
    enable("tiered", kv_scheme="turbo:k8v4", prompt_cache_bytes=0)
    try:
        assert apart(assistant, held, read) < 1e-4
    finally:
        disable()
