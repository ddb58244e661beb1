"""Admission by memory: whether a request fits, what makes room for it, and what it is told when nothing does.

Everything here is called on the generation thread, once per request and once every
256 decoded tokens; `report` from any thread.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_lm_hooks import Admission, Refused, Row

from ..prefix.relief import Relief
from ..settings import format_size
from ..statistics import Statistics
from .budget import budget, live
from .footprint import Footprint, PlanOf, measure

logger = logging.getLogger("mlx_lm_tiered")

RETRY_AFTER = 10

# A prefill's activations are learned from prefills of at least this many tokens; before, they
# are taken to be this many times the caches of one chunk.
WORTH_LEARNING = 128
FIRST_GUESS = 2


class MemoryGuard:
    """Holds requests to a budget in bytes (None: the device's; 0: none at all). `plan_of` gives the KV scheme's plan for a model, if it has one."""

    def __init__(self, chosen: int | None, relief: Relief, statistics: Statistics, plan_of: PlanOf = lambda model: None):
        self._chosen = chosen
        self._relief = relief
        self._statistics = statistics
        self._plan_of = plan_of
        self._limit: int | None = None
        self._resolved = False
        self._model: Callable[[], Any] = lambda: None
        self._footprint: Footprint | None = None
        self._workspace: tuple[int, int] | None = None  # (tokens of a chunk, bytes) of the largest seen
        self._prefilling = 0  # tokens of the chunk whose peak is being watched
        self._counts: Counter[str] = Counter()

    # From the hooks

    def model_loaded(self) -> None:
        """Say so when the model alone is over the budget; its requests are then refused."""
        limit = self._budget()
        held = live() - self._relief.held()
        if limit is not None and held > limit:
            logger.error("the model takes %s, more than the memory budget of %s; its requests are refused", format_size(held), format_size(limit))

    def admit(self, request: Admission) -> Refused | None:
        """None when the request fits, after relief if need be; else what to tell its client."""
        limit = self._budget()
        if limit is None:
            return None
        self._counts["checks"] += 1
        self._observe()
        footprint = self._measured(request)
        if footprint is None:
            return None
        if footprint.weights > limit:
            return self._refuse(
                503, f"the model takes {format_size(footprint.weights)}, more than the memory budget of {format_size(limit)} (--memory-budget)"
            )
        chunk = min(request.step, len(request.tokens) - request.cached)
        workspace = self._workspace_for(chunk, footprint)
        whole = footprint.peak(len(request.tokens), request.step, held=request.cached)
        if footprint.weights + whole + workspace > limit:
            return self._refuse(
                400,
                f"the prompt of {len(request.tokens)} tokens takes {format_size(whole + workspace)} beside the model's "
                f"{format_size(footprint.weights)}, which can never fit into the memory budget of {format_size(limit)} (--memory-budget)",
            )
        own = self._relief.entry_for(request.source, request.tokens, request.cached)
        need = self._growth(request, footprint) + workspace

        def fits(saved: int = 0) -> bool:
            return live() + need - saved <= limit

        copied = footprint.nbytes(request.cached, request.step) if request.cached else 0
        if own is None:
            # The caches are the request's own and already there: it goes on in them.
            need -= copied
        # An entry of which little is used is one like any other.
        spare = own if own is not None and 2 * request.cached >= own.length else None
        if not self._roomy(limit, need) and not self._relief.until(fits, spare):
            # Last, its own entry: the request holds the buffers anyway. Alone it writes to them in place, or frees
            # them when it has copied the part that it uses.
            if own is None or not self._relief.give_up(own, lambda: fits(own.own_nbytes)):
                return self._refuse(
                    503,
                    f"not enough memory at the moment: the request needs {format_size(need)}, and {format_size(live())} of the "
                    f"memory budget of {format_size(limit)} are in use (--memory-budget); try again later",
                    RETRY_AFTER,
                )
        self._prefilling = chunk
        mx.reset_peak_memory()
        return None

    def decoding(self, rows: Sequence[Row]) -> Refused | None:
        """None when the rows can go on for another 256 tokens; else why the newest must end."""
        limit = self._budget()
        if limit is None or not rows:
            return None
        self._counts["checks"] += 1
        self._observe()
        need = self._footprint.decoded(rows) if self._footprint is not None else 0
        if self._roomy(limit, need) or self._relief.until(lambda: live() + need <= limit):
            return None
        self._counts["ended"] += 1
        return self._refuse(
            503,
            f"out of memory after {rows[-1].held} tokens: {format_size(live())} of the memory budget of "
            f"{format_size(limit)} are in use (--memory-budget); try again later",
            RETRY_AFTER,
        )

    def spare(self) -> float:
        """Bytes of the budget that are left, as far as is known by now. Any thread."""
        return math.inf if self._limit is None else self._limit - live()

    def report(self) -> dict[str, Any]:
        """For `/stats`. Any thread."""
        limit = self._budget()
        footprint = self._footprint
        return {
            "budget": limit,
            "live": live(),
            "weights": footprint.weights if footprint is not None else None,
            "kv_bytes_per_token": footprint.per_token if footprint is not None else None,
            "prefill_workspace": self._workspace[1] if self._workspace is not None else None,
            "checks": self._counts["checks"],
            "refused_400": self._counts["refused_400"],
            "refused_503": self._counts["refused_503"],
            "ended": self._counts["ended"],
            **self._relief.report(),
        }

    # Inside

    def _budget(self) -> int | None:
        if not self._resolved:
            self._limit, origin = budget(self._chosen)
            self._resolved = True
            if self._limit is not None:
                logger.info("memory budget of %s (%s)", format_size(self._limit), origin)
        return self._limit

    def _measured(self, request: Admission) -> Footprint | None:
        """The model's footprint; None when its caches cannot be measured, and its requests are admitted as they come."""
        if self._model() is request.model:
            return self._footprint
        self._model = weakref.ref(request.model)
        self._footprint = self._workspace = None
        scheme = request.source.kv_scheme if request.source is not None else "plain"
        try:
            own = scheme == "plain" and request.draft is None and request.cached and self._plan_of(request.model) is None
            caches = request.caches if own else None
            self._footprint = measure(request.model, request.draft, caches, self._plan_of)
        except Exception as error:
            self._statistics.fault("memory_footprint", f"the memory of a model's caches could not be measured ({error!r}); its requests are not held to the memory budget")
        return self._footprint

    def _growth(self, request: Admission, footprint: Footprint) -> int:
        """Bytes that the request's caches, and those of the batch it joins, will take beyond what is there.

        Upstream's batches give every row as many slots as the longest one has.
        """

        decoding, step = request.decoding, request.step
        coming = [(len(request.tokens), request.cached), *request.waiting]
        longest = max(decoding, default=0)
        there = sum(footprint.nbytes(held, step, longest) for held in decoding)
        there += sum(footprint.nbytes(held, step) for _, held in request.waiting if held)
        longest = max(longest, *(whole for whole, _ in coming))
        ends = sum(footprint.nbytes(held, step, longest) for held in decoding)
        ends += sum(footprint.peak(whole, step, longest, held) for whole, held in coming)
        return max(ends - there, 0)

    def _workspace_for(self, chunk: int, footprint: Footprint) -> int:
        """Bytes that computing a chunk of a prompt takes beside its caches."""
        if self._workspace is None:
            return FIRST_GUESS * footprint.computed_per_token * chunk
        tokens, size = self._workspace
        return size * chunk // tokens

    def _observe(self) -> None:
        """Learn from the peak of the prefill that was admitted last, once it has ended."""
        if not self._prefilling:
            return
        tokens, self._prefilling = self._prefilling, 0
        size = max(0, mx.get_peak_memory() - live())
        if tokens >= WORTH_LEARNING and (self._workspace is None or size * self._workspace[0] > self._workspace[1] * tokens):
            self._workspace = tokens, size

    def _roomy(self, limit: int, need: int) -> bool:
        """Whether `need` fits as things are; what the allocator keeps for reuse goes first."""
        if live() + need > limit:
            # A step that is under way holds buffers that its end will free.
            mx.synchronize()
            mx.clear_cache()
            return live() + need <= limit
        if live() + mx.get_cache_memory() + need > limit:
            mx.clear_cache()
        return True

    def _refuse(self, status: int, text: str, retry_after: int | None = None) -> Refused:
        self._counts[f"refused_{status}"] += 1
        logger.warning("request refused with %d: %s", status, text)
        return Refused(status, text, retry_after)
