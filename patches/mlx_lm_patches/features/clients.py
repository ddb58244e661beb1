"""Seam: a request whose client has gone is noticed where its HTTP thread waits.

Upstream notices when it writes. A request that is not streamed, is in its prefill,
or waits in the queue, is served to its end for nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import places
from ..runtime import Runtime
from ..seam import Seam


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def _await_response(self: Any, response_queue: Any) -> Any:
        client = runtime.here.client
        if client is None or not runtime.active:
            return original(self, response_queue)
        return client.next_response(self, response_queue)

    return _await_response


SEAMS = [
    Seam(
        feature="clients",
        module="mlx_lm.server",
        qualname="ResponseGenerator._await_response",
        kind="wrap",
        signature="(self, response_queue)",
        bodies={"521955aa3e5f02af": "0.32.0 0.32.1 0.32.2"},
        why="looks at the client's connection while it waits",
        until="upstream stops the requests of clients that have gone",
        build=build,
    ),
    Seam(
        feature="clients",
        **places.SERVER_GENERATE,
        kind="check",
        why="waits for a context first, then for responses, on one queue",
        until="upstream stops the requests of clients that have gone",
    ),
    Seam(
        feature="clients",
        **places.HANDLE_COMPLETION,
        kind="check",
        why="stops the context when its answer breaks off",
        until="upstream stops the requests of clients that have gone",
    ),
]
