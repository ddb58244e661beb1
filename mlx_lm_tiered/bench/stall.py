"""Whether a restore holds up those that decode: time between tokens of two streams, with a third request being restored and without.

Each pair has two servers, one after the other, each with nothing in its memory and, on
one directory, the files out of the page cache. Two streams decode; after a while a
third request with a long stored prefix is sent to the first server, and nothing to the
second. The pair compares the 99th percentiles of time between tokens: from then to
the first report of the request's progress, when it has been restored and has joined the
batch, and over the same time in the second server. The result is the median over
the pairs' ratios. Time before the request is no measure: the streams' tokens take longer the more of
them there are (`growth` is by how much in the second server, the median over that time to the one before).
How long the third request's prompt takes to tokenize is measured, too: the server
does it between two tokens, with and without the plugin.

Joining itself, a long row merged into the batch that decodes, is upstream's and
comes after that. What it costs is measured too, and once more for the same request
asked again, whose prefix then is in memory.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

from .client import RequestFailed, endless
from .report import spread
from .restart import drop_page_cache, started
from .server import Server, tiered_flags
from .writes import flush

STREAMS = ("Tell a long story about a lighthouse.", "Explain at length how bread is made.")
REPLY = 6  # tokens of the third request's answer
ENDLESS = 100_000
FEWEST = 20  # intervals, of both streams together, from which on a percentile means something


def run(model: Path, prefix_tokens: int, pairs: int, window: float = 3.0) -> dict[str, Any]:
    """Measure it; `window` is the time without, in seconds. Times between tokens are milliseconds. Raises ServerFailed, RequestFailed."""
    bias = endless(model)
    text = long_document(model, prefix_tokens)
    disk, ram, control, background = [], [], [], 0
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        directory, log = Path(scratch) / "cold", Path(scratch) / "server.log"
        options = tiered_flags(directory, "--ssd-restore", "always")  # also where computing would be faster
        with started(model, log, options) as server:
            with Progress("the prefix"):
                server.complete(text, max_tokens=1)
            flush(server)
        for number in range(pairs):
            dropped = drop_page_cache(directory)
            with started(model, log, options) as server, _streams(server, bias) as streams:
                with Progress(f"pair {number + 1} of {pairs}"):
                    disk.append(_asked(server, streams, text, window, bias))
                    background += server.stats()["ssd"]["restores_in_background"]
                    ram.append(_asked(server, streams, text, window, bias))
            with started(model, log, options) as server, _streams(server, bias) as streams, Progress(f"pair {number + 1}, without"):
                control.append(_unasked(streams, window, disk[-1]["seconds"]))
    ratios = [pair["p99_during"] / without["p99_during"] for pair, without in zip(disk, control, strict=True)]
    return {
        "bench": "stall",
        "model": str(model),
        **spread("p99_ratio", ratios),
        "p50_ratio": median(pair["p50_during"] / without["p50_during"] for pair, without in zip(disk, control, strict=True)),
        "p99_with_ms": median(pair["p99_during"] for pair in disk),
        "p99_without_ms": median(without["p99_during"] for without in control),
        "longest_ms": median(pair["longest"] for pair in disk),
        "longest_without_ms": median(without["longest"] for without in control),
        "growth": median(without["p50_during"] / without["p50_before"] for without in control),
        "tokenize_ms": 1000 * _tokenizing(model, text),
        "restore_s": median(pair["seconds"] for pair in disk),
        "intervals": median(pair["intervals"] for pair in disk),
        "join_longest_ms": median(pair["join_longest"] for pair in disk),
        "ram_join_longest_ms": median(pair["join_longest"] for pair in ram),
        "ram_longest_ms": median(pair["longest"] for pair in ram),
        "ram_wait_s": median(pair["seconds"] for pair in ram),
        "prefix_tokens": min(pair["prompt_tokens"] for pair in disk),
        "cached_tokens": min(pair["cached_tokens"] for pair in disk),
        "ram_cached_tokens": min(pair["cached_tokens"] for pair in ram),
        "text_equal": len({pair["text"] for pair in disk + ram}) == 1,
        "restores_in_background": background,
        "pairs": pairs,
        "page_cache_dropped": dropped,
        "disk": disk,
        "ram": ram,
        "control": control,
    }


def _asked(server: Server, streams: list[_Stream], text: str, window: float, bias: dict[str, float]) -> dict[str, Any]:
    """What the streams did before the third request, while it was restored, and as it joined."""
    began, sent = _before(window)
    third = _third(server, text, bias)
    joined, ended = third.pop("joined"), third.pop("ended")
    time.sleep(0.2)
    after = [gap for stream in streams for gap in stream.gaps(joined, ended)]
    return third | _told(streams, began, sent, joined) | {"join_longest": max(after, default=0.0)}


def _unasked(streams: list[_Stream], window: float, seconds: float) -> dict[str, Any]:
    """What the streams did in the same times without a third request."""
    began, sent = _before(window)
    time.sleep(seconds + 0.2)
    return _told(streams, began, sent, sent + seconds)


def _before(window: float) -> tuple[float, float]:
    time.sleep(1.0)  # what the pair before left behind
    began = time.monotonic()
    time.sleep(window)
    return began, time.monotonic()


def _told(streams: list[_Stream], began: float, sent: float, joined: float) -> dict[str, Any]:
    before = [gap for stream in streams for gap in stream.gaps(began, sent)]
    during = [gap for stream in streams for gap in stream.gaps(sent, joined)]
    if len(before) < FEWEST or not during:
        raise RequestFailed(f"only {len(before)} and {len(during)} times between tokens were seen; use a longer prefix or a faster model")
    return {
        "p99_before": _percentile(before, 99), "p99_during": _percentile(during, 99), "p50_before": _percentile(before, 50),
        "p50_during": _percentile(during, 50), "longest": max(during), "seconds": joined - sent, "intervals": len(during),
    }  # fmt: skip


def _tokenizing(model: Path, text: str) -> float:
    """Seconds of a processor that the text takes to become tokens, at best."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(model)
    taken = []
    for _ in range(5):
        started = time.process_time()
        tokenizer.encode(text)
        taken.append(time.process_time() - started)
    return min(taken)


def _third(server: Server, text: str, bias: dict[str, float]) -> dict[str, Any]:
    """The third request: when it joined and ended, and what it said."""
    answer = server.complete(text, max_tokens=REPLY, logit_bias=bias, progress=(progress := _Moment()))
    ended = time.monotonic()
    return {
        "joined": progress.at or ended, "ended": ended, "text": answer.text, "cached_tokens": answer.cached_tokens,
        "prompt_tokens": answer.prompt_tokens,
    }  # fmt: skip


class _Moment:
    """The first report of progress: the request has joined."""

    at: float | None = None

    def __call__(self, _done: int, _total: int) -> None:
        if self.at is None:
            self.at = time.monotonic()


class _Stream:
    """One stream that decodes in a thread, and the times of its tokens."""

    def __init__(self, server: Server, prompt: str, bias: dict[str, float]):
        body = {"prompt": prompt, "max_tokens": ENDLESS, "temperature": 0.0, "logit_bias": bias}
        self._events = server.stream("/v1/completions", body)
        self._ending = False
        self.arrivals: list[float] = []
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True, name="stream")
        self._thread.start()

    def _follow(self) -> None:
        try:
            for _ in self._events:
                self.arrivals.append(time.monotonic())
                if self._ending:
                    break
        except Exception as error:
            self.failed = error
        finally:
            self._events.close()

    def gaps(self, start: float, end: float) -> list[float]:
        """Milliseconds between tokens of which the later came between two times. Raises RequestFailed when the stream has ended."""
        if not self._thread.is_alive():
            raise RequestFailed(f"a stream ended early ({self.failed})")
        arrivals = list(self.arrivals)
        return [1000 * (later - one) for one, later in zip(arrivals, arrivals[1:], strict=False) if start <= later <= end]

    def end(self) -> None:
        self._ending = True
        self._thread.join(10)


@contextmanager
def _streams(server: Server, bias: dict[str, float]) -> Iterator[list[_Stream]]:
    streams = [_Stream(server, prompt, bias) for prompt in STREAMS]
    try:
        deadline = time.monotonic() + 60
        while any(len(stream.arrivals) < 5 for stream in streams):
            if time.monotonic() > deadline or any(stream.failed for stream in streams):
                raise RequestFailed(f"the streams did not begin ({[stream.failed for stream in streams]})")
            time.sleep(0.05)
        yield streams
    finally:
        for stream in streams:
            stream.end()


def _percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]
