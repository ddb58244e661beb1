"""The hooks. All fire per request or per lifecycle event, never per token or layer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from .markers import hookspec
from .types import Admission, Engine, GenerationCheckpoints, Invocation, KVScheme, ModelSource, PrefixCache, Refused, Route, Row, Serves, Speculation


@hookspec
def mlx_lm_add_arguments(group: argparse._ArgumentGroup, command: str) -> None:
    """Add this plugin's flags to `group`, its own group in the parser of an mlx-lm command (``server``, ``generate``, ``chat``)."""


@hookspec
def mlx_lm_configure(invocation: Invocation) -> None:
    """Check and keep the settings of a start. Raise `UsageError` with one sentence when they cannot work."""


@hookspec
def mlx_lm_unconfigure() -> None:
    """Let go of everything `mlx_lm_configure` and later hooks set up; threads end, files stay."""


@hookspec(firstresult=True)
def mlx_lm_prefix_cache(max_entries: int | None, max_bytes: int | None, serves: Serves) -> PrefixCache | None:
    """The cache of reusable prefixes. `serves` says what it stands in for: upstream's prompt cache (``server``; a script may make one too), or nothing, for generations that upstream would each begin anew (``script``). Called once for each."""


@hookspec
def mlx_lm_model_loaded(source: ModelSource) -> None:
    """A model has been loaded and is about to be served; called on the loading thread."""


@hookspec
def mlx_lm_model_unloading(source: ModelSource) -> None:
    """The server is about to let go of a model to load another; called on the generation thread, no request runs."""


@hookspec
def mlx_lm_prefilled(source: ModelSource, start: int, tokens: int, seconds: float) -> None:
    """A prefill chunk of one sequence is done: `tokens` tokens, behind `start` that the caches held, went through the model in `seconds`, all computed. Not called for chunks of several sequences. On the generation thread."""


@hookspec
def mlx_lm_engine_started(engine: Engine) -> None:
    """A server's generation thread is about to start."""


@hookspec(firstresult=True)
def mlx_lm_generation_checkpoints() -> GenerationCheckpoints | None:
    """What keeps the server's generations while they run, so that the same request goes on after a kill. Called once, on the generation thread, when the first request comes."""


@hookspec
def mlx_lm_idle_task() -> Callable[[], bool] | None:
    """A callable that does one bounded unit of background work on the generation thread while no request runs. It returns True when more is waiting."""


@hookspec
def mlx_lm_busy_task() -> Callable[[], None] | None:
    """A callable that may do a little background work on the generation thread while requests run. It is called between steps and between requests, some times a second, and must keep itself to a small share of the time."""


@hookspec
def mlx_lm_routes() -> Sequence[Route]:
    """HTTP routes to add to the server."""


@hookspec
def mlx_lm_shutdown(timeout: float) -> bool | None:
    """The server stops: no request runs or will run, the generation thread still takes idle turns. Save what must be saved within `timeout` seconds; False when something was lost."""


@hookspec(firstresult=True)
def mlx_lm_shutdown_timeout() -> float | None:
    """Seconds a stopping server may take for running requests and `mlx_lm_shutdown` together."""


@hookspec(firstresult=True)
def mlx_lm_merge_row(caches: Sequence[Any]) -> list[Any] | None:
    """The batch form of one request's caches without copying them, or None to let upstream merge. `caches` are given up."""


@hookspec(firstresult=True)
def mlx_lm_kv_scheme() -> KVScheme | None:
    """How KV is stored, or None to leave that to upstream. Called once, when mlx-lm is hooked."""


@hookspec(firstresult=True)
def mlx_lm_speculation() -> Speculation | None:
    """What drafts tokens of requests that are alone in a batch, or None. Called once, when mlx-lm is hooked."""


@hookspec(firstresult=True)
def mlx_lm_admit(request: Admission) -> Refused | None:
    """A server's request is about to be prefilled, on the generation thread: None to go on, or why it is refused. The other requests go on either way."""


@hookspec(firstresult=True)
def mlx_lm_decoding(rows: Sequence[Row]) -> Refused | None:
    """`rows` have been decoded for 256 tokens since the last call, or a prefill has just ended. None to go on; otherwise the newest (last) row ends with this error, its caches are put, and the hook is asked again."""
