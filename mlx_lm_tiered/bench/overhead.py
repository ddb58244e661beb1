"""Decode speed with the tier on, over decode speed with it off.

Two real servers live at the same time, one stock and one with the plugin, and are
used in turn. Each measurement first sends a long prompt that was never seen, whose
KV cache then waits to be written, and decodes a short prompt at once: so with the
tier on the write-behind queue is not empty while tokens are decoded, which
``/stats`` confirms before and during each decode. Before the stock server's turn
the other one has written everything and is at rest. The order in a pair
alternates; the result is the median over the pairs' ratios.

By default nothing is written while tokens are decoded. With `full_queue` the queue
is over its cap, and is written in the small share of the time that there is for
what must not wait.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

from .client import Answer, RequestFailed
from .report import spread
from .server import Server, server_command, stock, tiered_flags

_SAMPLE_SECONDS = 0.5  # seldom, so that asking does not slow down what is measured


def run(model: Path, prefix_tokens: int, decode_tokens: int, pairs: int, full_queue: bool = False) -> dict[str, Any]:
    """Measure it. Speeds are tokens per second. Raises ServerFailed, RequestFailed; RequestFailed also when the queue was empty in every pair."""
    text = long_document(model, prefix_tokens)
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home = Path(scratch)
        flags = [*tiered_flags(home / "cold"), *(["--ssd-queue", "1"] if full_queue else [])]
        on = Server(model, home / "on.log", flags, command=server_command())
        with on, stock(model, home / "off.log") as off:
            for server in (on, off):
                _decode(server, "Hello", decode_tokens)
            measured = [_pair(on, off, number, text, decode_tokens, pairs) for number in range(pairs)]
    counted = [pair for pair in measured if (pair["written"] if full_queue else min(pair["pending"])) > 0]
    if not counted:
        raise RequestFailed(
            "nothing was written while tokens were decoded; use more --decode-tokens"
            if full_queue
            else "the write-behind queue was empty before tokens were decoded; use a longer --prefix-tokens"
        )
    ratios = [pair["on"] / pair["off"] for pair in counted]
    return {
        "bench": "overhead",
        "model": str(model),
        **spread("decode_ratio", ratios),
        "on_tokens_per_s": median(pair["on"] for pair in counted),
        "off_tokens_per_s": median(pair["off"] for pair in counted),
        "full_queue": full_queue,
        "bytes_written_while_decoding": sum(pair["written"] for pair in counted),
        "pending_min": min(min(pair["pending"]) for pair in counted),
        "text_equal": all(pair["text_equal"] for pair in measured),
        "pairs": len(counted),
        "pairs_left_out": pairs - len(counted),
        "prefix_tokens": prefix_tokens,
        "decode_tokens": decode_tokens,
        "measured": measured,
    }


def _pair(on: Server, off: Server, number: int, text: str, decode_tokens: int, pairs: int) -> dict[str, Any]:
    order = (on, off) if number % 2 == 0 else (off, on)
    found: dict[str, Any] = {}
    texts = []
    for server in order:
        with Progress(f"pair {number + 1} of {pairs}, tier {'on' if server is on else 'off'}"):
            server.complete(f"{number}. {text}", max_tokens=1)
            prompt = f"Number {number}: tell a story."
            if server is on:
                with _Pending(server) as pending:
                    answer = _decode(server, prompt, decode_tokens)
                found["pending"] = pending.seen
                found["written"] = pending.written[-1] - pending.written[0]
                server.flush()
            else:
                answer = _decode(server, prompt, decode_tokens)
            found["on" if server is on else "off"] = _speed(answer)
            texts.append(answer.text)
    return found | {"text_equal": texts[0] == texts[1]}


def _decode(server: Server, prompt: str, tokens: int) -> Answer:
    answer = server.complete(prompt, max_tokens=tokens)
    if answer.completion_tokens < 2 or len(answer.arrivals) < 2:
        raise RequestFailed(f"the model stopped after {answer.completion_tokens} tokens; nothing can be measured")
    return answer


def _speed(answer: Answer) -> float:
    return (len(answer.arrivals) - 1) / (answer.arrivals[-1] - answer.arrivals[0])


class _Pending:
    """Samples how many entries wait to be written, from the start of a block to its end."""

    def __init__(self, server: Server):
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="pending")
        self.seen: list[int] = []
        self.written: list[int] = []  # bytes so far

    def __enter__(self) -> _Pending:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        ssd = self._server.stats()["ssd"]
        self.seen.append(ssd["pending"])
        self.written.append(ssd["written_bytes"])
