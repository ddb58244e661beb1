"""Speculation that is stopped everywhere: whether tokens, caches and the next turn are plain decoding's, from RAM and from a disk.

An answer of many tokens is generated in pieces, by one ``generate_step`` each that goes on
from the prefix that the one before stored; so every border of two pieces is a place to
stop at, and what was stored there is used. Past a sliding window an entry can only be used
whole: one token too many or too few in it, and it is not found or answers wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlx_lm_tiered import disable, enable, stats

from .text import document

MORE = 3  # tokens of the next turn's prompt
FOLLOWING = 4  # tokens of its answer


def run(model_path: Path, tokens: int, every: int, drafts: int, scheme: str, prefix_tokens: int = 100) -> dict[str, Any]:
    """Stops every `every` tokens of an answer of `tokens`; the counts of stops that differ, and what was drafted."""
    import mlx_lm.server  # noqa: F401  (hooked before the model's modules are imported)

    plain = {"kv_scheme": scheme, "prompt_cache_bytes": 0}
    enable(**plain)
    try:
        from mlx_lm import load

        model, tokenizer = load(str(model_path))
        prompt = list(tokenizer.encode(document(8 * prefix_tokens)))[:prefix_tokens]
        more = prompt[:MORE]
        answer = _generated(model, prompt, tokens)
        places = list(range(every, tokens + 1, every))
        # Computed anew from the first token.
        expected = [_generated(model, [*prompt, *answer[:place], *more], FOLLOWING) for place in places]
    finally:
        disable()
    with TemporaryDirectory(prefix="mlx-lm-tiered-stops-", ignore_cleanup_errors=True) as folder:
        on = {"kv_scheme": scheme, "ssd_cache": str(Path(folder) / "cold"), "ssd_restore": "always", "speculation": "ngram", "num_draft_tokens": drafts}
        enable(**on)
        try:
            wrong_tokens, wrong_next = 0, 0
            at = 0
            for place, following in zip(places, expected, strict=True):
                piece = _generated(model, [*prompt, *answer[:at]], place - at)
                wrong_tokens += piece != answer[at:place]
                wrong_next += _generated(model, [*prompt, *answer[:place], *more], FOLLOWING) != following
                at = place
            first = stats() or {}
        finally:
            disable()
        enable(**on)
        try:
            restored = [_generated(model, [*prompt, *answer[:place], *more], FOLLOWING) for place in places]
            second = stats() or {}
        finally:
            disable()
    return {
        "tokens": tokens, "stops": len(places), "kv_scheme": scheme, "draft_tokens": drafts,
        "wrong_tokens": wrong_tokens, "wrong_next_from_ram": wrong_next,
        "wrong_next_from_ssd": sum(a != b for a, b in zip(restored, expected, strict=True)),
        "wrong_lengths": first["keys_shortened"] + second["keys_shortened"],
        "hits_from_ram": first["hits_by_tier"]["ram"], "hits_from_ssd": second["hits_by_tier"]["ssd"],
        "drafted": first["speculation"]["drafted"], "accepted": first["speculation"]["accepted"],
        "faults": {**first["faults"], **second["faults"]},
    }  # fmt: skip


def found(result: dict[str, Any]) -> list[str]:
    """What is not as it must be, in sentences."""
    wrong = [f"{name}: {result[name]}" for name in ("wrong_tokens", "wrong_next_from_ram", "wrong_next_from_ssd", "wrong_lengths", "faults") if result[name]]
    if not 0 < result["accepted"] < result["drafted"]:
        wrong.append("no draft was cut: nothing was tested")
    if result["hits_from_ram"] < 2 * result["stops"] - 1 or result["hits_from_ssd"] < result["stops"]:
        wrong.append("prefixes were not found where they were stored")
    return wrong


def _generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
