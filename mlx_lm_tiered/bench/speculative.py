"""Speculative decoding against plain decoding of the same prompt, in pairs.

Three tasks: ``copy`` (the answer repeats the prompt's text), ``edit`` (it repeats it
with a word exchanged) and ``free`` (it goes on with a text). The prompts begin the answer
themselves, so that a model that follows no instructions does them, too. A draft model is
loaded beforehand; that it computes the prompt, beside the first tokens, is part of the time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm_tiered import disable, enable, stats

from ..caches import lend
from ..settings import AUTO
from .in_process import prefilled
from .report import spread
from .text import document

TASKS = ("copy", "edit", "free")
AGAIN = "\n\nThe same text once more:\n\n"


class Run(NamedTuple):
    """One answer: its tokens, seconds to decode them, and what `/stats` says about the drafts."""

    tokens: list[int]
    seconds: float
    report: dict[str, Any]


def run(
    model_path: Path, source: str, gammas: Sequence[int], prefix_tokens: int, decode_tokens: int, repeats: int, draft_model: Path | None = None
) -> dict[str, Any]:
    """`rows`: for each task and number of drafts the speedup, the acceptance, and whether all answers were plain decoding's; beside it the speedup with ``auto``."""
    from mlx_lm import load

    model, tokenizer = load(str(model_path))
    plainly: dict[str, Any] = {"speculation": "off"}
    drafting: dict[str, Any] = {"speculation": source} if draft_model is None else {"draft_model": str(draft_model)}
    rows = []
    for task in TASKS:
        tokens = _prompt(task, tokenizer, prefix_tokens)
        caches = prefilled(model, tokens[:-1])
        _answer(model, caches, tokens, 8, plainly)
        choices: tuple[int | str, ...] = (*gammas, AUTO)
        times: dict[int | str, list[float]] = {gamma: [] for gamma in choices}
        reports: dict[int | str, dict[str, Any]] = {}
        equal = dict.fromkeys(choices, True)
        for _ in range(repeats):
            for gamma in choices:
                plain = _answer(model, caches, tokens, decode_tokens, plainly)
                speculative = _answer(model, caches, tokens, decode_tokens, drafting | {"num_draft_tokens": gamma})
                times[gamma].append(plain.seconds / speculative.seconds)
                reports[gamma] = speculative.report
                equal[gamma] &= plain.tokens == speculative.tokens
        auto = {**spread("auto_speedup", times[AUTO]), "auto_acceptance": reports[AUTO]["acceptance"], "auto_target_calls": reports[AUTO]["target_calls"]}
        rows += [_row(task, gamma, times[gamma], reports[gamma], equal[gamma] and equal[AUTO]) | auto for gamma in gammas]
    return {"source": source, "draft_model": str(draft_model) if draft_model else None, "prefix_tokens": prefix_tokens, "decode_tokens": decode_tokens, "repeats": repeats, "rows": rows}


def _row(task: str, gamma: int, ratios: list[float], report: dict[str, Any], equal: bool) -> dict[str, Any]:
    figures = {name: report[name] for name in ("acceptance", "mean_accepted", "target_calls", "drafted", "accepted")}
    return {"task": task, "gamma": gamma, **spread("speedup", ratios), **figures, "tokens_equal": equal}


def _prompt(task: str, tokenizer: Any, count: int) -> list[int]:
    """About that many tokens of a task."""
    text = document(4 * count)
    if task == "free":
        return list(tokenizer.encode(text))[:count]
    # Whole sentences, so that where the copy begins is a place like where the text begins.
    words = text[: 3 * count].rpartition(". ")[0].split(" ")
    second = words if task == "copy" else [re.sub(r"\bmethod(s?)\b", r"function\1", word) for word in words]
    begun = len(words) // 4
    return list(tokenizer.encode(f"{' '.join(words)}.{AGAIN}{' '.join(second[:begun])}"))


def _answer(model: Any, caches: list[Any], tokens: list[int], count: int, settings: dict[str, Any]) -> Run:
    """`caches` hold all tokens but the last, and go on holding them. Raises ValueError when the drafts are not for this model."""
    enable(prompt_cache_bytes=0, **settings)
    try:
        _generated(model, caches, tokens, 1)  # which has a draft model loaded, and drafts nothing
        emitted, seconds = _generated(model, caches, tokens, count)
        report = (stats() or {})["speculation"] or {}
        if report.get("refused"):
            raise ValueError(f"there is nothing to measure: {report['refused']}")
        return Run(emitted, seconds, report)
    finally:
        disable()


def _generated(model: Any, caches: list[Any], tokens: list[int], count: int) -> tuple[list[int], float]:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model)
    try:
        generator.insert([tokens[-1:]], max_tokens=[count], caches=[lend(caches)], all_tokens=[tokens[:-1]])
        emitted: list[int] = []
        started = 0.0
        while len(emitted) < count:
            prompts, responses = generator.next()
            if prompts:
                started = time.perf_counter()
            emitted += [response.token for response in responses]
        return emitted, time.perf_counter() - started
    finally:
        generator.close()
