"""Following a request from what its HTTP thread gets, for the plugins: nothing of it is done where tokens are made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlx_lm_hooks.requests import Served
from mlx_lm_hooks.types import Refused

from .mailbox import Cancelled
from .runtime import Runtime

# Where a request's queue, which both of its threads have, keeps what is told of it.
_SERVED = "_mlx_lm_patches_served"


def served_for(queue: Any) -> Served:
    """What is told of the request with this queue, made for whichever thread asks first."""
    return vars(queue).setdefault(_SERVED, Served())


class Follower:
    """One request's HTTP thread, seen from what comes out of its queue; `arrived` is when its headers had been read."""

    def __init__(self, runtime: Runtime, queue: Any, arrived: float):
        self._runtime = runtime
        self._context: Any = None
        self.served = served_for(queue)
        self.served.arrived = arrived
        self._tell(runtime.plugins.request_began)

    def note(self, item: Any) -> None:
        """Upstream's context comes first, then tuples of progress, responses, and at the end None or an exception."""
        served = self.served
        if item is None:
            return
        if isinstance(item, tuple):
            served.processed, served.to_process = item
            served.reused_tokens = max(0, self._context.prompt_cache_count)
        elif isinstance(item, Exception):
            served.finish = "abort" if isinstance(item, Cancelled) else "refused" if isinstance(item, Refused) else "error"
        elif self._context is None:
            self._context = item
            served.prompt_tokens = len(item.prompt)
        else:
            served.last_token = time.monotonic()
            if served.first_token is None:
                served.first_token = served.last_token
                served.reused_tokens = max(0, self._context.prompt_cache_count)
            served.tokens += 1
            if item.finish_reason is not None:
                served.finish = item.finish_reason

    def end(self) -> None:
        """Nothing more will come."""
        if not self.served.finish:
            self.served.finish = "abort"
        self.served.ended = time.monotonic()
        self._tell(self._runtime.plugins.request_ended)

    def _tell(self, hook: Callable[[Served], None]) -> None:
        try:
            hook(self.served)
        except Exception as error:
            self._runtime.fault("following a request", error)
