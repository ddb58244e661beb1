"""The models that tests serve."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "models"

# Trained, fp32, chat template included; see tests/models/README.md for their caches.
TINY = {path.name.removeprefix("tiny-"): path for path in sorted(MODELS.glob("tiny-*"))}

# A Gemma 4 assistant of TINY["gemma4_text"].
ASSISTANT = MODELS / "assistant-gemma4_text"

# A request's logit_bias under which the tiny models never end by themselves.
ENDLESS = {"0": -1000.0, "2": -1000.0}


def document(characters: int, *, start: int = 0) -> str:
    """That many characters of English from Python's own documentation, the kind of text the tiny models know."""
    from mlx_lm_tiered.bench.text import document as product_document

    return product_document(start + characters)[start:]
