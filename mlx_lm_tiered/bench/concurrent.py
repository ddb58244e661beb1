"""Requests at once under a KV scheme, against the same requests one after another under mlx-lm's own ``--kv-bits``, which serves no batches.

Two real servers live at the same time and are used in turn: one with the plugin and
``--kv-scheme``, one without the plugin and with mlx-lm's flags for the same format from
the same token on. Each pair has prompts of its own, which neither has seen; both get
the same ones. A side's time is that from sending the first request to the end of the
last answer, prefill included, and all answers have the same number of tokens.
``concurrent_to_sequential`` is the median over the pairs of mlx-lm's time over the
plugin's; above 1 the plugin is faster.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress
from mlx_lm_tiered.schemes.spec import parse

from .client import Answer, RequestFailed, endless
from .report import spread
from .server import Server, server_command, stock, tiered_flags


def run(model: Path, scheme: str = "affine:4", requests: int = 4, prefix_tokens: int = 256, decode_tokens: int = 96, pairs: int = 3) -> dict[str, Any]:
    """Measure it. Raises ValueError for a scheme that mlx-lm has no flags for; ServerFailed, RequestFailed."""
    spec = parse(scheme)
    if spec.affine is None:
        raise ValueError(f"{scheme} cannot be asked of mlx-lm itself; use affine:BITS[:GROUP][@START]")
    theirs = ["--kv-bits", str(spec.affine.bits), "--kv-group-size", str(spec.affine.group_size), "--quantized-kv-start", str(spec.start)]
    bias = endless(model)
    text = long_document(model, prefix_tokens)
    measured = []
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home = Path(scratch)
        flags = tiered_flags(None, "--kv-scheme", str(spec))
        with Server(model, home / "tiered.log", flags, command=server_command()) as ours, stock(model, home / "upstream.log", *theirs) as upstream:

            def asks(server: Server) -> Callable[[str], Answer]:
                return lambda prompt: server.complete(prompt, max_tokens=decode_tokens, logit_bias=bias)

            for server in (ours, upstream):
                server.complete("Hello", max_tokens=4, logit_bias=bias)
            for number in range(pairs):
                prompts = [f"{number} and {place}: {text}" for place in range(requests)]
                sides = [("concurrent", requests, ours), ("sequential", 1, upstream)]
                pair: dict[str, Any] = {}
                for name, at_once, server in sides if number % 2 == 0 else reversed(sides):
                    with Progress(f"pair {number + 1} of {pairs}, {name}"):
                        pair[f"{name}_s"], answers = _timed(asks(server), prompts, at_once)
                    if any(answer.completion_tokens != decode_tokens for answer in answers):
                        raise RequestFailed(f"the model stopped after {min(a.completion_tokens for a in answers)} tokens; nothing can be measured")
                    if name == "concurrent":
                        pair["at_once"] = _at_once(answers)
                measured.append(pair | {"prompt_tokens": answers[0].prompt_tokens})
    ratios = [pair["sequential_s"] / pair["concurrent_s"] for pair in measured]
    return {
        "bench": "concurrent",
        "model": str(model),
        "scheme": str(spec),
        "upstream": " ".join(theirs),
        **spread("concurrent_to_sequential", ratios),
        "concurrent_s": median(pair["concurrent_s"] for pair in measured),
        "sequential_s": median(pair["sequential_s"] for pair in measured),
        "at_once": min(pair["at_once"] for pair in measured),
        "requests": requests,
        "prompt_tokens": max(pair["prompt_tokens"] for pair in measured),
        "decode_tokens": decode_tokens,
        "pairs": pairs,
        "measured": measured,
    }


def _timed(ask: Callable[[str], Answer], prompts: Sequence[str], at_once: int) -> tuple[float, list[Answer]]:
    """Seconds for all of them, so many at a time, and their answers."""
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, prompts))
    return time.monotonic() - started, answers


def _at_once(answers: Sequence[Answer]) -> int:
    """How many of these, all sent at the same moment, were being decoded at the time when the most were."""
    return max(sum(other.arrivals[0] <= answer.arrivals[0] <= other.arrivals[-1] for other in answers) for answer in answers)
