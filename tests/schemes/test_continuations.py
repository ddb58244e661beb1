"""Every scheme and class of caches through the tiers: what goes on from RAM, or from SSD after a restart, whole or in part, is bit for bit what one run computes.

One run means a loop over fresh caches, in the chunks that the generations had in which
the prefix was computed: quantizing makes differences of rounding visible, so the chunks
must be the same to compare bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scheme_families import WIDE, write
from scheme_runs import prompt, scheme

import mlx_lm_tiered
from mlx_lm_tiered.schemes.convert import convert
from mlx_lm_tiered.schemes.spec import parse

STEP = 16
REPLY = 8
FIRST = prompt(65, 1)
MORE, OTHER = prompt(20, 2), prompt(20, 3)
RINGS = ("sliding", "kv-shared", "kv-donors", "sinks")  # of 32 tokens: wrapped, and in the middle of their round
RECURRENT = ("hybrid", "parallel-hybrid")
# (family, scheme, dimension of the heads): every width, group and class of caches, with a start and without.
TABLE = [
    ("dense", "affine:2:32", 32), ("dense", "affine:4:64@40", 64), ("dense", "affine:6:128", 128), ("sliding", "affine:5:32@40", 32),
    ("sliding", "config", 32), ("kv-shared", "affine:4:32", 32), ("kv-donors", "affine:3:32@40", 32), ("sinks", "affine:6:32@40", 32),
    ("hybrid", "affine:8:32@40", 32), ("parallel-hybrid", "affine:4:32", 32), ("dense", "turbo", 256), ("sliding", "turbo:k4v5", 128),
    ("dense", "turbo:k4v5@40", 128), ("sliding", "turbo@40", 64),
]  # fmt: skip
LAYERS = [{"layer_idx": 0, "bits": 8, "group_size": 32}, {"layer_idx": 1, "bits": 3, "group_size": 32}]


def chunks(count: int) -> list[int]:
    """How mlx-lm cuts a prompt of so many tokens: the last one is run by itself."""
    parts = []
    while count > 1:
        parts.append(min(STEP, count - 1))
        count -= parts[-1]
    return [*parts, 1]


def of_a_generation(held: int, count: int, start: int) -> list[int]:
    """The chunks of `count` tokens behind `held`, which end where the scheme starts."""
    before = start - held
    return chunks(count) if not 0 < before < count else chunks(before) + chunks(count - before)


def at_once(model: Any, tokens: list[int], cuts: list[int], text: str) -> tuple[list[int], list[bytes]]:
    """A reply and its log-probabilities, after `tokens` in chunks of `cuts`."""
    from mlx_lm.models.cache import make_prompt_cache

    spec = parse(text)
    caches = make_prompt_cache(model)
    assert sum(cuts) == len(tokens)
    reply: list[int] = []
    logprobs = []
    held = 0
    while len(reply) < REPLY:
        n = cuts.pop(0) if cuts else 1
        logits = model(mx.array([[*tokens, *reply][held : held + n]]), cache=caches)[:, -1, :]
        held += n
        if spec.start and held == spec.start:
            convert(caches, spec.form, spec.start)
        if held >= len(tokens):
            logprobs.append(np.array(logits - mx.logsumexp(logits, keepdims=True)).tobytes())
            reply.append(int(mx.argmax(logits)))
    return reply, logprobs


def answer(model: Any, tokens: list[int]) -> tuple[tuple[list[int], list[bytes]], int]:
    """The same by mlx-lm with the plugin, and how many tokens were not computed."""
    from mlx_lm.generate import generate_step

    before = sum(mlx_lm_tiered.stats()["tokens_saved_by_tier"].values())
    totals = set()
    steps = list(generate_step(mx.array(tokens), model, max_tokens=REPLY, prefill_step_size=STEP, prompt_progress_callback=lambda _, total: totals.add(total)))
    report = mlx_lm_tiered.stats()
    assert report["faults"] == {}
    saved = sum(report["tokens_saved_by_tier"].values()) - before
    assert totals == {len(tokens) - saved}
    seen = [int(token) for token, _ in steps], [np.array(logprobs).tobytes() for _, logprobs in steps]
    return seen, saved


def reload(path: Path) -> Any:
    from mlx_lm import load

    return load(str(path))[0]


@pytest.mark.parametrize(("family", "text", "dim"), TABLE)
def test_going_on_is_going_through(monkeypatch, tmp_path, family, text, dim):
    if dim != 32:
        monkeypatch.setitem(WIDE, family, WIDE[family] | {"head_dim": dim})
    start = parse(text).start
    border = start + STEP if start else 3 * STEP  # where a chunk ends
    settings = {"ssd_cache": str(tmp_path / "cold"), "ssd_restore": "always", "prompt_cache_min_tokens": 1, "prompt_cache_bytes": 1 << 30}
    with scheme(text, **settings):
        path = write(family, tmp_path / "model")
        if text == "config":
            (path / "kv_config.json").write_text(json.dumps(LAYERS))
        model = reload(path)
        first, _ = answer(model, FIRST)
        whole = of_a_generation(0, len(FIRST), start)
        assert first == at_once(model, FIRST, list(whole), text)
        longer = [FIRST + first[0] + more for more in (MORE, OTHER)]
        parting = [FIRST[:border] + more for more in (MORE, OTHER)]
        to_the_border = [*of_a_generation(0, border + 1, start)[:-1], *chunks(len(MORE))]
        # What is asked, how much is reused, and the answer.
        again = (FIRST, len(FIRST) - 1, first)
        to_the_reply = [*whole, *[1] * REPLY, *chunks(len(MORE))]
        further = [(tokens, len(FIRST) + REPLY, at_once(model, tokens, list(to_the_reply), text)) for tokens in longer]
        if family in (*RINGS, *RECURRENT):
            parted = [(tokens, 0, at_once(model, tokens, of_a_generation(0, len(tokens), start), text)) for tokens in parting]
        else:
            parted = [(tokens, border, at_once(model, tokens, list(to_the_border), text)) for tokens in parting]
        asked = [again, further[0], parted[0]]
        if start:
            # What was computed before the start saw full precision; what is stored is quantized.
            below = FIRST[: start - 10] + OTHER
            asked.append((below, 0, at_once(model, below, of_a_generation(0, len(below), start), text)))
        for tokens, reused, expected in asked:
            assert answer(model, tokens) == (expected, reused)
    for asked in ([parted[1], further[1]], [again]):
        with scheme(text, **settings):
            model = reload(path)
            for tokens, reused, expected in asked:
                assert answer(model, tokens) == (expected, reused)
            assert mlx_lm_tiered.stats()["tokens_saved_by_tier"]["ssd"] == sum(reused for _, reused, _ in asked)


def test_another_scheme_takes_nothing(tmp_path):
    """Nor the same widths from another token on, nor another list of layers."""
    settings = {"ssd_cache": str(tmp_path / "cold"), "ssd_restore": "always", "prompt_cache_min_tokens": 1, "prompt_cache_bytes": 1 << 30}
    path = tmp_path / "model"
    seen = []
    schemes = ("affine:4:32", "bf16", "affine:5:32", "affine:4:32@40", "affine:4:32@41", "config", "config", "affine:4:32")
    for number, text in enumerate(schemes):
        with scheme(text, **settings):
            if not path.exists():
                write("dense", path)
            (path / "kv_config.json").write_text(json.dumps(LAYERS[: 1 if number == 5 else 2]))
            seen.append(answer(reload(path), FIRST)[1])
    assert seen == [0] * (len(schemes) - 1) + [len(FIRST) - 1]
