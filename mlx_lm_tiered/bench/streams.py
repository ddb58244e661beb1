"""Streams at once, and one by itself, of a server that drafts against one that does not.

Two real servers live at the same time and are used in turn. Each pair has prompts of
its own, which neither has seen; both get the same ones. A side's time is that
from sending the first request to the end of the last answer, prefill included, and all answers have
the same number of tokens. With ``throughput_ratio`` the median over the pairs of the time
without drafts over that with them: requests that are together decode plainly, so it should be near 1.
``single_ratio`` is the same for one request by itself, which speculates.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

from .client import RequestFailed, endless
from .report import spread
from .server import Server, server_command, tiered_flags


def run(model: Path, drafting: Sequence[str], streams: int = 8, prefix_tokens: int = 128, decode_tokens: int = 96, pairs: int = 3) -> dict[str, Any]:
    """Measure it; `drafting` are the flags of the server that drafts. Raises ServerFailed, RequestFailed."""
    bias = endless(model)
    text = long_document(model, prefix_tokens)
    ratios: dict[str, list[float]] = {"throughput_ratio": [], "single_ratio": []}
    equal = True
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home, command = Path(scratch), server_command()
        with Server(model, home / "drafting.log", tiered_flags(None, *drafting), command=command) as ours, Server(
            model, home / "plain.log", tiered_flags(None, "--speculation", "off"), command=command
        ) as plain:
            for server in (ours, plain):
                _timed(server, ["Hello"], 16, bias)
            for number in range(pairs):
                for name, count in ("throughput_ratio", streams), ("single_ratio", 1):
                    prompts = [f"{number} of {name}, {place}: {text}" for place in range(count)]
                    seconds, texts = {}, {}
                    for server in (ours, plain) if number % 2 == 0 else (plain, ours):
                        with Progress(f"pair {number + 1} of {pairs}, {count} at once"):
                            seconds[server], texts[server] = _timed(server, prompts, decode_tokens, bias)
                    ratios[name].append(seconds[plain] / seconds[ours])
                    equal &= texts[ours] == texts[plain]
            report = ours.stats()["speculation"]
    if report["refused"]:
        raise RequestFailed(f"there is nothing to measure: {report['refused']}")
    return {
        "bench": "streams",
        "model": str(model),
        "drafting": " ".join(drafting),
        **spread("throughput_ratio", ratios["throughput_ratio"]),
        **spread("single_ratio", ratios["single_ratio"]),
        "acceptance": report["acceptance"],
        "streams": streams,
        "decode_tokens": decode_tokens,
        "pairs": pairs,
        "text_equal": equal,
    }


def _timed(server: Server, prompts: Sequence[str], count: int, bias: dict[str, float]) -> tuple[float, list[str]]:
    """Seconds for all of them at once, and the answers' texts."""
    started = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=count, logit_bias=bias), prompts))
    seconds = time.monotonic() - started
    if any(answer.completion_tokens != count for answer in answers):
        raise RequestFailed(f"the model stopped after {min(a.completion_tokens for a in answers)} tokens; nothing can be measured")
    return seconds, [answer.text for answer in answers]
