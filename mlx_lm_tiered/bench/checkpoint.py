"""What checkpoints of running generations cost, and what they save.

Cost: two real servers live at the same time, both with the SSD tier, one with
checkpoints, and decode the same prompt in turn, first the one, then the other. The
result is the median over the pairs' ratios of decode speed. That checkpoints became
durable while tokens were decoded is taken from ``/stats``.

Gain: the server with checkpoints is killed in the middle of an answer, and started
again. The same request is timed until the first token that is new, against the time
in which a server without its checkpoint comes as far. Both times begin when the
server is ready.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

from .client import Answer, RequestFailed
from .report import spread
from .server import Server, server_command, tiered_flags

PATH = "/v1/completions"


def run(model: Path, prefix_tokens: int, decode_tokens: int, interval: int, pairs: int) -> dict[str, Any]:
    """Measure it. Speeds are tokens per second. Raises ServerFailed, RequestFailed; RequestFailed also when no checkpoint was written in time."""
    text = long_document(model, prefix_tokens)
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home = Path(scratch)
        flags = tiered_flags(home / "on", "--generation-checkpoint", str(interval))
        off = Server(model, home / "off.log", tiered_flags(home / "off"), command=server_command())
        with off:
            with Server(model, home / "on.log", flags, command=server_command()) as on:
                for server in (on, off):
                    server.complete(text, max_tokens=1)
                measured = [_pair(on, off, f"{text}\n\n{number}.", number, decode_tokens, pairs) for number in range(pairs)]
            resumed = _resumed(model, home, flags, f"{text}\n\nAn answer:", decode_tokens)
            with Progress("the same from the beginning"):
                rerun = _until(off, f"{text}\n\nAn answer:", decode_tokens, resumed["tokens"])
    ratios = [pair["on"] / pair["off"] for pair in measured]
    return {
        "bench": "checkpoint",
        "model": str(model),
        "interval": interval,
        **spread("decode_ratio", ratios),
        "on_tokens_per_s": median(pair["on"] for pair in measured),
        "off_tokens_per_s": median(pair["off"] for pair in measured),
        "written_while_decoding": min(pair["written"] for pair in measured),
        "taking_ms": 1000 * sum(pair["taking_seconds_total"] for pair in measured) / max(1, sum(pair["taken"] for pair in measured)),
        "written_bytes": sum(pair["written_bytes"] for pair in measured),
        "resumed_tokens": resumed["tokens"],
        "resume_s": resumed["seconds"],
        "rerun_s": rerun,
        "resume_ratio": resumed["seconds"] / rerun,
        "text_equal": all(pair["text_equal"] for pair in measured),
        "pairs": pairs,
        "prefix_tokens": prefix_tokens,
        "decode_tokens": decode_tokens,
        "measured": measured,
    }


def _pair(on: Server, off: Server, prompt: str, number: int, decode_tokens: int, pairs: int) -> dict[str, Any]:
    order = (on, off) if number % 2 == 0 else (off, on)
    found: dict[str, Any] = {}
    texts = []
    before = on.stats()["checkpoints"]
    for server in order:
        with Progress(f"pair {number + 1} of {pairs}, {'with' if server is on else 'without'} checkpoints"):
            answer = server.complete(prompt, max_tokens=decode_tokens)
            if len(answer.arrivals) < 2:
                raise RequestFailed(f"the model stopped after {answer.completion_tokens} tokens; nothing can be measured")
            if server is on:
                after = on.stats()["checkpoints"]
                found |= {name: after[name] - before[name] for name in ("written", "written_bytes", "superseded", "taken", "taking_seconds_total")}
            server.flush()  # what waits is not written in the other one's turn
        found["on" if server is on else "off"] = _speed(answer)
        texts.append(answer.text)
    if not found["written"]:
        raise RequestFailed("no checkpoint was written while tokens were decoded; use a longer --decode-tokens")
    return found | {"text_equal": texts[0] == texts[1]}


def _speed(answer: Answer) -> float:
    return (len(answer.arrivals) - 1) / (answer.arrivals[-1] - answer.arrivals[0])


def _resumed(model: Path, home: Path, flags: list[str], prompt: str, tokens: int) -> dict[str, Any]:
    """Kill a server in the middle of an answer; the tokens that the next one does not compute again, and seconds until the first new one."""
    with Progress("a kill in the middle of an answer"):
        victim = Server(model, home / "on.log", flags, command=server_command())
        with suppress(RequestFailed, HTTPException, OSError):
            for count, _ in enumerate(victim.stream(PATH, {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0})):
                if count > tokens // 2 and victim.stats()["checkpoints"]["written"]:
                    break
        victim.kill()
    with Server(model, home / "on.log", flags, command=server_command()) as server, Progress("going on after it"):
        # The model's fingerprint is known from a file, the headers are read: as in a server that has been up a while.
        server.complete("Hello", max_tokens=1)
        started = time.monotonic()
        stream = server.stream(PATH, {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0})
        next(stream)
        again = server.stats()["checkpoints"]["resumed_tokens"]
        if not again:
            raise RequestFailed("the killed server's answer was not gone on with; use a longer --decode-tokens")
        for count, _ in enumerate(stream, 1):
            if count > again:
                break
        seconds = time.monotonic() - started
        stream.close()
    return {"tokens": again, "seconds": seconds}


def _until(server: Server, prompt: str, tokens: int, count: int) -> float:
    """Seconds until an answer has come further than `count` tokens."""
    started = time.monotonic()
    stream = server.stream(PATH, {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0})
    for number, _ in enumerate(stream):
        if number > count:
            break
    stream.close()
    return time.monotonic() - started
