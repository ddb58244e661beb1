"""Serving as one of several ranks: which settings that excludes, and what rank 0 has all of them do."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlx_lm_hooks import Invocation, Ranks, UsageError

from .managing import PATIENCE
from .managing_ranks import RanksManager
from .schemes.spec import Spec
from .settings import Settings
from .speculation.choose import Drafting

logger = logging.getLogger("mlx_lm_tiered")

ANSWER = 2.0  # seconds that /stats waits for the others
GRACE = 1.0  # of the seconds that something may take, those for the ranks to say what they have done


def adapt(settings: Settings, scheme: Spec, drafting: Drafting, invocation: Invocation) -> Settings:
    """The settings for one of several ranks. Raises UsageError for what was asked and does not work there."""
    ranks = invocation.ranks
    if ranks is None:
        return settings
    refused = {
        "--paged-kv": settings.paged_kv,
        "--draft-model": settings.draft_model is not None,
        "--speculation": drafting.source != "off",
        "--generation-checkpoint": settings.generation_checkpoint > 0,
        "--shared-cache": settings.shared_cache is not None,
        "--memory-budget": bool(settings.memory_budget),
        # Shown by a test for affine KV under tensor sharding, and for no other.
        f"--kv-scheme {scheme}": not scheme.plain and (ranks.sharding == "pipeline" or scheme.affine is None),
    }
    for flag, asked in refused.items():
        if asked:
            raise UsageError(f"several ranks ({ranks.size}, {ranks.sharding}) serve without {flag}; leave it out, or serve in one process")
    # What a rank decides by its own memory or clock, the others do not know.
    restore = "always" if settings.ssd_restore == "auto" else settings.ssd_restore
    warm = settings.warm if ranks.rank == 0 else None  # it asks over HTTP
    return dataclasses.replace(settings, memory_budget=0, ssd_restore=restore, warm=warm)


class Company:
    """The ranks as one run sees them. What is asked of rank 0 is done on all of them."""

    def __init__(self, ranks: Ranks, manager: RanksManager, work: Mapping[str, Callable[[Any], Any]], runs: Callable[[], bool]):
        """`work` is what is done on each rank: ``stats``, ``flush``, ``drain``; `runs` says whether the generation thread does."""
        self._ranks = ranks
        self._runs = runs
        self._last: list[Any] = []  # reports
        self._leads = ranks.rank == 0
        self._work = {**work, **manager.works()}
        manager.everywhere = lambda name, argument: self.all(name, argument, PATIENCE + GRACE)
        for name, one in self._work.items():
            ranks.answers(name, one)

    @property
    def announcement(self) -> str:
        """What a start says of it."""
        return f"rank {self._ranks.rank} of {self._ranks.size} ({self._ranks.sharding}), without the memory guard; what is stored is restored (--ssd-restore auto looks at one rank's clock)"

    def all(self, name: str, argument: Any, timeout: float) -> list[Any]:
        """What every rank answered; only this one, where the others cannot be asked. Raises TimeoutError, RuntimeError."""
        if not (self._leads and self._ranks.complete and self._runs()):
            return [self._work[name](argument)]
        return self._ranks.ask(name, argument, timeout)

    def saved(self, name: str, timeout: float) -> dict[str, Any]:
        """A flush's or drain's report over all ranks."""
        until = time.monotonic() + timeout
        try:
            reports = self.all(name, max(0.0, timeout - GRACE), max(timeout, GRACE))
        except (TimeoutError, RuntimeError) as error:
            if not self._ranks.complete:
                return self._work[name](max(0.0, until - time.monotonic()))
            return {"durable": False, "reason": f"not all ranks have answered ({error})", "pending": 0, "dropped": 0, "failed": 0, "entries": 0, "left": 0}
        merged = {**reports[0], "durable": all(report["durable"] for report in reports)}
        for count in ("pending", "dropped", "failed", "left"):
            if count in merged:
                merged[count] = sum(report.get(count, 0) for report in reports)
        for shortest in ("entries", "longest_durable_prefix_tokens"):
            if shortest in merged:
                merged[shortest] = min(report.get(shortest, 0) for report in reports)
        return {**merged, "ranks": reports} if len(reports) > 1 else merged

    def report(self, agreement: dict[str, int]) -> dict[str, Any]:
        """For `/stats` of rank 0: who there is, and what the others report; ``current`` says whether all have answered."""
        current = False
        if self._leads:
            try:
                reports = self.all("stats", None, ANSWER)
                current = len(reports) == self._ranks.size
                self._last = reports if current else self._last
            except (TimeoutError, RuntimeError) as error:
                logger.debug("not all ranks report: %s", error)
        return {
            "rank": self._ranks.rank, "size": self._ranks.size, "sharding": self._ranks.sharding, **agreement,
            "current": current, "reports": self._last,
        }  # fmt: skip
