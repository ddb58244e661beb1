"""The assistant's module against Hugging Face transformers' `Gemma4AssistantForCausalLM`, whose outputs `golden/make_assistant_golden.py` has written down in float32 and in float64.

In float32 the layers of random weights, which are steep, make 2e-5 of what single operations
round, transformers' as well as ours: past a hundred tokens of RoPE's angles most of all, which both have in
float32. (With exact ones ours come to a quarter of it. They are not: the model's keys are turned by mlx's, and of what is off in
both a query sees the difference.) So the function is compared in float64, where rounding hides nothing, and in
float32 how far both are from that. A trained pair is not as steep: its drafts are compared in float32.
"""

from __future__ import annotations

from pathlib import Path

import assistants
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_lm_tiered.speculation.assistant.artifact import load
from mlx_lm_tiered.speculation.assistant.target import Target
from support.models import ASSISTANT, TINY

GOLDEN, PAIR = (mx.load(str(Path(__file__).parent / "golden" / f"{name}.safetensors")) for name in ("assistant", "pair"))
CASES = sorted({tuple(name.split(".")[:3]) for name in GOLDEN})
OUTPUTS = ("logits", "hidden")
CLOSE = 1e-5
# mlx's exp of float64, of the softmax, is only as exact as float32.
CLOSE_DOUBLE = 1e-6


@pytest.fixture(scope="module")
def assistant_of(tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = load(assistants.write(tmp_path_factory.mktemp(kind), assistants.config(kind), assistants.tensors(kind)))
        return made[kind]

    return of


def test_every_kind_is_there_below_and_beyond_the_window():
    assert CASES == sorted((kind, str(tokens), form) for kind in assistants.KINDS for tokens in assistants.LENGTHS for form in assistants.FORMS)
    assert assistants.LENGTHS[0] < assistants.WINDOW and assistants.LENGTHS[-1] > 30 * assistants.WINDOW


@pytest.mark.parametrize("case", CASES, ids=".".join)
def test_in_double_precision_logits_and_next_hidden_are_transformers(case, tmp_path, monkeypatch):
    kind, tokens, form = case
    assistant = load(assistants.write(tmp_path, assistants.config(kind), assistants.tensors(kind)))
    assistant.set_dtype(mx.float64)
    # mlx has these in float32 only.
    monkeypatch.setattr(mx.fast, "rms_norm", double_norm)
    for layer in assistant.model.layers:
        layer.self_attn.rope = DoubleRope(assistants.HEAD_DIM[layer.layer_type], **assistants.ROPE[layer.layer_type])
    for name, found, golden in drafts(assistant, kind, int(tokens), form, mx.float64):
        assert found.dtype == mx.float64 and found.shape == golden["double"].shape
        assert np.abs(np.array(found) - golden["double"]).max() < CLOSE_DOUBLE, name


def test_in_single_precision_it_rounds_as_transformers_does(assistant_of):
    """By the root mean square over all kinds, prompts, drafts and outputs, and by the worst."""
    ours, theirs = [], []
    for kind, tokens, form in CASES:
        for _, found, golden in drafts(assistant_of(kind), kind, int(tokens), form, mx.float32):
            ours.append(np.array(found) - golden["double"])
            theirs.append(golden["single"] - golden["double"])
    (square, worst), (their_square, their_worst) = ((np.mean([np.mean(one**2) for one in apart]) ** 0.5, max(np.abs(one).max() for one in apart)) for apart in (ours, theirs))
    assert square < CLOSE / 2 and square < 1.5 * their_square and worst < 2 * their_worst


@pytest.mark.parametrize("tokens", assistants.LENGTHS)
def test_the_trained_pairs_drafts_behind_a_text_are_transformers_in_single_precision(tokens):
    """Target and all: what the model's caches hold is read as it is when a request drafts."""
    model, assistant = load_model(TINY["gemma4_text"])[0], load(ASSISTANT)
    target, ids = Target(model, assistant.config.heads), PAIR["tokens"].tolist()
    caches = make_prompt_cache(model)
    for piece in (ids[: tokens - 1], ids[tokens - 1 : tokens]):
        model(mx.array([piece]), cache=caches)
    hidden = target.hidden(caches)
    kv = {kind: (one.keys, one.values) for kind, one in target.read(caches, target.window).items()}
    assert {name: pair[0].shape[2] for name, pair in kv.items()} == {"full_attention": tokens, "sliding_attention": min(tokens, target.window)}
    for draft in range(2):
        logits, hidden = assistant(target.embed(mx.array([[ids[tokens + draft]]])), hidden, kv, tokens)
        for name, array in zip(OUTPUTS, (logits, hidden), strict=True):
            for precision in ("single", "double"):
                assert mx.abs(array - PAIR[f"{tokens}.{draft}.{precision}.{name}"]).max() < CLOSE, (draft, name, precision)


def drafts(assistant, kind, tokens, form, dtype):
    """Of two drafts each output's name, what ours is, and transformers' by precision; what is drafted from is transformers'."""
    kv = {name: tuple(mx.array(side).astype(dtype) for side in pair) for name, pair in assistants.read(kind, tokens, form).items()}
    if form == "whole":
        # transformers' own mask leaves one more than a window.
        kv["sliding_attention"] = tuple(side[:, :, -assistants.WINDOW - 1 :] for side in kv["sliding_attention"])
    first, hidden, second = assistants.inputs()
    for draft, embedded in enumerate((first, second)):
        outputs = assistant(mx.array(embedded).astype(dtype), mx.array(hidden).astype(dtype), kv, tokens)
        golden = {precision: {name: np.array(GOLDEN[f"{kind}.{tokens}.{form}.{draft}.{precision}.{name}"]) for name in OUTPUTS} for precision in ("single", "double")}
        for name, found in zip(OUTPUTS, outputs, strict=True):
            yield f"{draft}.{name}", found, {precision: golden[precision][name] for precision in golden}
        hidden = golden["double"]["hidden"]


def double_norm(x, weight, eps):
    normed = x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + mx.array(eps, mx.float64))
    return normed if weight is None else normed * weight


class DoubleRope:
    """RoPE of the first so many of a head's numbers, in float64."""

    def __init__(self, dim, rope_theta, rope_type, partial_rotary_factor=1.0):
        turned = int(partial_rotary_factor * dim // 2)
        self.angles = np.concatenate([rope_theta ** -(np.arange(0, 2 * turned, 2) / dim), np.zeros(dim // 2 - turned)])

    def __call__(self, x, offset):
        cos, sin = (mx.array(side(self.angles * offset), mx.float64) for side in (np.cos, np.sin))
        first, second = mx.split(x, 2, axis=-1)
        return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
