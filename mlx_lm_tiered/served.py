"""The requests of a server: those that run, the last ones, and how long they took."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

from mlx_lm_hooks import Served

from .histogram import Histogram

KEPT = 50  # requests that are remembered after their end
NOTE = "tiered"  # where a request has its `prefix.lookup.Lookup`; None: it is not a client's

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
FINISHES = ("stop", "length", "abort", "refused", "error")


class Requests:
    """All of a run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Served, None] = {}
        self._ended: deque[Served] = deque(maxlen=KEPT)
        self._finished: Counter[str] = Counter()
        self._tokens = {"prompt": 0, "generation": 0}
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_prefill_time_seconds": Histogram(_SECONDS),
            "request_decode_time_seconds": Histogram(_SECONDS),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_SECONDS),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
        }

    def began(self, request: Served) -> None:
        with self._lock:
            self._running[request] = None

    def ended(self, request: Served) -> None:
        with self._lock:
            self._running.pop(request, None)
            if not _clients(request):
                return
            self._ended.append(request)
            self._finished[request.finish] += 1
            self._tokens["prompt"] += request.prompt_tokens
            self._tokens["generation"] += request.tokens
        self._observe(request)

    def running(self) -> list[Served]:
        """Clients' requests that have not ended, oldest first."""
        with self._lock:
            return [request for request in self._running if _clients(request)]

    def last(self) -> list[Served]:
        """The requests that ended last, the newest first."""
        with self._lock:
            return list(reversed(self._ended))

    def report(self) -> dict[str, Any]:
        """What `/stats` shows. Tokens of requests that run are counted too."""
        running = self.running()
        with self._lock:
            return {
                "running": sum(request.started is not None for request in running),
                "queued": sum(request.started is None for request in running),
                "finished": {finish: self._finished[finish] for finish in FINISHES},
                "prompt_tokens": self._tokens["prompt"] + sum(request.prompt_tokens for request in running),
                "generation_tokens": self._tokens["generation"] + sum(request.tokens for request in running),
            }

    def _observe(self, request: Served) -> None:
        times = self.histograms
        assert request.ended is not None
        times["e2e_request_latency_seconds"].observe(request.ended - request.arrived)
        times["request_prompt_tokens"].observe(request.prompt_tokens)
        times["request_generation_tokens"].observe(request.tokens)
        if request.started is not None:
            times["request_queue_time_seconds"].observe(max(0.0, request.started - request.arrived))
        if request.first_token is None or request.last_token is None:
            return
        times["time_to_first_token_seconds"].observe(request.first_token - request.arrived)
        if request.started is not None:
            times["request_prefill_time_seconds"].observe(request.first_token - request.started)
        times["request_decode_time_seconds"].observe(request.last_token - request.first_token)
        if request.tokens > 1:
            times["request_time_per_output_token_seconds"].observe((request.last_token - request.first_token) / (request.tokens - 1))


def _clients(request: Served) -> bool:
    """Whether a request is not one of `--warm`."""
    return request.notes.get(NOTE, True) is not None
