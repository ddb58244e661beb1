"""Whether two models have the same tokens.

Their logits may differ in number although their tokens do not: the matrices of one family's models are
padded differently. So what counts is what the ids mean.
"""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

# Ids that may mean something else, of those that both have: names of special tokens differ between a family's models.
STRANGE = 0.01


def size(model: Any, caches: list[Any]) -> int:
    """How many logits a model has for a token; nothing is computed. `caches` are new ones, and are used up."""
    import mlx.core as mx

    return int(model(mx.array([[0]]), cache=caches).shape[-1])


def mismatch(ours: Path, ours_size: int, theirs: Path | None, theirs_size: int) -> str:
    """Why the tokens of a draft model (`ours`) are not those of a model, in a sentence; empty when they are, or nobody knows."""
    if theirs is None:
        return ""
    files = (ours / "tokenizer.json", theirs / "tokenizer.json")
    if not all(file.is_file() for file in files):
        return "" if ours_size == theirs_size else f"the draft model has {ours_size} tokens, the model {theirs_size}"
    if filecmp.cmp(*files, shallow=False):
        return ""
    drafts, models = (_tokens(file) for file in files)
    shared = drafts.keys() & models.keys()
    strange = [number for number in sorted(shared) if drafts[number] != models[number]]
    if not shared or len(strange) > STRANGE * len(shared):
        which = strange[0] if strange else min(drafts, default=0)
        return f"token {which} is {drafts.get(which)!r} to the draft model and {models.get(which)!r} to the model"
    return ""


def _tokens(file: Path) -> dict[int, str]:
    """The tokens of a tokenizer.json by id: of Hugging Face's tokenizers, a map, or for unigrams a list of pairs."""
    data = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((pair[0], number) for number, pair in enumerate(vocabulary))
    return {int(number): text for text, number in pairs} | {int(one["id"]): one["content"] for one in data.get("added_tokens", ())}
