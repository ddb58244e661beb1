"""Decode speed with the memory guard on, over decode speed with it off.

Two real servers with the plugin live at the same time, one with ``--memory-budget 0``,
and are used in turn. Each measurement decodes the same prompt; the order in a pair
alternates; the result is the median over the pairs' ratios. ``/stats`` confirms that
the guard looked at memory while tokens were decoded: more often than once before and
once after the prefill.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from mlx_lm_tiered.progress import Progress

from .client import Answer, RequestFailed
from .report import spread
from .server import Server, server_command, tiered_flags


def run(model: Path, decode_tokens: int, pairs: int) -> dict[str, Any]:
    """Measure it. Speeds are tokens per second. Raises ServerFailed, RequestFailed; RequestFailed also when the guard was never asked while decoding."""
    ratios, checks, texts = [], 0, []
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home = Path(scratch)
        on = Server(model, home / "on.log", tiered_flags(None), command=server_command())
        with on, Server(model, home / "off.log", tiered_flags(None, "--memory-budget", "0"), command=server_command()) as off:
            for server in (on, off):
                _decode(server, "Hello", 16)
            for number in range(pairs):
                speeds = {}
                before = on.stats()["memory"]["checks"]
                for server in (on, off) if number % 2 == 0 else (off, on):
                    with Progress(f"pair {number + 1} of {pairs}, guard {'on' if server is on else 'off'}"):
                        answer = _decode(server, f"Number {number}: tell a story.", decode_tokens)
                    speeds[server] = (len(answer.arrivals) - 1) / (answer.arrivals[-1] - answer.arrivals[0])
                    texts.append(answer.text)
                checks += on.stats()["memory"]["checks"] - before
                ratios.append(speeds[on] / speeds[off])
            if off.stats()["memory"]["checks"]:
                raise RequestFailed("the server without a guard looked at memory")
    if checks <= 2 * pairs:
        raise RequestFailed("nothing was looked at while tokens were decoded; use more --decode-tokens")
    return {
        "bench": "guard",
        "model": str(model),
        **spread("decode_ratio", ratios),
        "checks": checks,
        "text_equal": texts[0::2] == texts[1::2],
        "pairs": pairs,
        "decode_tokens": decode_tokens,
    }


def _decode(server: Server, prompt: str, tokens: int) -> Answer:
    # Neither end of text nor of turn, whatever their numbers are: what is measured must not end by itself.
    answer = server.complete(prompt, max_tokens=tokens, logit_bias={str(token): -1000.0 for token in range(3)})
    if len(answer.arrivals) < 2:
        raise RequestFailed(f"the model stopped after {answer.completion_tokens} tokens; nothing can be measured")
    return answer
