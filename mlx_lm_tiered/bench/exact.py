"""Whether paged KV changes any number: logits over blocks beside those over the same caches without paging, plain or of a KV scheme, bit for bit.

Both get the same chunks: a prompt that ends before, at or behind a block's border, tokens one
by one, a trim (within a block, and over borders), a chunk behind it, and a fork of which
both sides go on with tokens of their own. Blocks of forks do not lie side by side, so gathered
keys are compared as well. Every logit of every forward counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import trim_prompt_cache

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.progress import Progress
from mlx_lm_tiered.schemes.spec import parse

from .in_process import loaded
from .paging import Paging, paging
from .text import first_tokens

logger = logging.getLogger("mlx_lm_tiered")

BLOCKS = (1, 16, 256)


def run(model_path: Path, blocks: Sequence[int] = BLOCKS, scheme: str = "bf16") -> dict[str, Any]:
    """Compare them, of one model. Raises ValueError for one that paging cannot serve, or that cannot have the KV scheme."""
    spec = parse(scheme)
    model, tokenizer = loaded(model_path, [spec])
    with paging(model, spec, logger.warning) as under:
        tokens = first_tokens(tokenizer, 2 * max(blocks) + 300)
        rows = []
        with Progress("prompts") as progress:
            cases = [(block, length) for block in blocks for length in _lengths(block)]
            for number, (block, length) in enumerate(cases):
                rows.append(_compared(under, tokens, block, length))
                progress(number + 1, len(cases))
        return {
            "bench": "paged exact", "scheme": str(spec), "device": str(mx.default_device()), "logits": sum(row["logits"] for row in rows),
            "differing": sum(row["differing"] for row in rows), "furthest": max(row["furthest"] for row in rows), "rows": rows,
        }  # fmt: skip


def found(result: dict[str, Any]) -> list[str]:
    """What is not as it must be, in sentences."""
    return [f"{result['differing']} of {result['logits']} logits differ, by up to {result['furthest']:.3g}"] if result["differing"] else []


def _lengths(block: int) -> list[int]:
    """Of prompts: around a block's border and the next one's."""
    return sorted({max(2, length) for length in (block - 1, block, block + 1, 2 * block, 2 * block + 1, 17)})


class _Pair:
    """Plain caches and paged ones that are given the same tokens."""

    def __init__(self, model: Any, plain: list[Any], paged: list[Any], seen: dict[str, Any]):
        self.model, self.plain, self.paged, self.seen = model, plain, paged, seen

    def forward(self, tokens: list[int]) -> None:
        expected, logits = (self.model(mx.array([tokens]), cache=caches) for caches in (self.plain, self.paged))
        mx.eval(expected, logits, [cache.state for cache in (*self.plain, *self.paged)])
        apart = mx.abs(expected.astype(mx.float32) - logits.astype(mx.float32))
        self.seen["logits"] += expected.size
        self.seen["differing"] += int((expected != logits).sum().item())
        self.seen["furthest"] = max(self.seen["furthest"], apart.max().item())

    def trim(self, count: int) -> None:
        if all(cache.is_trimmable() for cache in self.plain):
            trim_prompt_cache(self.plain, count)
            trim_prompt_cache(self.paged, count)

    def fork(self) -> _Pair:
        return _Pair(self.model, kinds.lend(self.plain), kinds.lend(self.paged), self.seen)


def _compared(under: Paging, tokens: list[int], block: int, length: int) -> dict[str, Any]:
    """One prompt's row: what was compared and what differed."""
    seen: dict[str, Any] = {"block": block, "prompt": length, "logits": 0, "differing": 0, "furthest": 0.0}
    storage = under.plan.storage(2 * (length // block + 1) + 64 // block + 40, block)
    pair = _Pair(under.model, under.caches(), under.plan.apply(under.caches(), storage), seen)
    pair.forward(tokens[:length])
    for at in range(3):
        pair.forward(tokens[length + at : length + at + 1])
    pair.trim(1)
    pair.forward(tokens[length + 5 : length + 7])
    pair.trim(min(length, block + 2))
    pair.forward(tokens[length + 9 : length + 9 + 12])
    fork = pair.fork()
    for at in range(2):
        fork.forward(tokens[length + 30 + at : length + 31 + at])
        pair.forward(tokens[length + 40 + at : length + 41 + at])
    fork.trim(1)
    fork.forward(tokens[length + 50 : length + 67])
    pair.forward(tokens[length + 70 : length + 71])
    fork.forward(tokens[length + 80 : length + 81])
    return seen
