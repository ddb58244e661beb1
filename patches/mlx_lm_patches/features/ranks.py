"""Seam: ranks behind rank 0 stop in order, too; and what serving with several ranks relies on (see `ranked`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import places
from ..engine import ENGINE
from ..follower import Follower
from ..runtime import Runtime
from ..seam import Seam

UNTIL = "upstream stops its ranks together"


def build_join(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def join(self: Any) -> None:
        engine = getattr(self, ENGINE, None)
        if engine is None or not engine.together or not runtime.active:
            return original(self)
        follower = Follower(runtime.plugins.shutdown_timeout(), runtime.plugins.shutdown)
        runtime.stops_by(follower)
        with follower.signals():
            original(self)
        follower.finish(self, engine.end, runtime.plugins.unconfigure)

    return join


SEAMS = [
    Seam(
        feature="ranks",
        module="mlx_lm.server",
        qualname="ResponseGenerator.join",
        kind="wrap",
        signature="(self)",
        bodies={"4cf1b0dba88065b3": "0.32.0 0.32.1 0.32.2"},
        why="is where the main thread of a rank without HTTP waits",
        until=UNTIL,
        build=build_join,
    ),
    Seam(
        feature="ranks",
        module="mlx_lm.server",
        qualname="run",
        kind="check",
        signature="(host, port, model_provider, server_class=, handler_class=)",
        bodies={"546d13ca90454d65": "0.32.0 0.32.1 0.32.2"},
        why="serves HTTP on rank 0 and joins the generation thread on the others",
        until=UNTIL,
    ),
    Seam(
        feature="ranks",
        module="mlx_lm.server",
        qualname="ResponseGenerator._share_request",
        kind="check",
        signature="(self, request)",
        bodies={"6d8d272150e69cb8": "0.32.0 0.32.1 0.32.2"},
        why="shares what came behind the queue of a request",
        until=UNTIL,
    ),
    Seam(
        feature="ranks",
        module="mlx_lm.server",
        qualname="ResponseGenerator._share_object",
        kind="check",
        signature="(self, obj)",
        bodies={"67efffa95a68775b": "0.32.0 0.32.1 0.32.2"},
        why="has the same collectives on all ranks, by what rank 0 shares",
        until=UNTIL,
    ),
    Seam(
        feature="ranks",
        **places.SERVER_LOOP,
        kind="check",
        why="asks for a request at the same places on all ranks, and shares which rows are given up",
        until=UNTIL,
    ),
    Seam(
        feature="ranks",
        module="mlx_lm.utils",
        qualname="sharded_load",
        kind="check",
        signature="(repo, pipeline_group=, tensor_group=, return_config=, *, tokenizer_config=, trust_remote_code=)",
        bodies={"b9cc2f213bff2298": "0.32.0", "7f0f129ceef472a1": "0.32.1 0.32.2"},
        why="loads through load_model of its own module",
        until="upstream's models know their directory",
    ),
]
