"""Counters of one run, and warnings that come once."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

logger = logging.getLogger("mlx_lm_tiered")


TIERS = ("ram", "queue", "ssd", "shared")  # where reused tokens come from; the queue has what left RAM and is not on disk yet, the shared tier what others computed


class Statistics:
    """What `/stats` shows about requests and faults. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(TIERS, 0.0)
        self._started = time.monotonic()

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += by

    def looked_up(self, tier: str, prompt_tokens: int, reused_tokens: int, saved_seconds: float = 0.0) -> None:
        """One request looked for its prefix and reused that many tokens from that tier (none: a miss), which would have taken so long to compute."""
        with self._lock:
            self._counts["lookups"] += 1
            self._counts["prompt_tokens"] += prompt_tokens
            self._counts["tokens_saved"] += reused_tokens
            self._counts["hits" if reused_tokens else "misses"] += 1
            if reused_tokens:
                self._hits[tier] += 1
                self._tokens[tier] += reused_tokens
                self._seconds[tier] += saved_seconds

    def fault(self, kind: str, message: str) -> None:
        """Count a fault; warn at the first of its kind."""
        with self._lock:
            self._faults[kind] += 1
            first = self._faults[kind] == 1
        if first:
            logger.warning("%s; serving goes on (warned once)", message)
            logger.debug("the fault was", exc_info=True)

    def report(self) -> dict[str, Any]:
        """All counters, JSON-able."""
        with self._lock:
            names = ("lookups", "hits", "misses", "prompt_tokens", "tokens_saved", "puts", "spills", "demotions", "keys_shortened", "larger_than_ram_tier")
            return {
                "uptime_s": round(time.monotonic() - self._started, 3),
                **{name: self._counts[name] for name in names},
                "hits_by_tier": {tier: self._hits[tier] for tier in TIERS},
                "tokens_saved_by_tier": {tier: self._tokens[tier] for tier in TIERS},
                "prefill_seconds_saved_by_tier": {tier: round(self._seconds[tier], 6) for tier in TIERS},
                "faults": dict(self._faults),
            }
