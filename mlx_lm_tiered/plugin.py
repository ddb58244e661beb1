"""The hook implementations, and nothing else."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm_hooks import Admission, Engine, GenerationCheckpoints, Invocation, KVScheme, ModelSource, PrefixCache, Preparation, Refused, Route, Row, Served, Serves, Speculation, UsageError, hookimpl

from . import settings as table
from .ranks import adapt
from .runtime import Runtime
from .schemes.choose import choose
from .speculation.choose import choose as choose_drafting
from .speculation.options import check as check_verification, open_trace

_runtime: Runtime | None = None


def current() -> Runtime | None:
    """The run between `mlx_lm_configure` and `mlx_lm_unconfigure`."""
    return _runtime


@hookimpl
def mlx_lm_add_arguments(group: argparse._ArgumentGroup, command: str) -> None:
    table.add_arguments(group, command)


@hookimpl
def mlx_lm_configure(invocation: Invocation) -> None:
    global _runtime
    if invocation.command == "script":
        known = {f.name for f in dataclasses.fields(table.Settings)}
        for name in sorted(invocation.given - known):
            raise UsageError(f"there is no setting {name!r}; there are {', '.join(sorted(known))}")
    settings = table.resolve(vars(invocation.args), invocation.given, os.environ)
    if invocation.command == "server" and "prompt_cache_size" not in invocation.given and settings.prompt_cache_bytes != 0:
        # Upstream's default of 10 entries would evict by count long before memory is short.
        invocation.args.prompt_cache_size = sys.maxsize
    drafting = choose_drafting(settings, invocation)
    scheme = choose(settings.kv_scheme, invocation)
    check_verification(settings, drafting, invocation)
    settings = adapt(settings, scheme, drafting, invocation)
    paged = settings.paged_kv and (invocation.command == "server" or "paged_kv" in invocation.given)
    if paged:
        from .paged.options import check as check_paging

        check_paging(settings, scheme, invocation)
    if settings.shared_cache is not None:
        from .shared.objects import check as check_store

        check_store(settings.shared_cache)
    runtime = Runtime(settings, scheme, drafting, paged=paged, ranks=invocation.ranks)
    runtime.trace = open_trace(settings, drafting, runtime.statistics)
    mlx_lm_unconfigure()
    _runtime = runtime
    _runtime.args = invocation.args
    _runtime.seeded = "seed" in invocation.given
    if invocation.command == "server" and settings.warm is not None:
        from .serving.warm import prepare

        _runtime.warmer = prepare(settings.warm, invocation.args, _runtime)
    if invocation.command != "server":
        _runtime.saves_itself = True
        atexit.register(mlx_lm_unconfigure)


@hookimpl
def mlx_lm_unconfigure() -> None:
    global _runtime
    atexit.unregister(mlx_lm_unconfigure)
    if _runtime is not None:
        runtime, _runtime = _runtime, None
        runtime.close()


@hookimpl
def mlx_lm_prefix_cache(max_entries: int | None, max_bytes: int | None, serves: Serves) -> PrefixCache | None:
    return _runtime.prefix_cache(max_entries, max_bytes, serves) if _runtime is not None else None


@hookimpl
def mlx_lm_model_loaded(source: ModelSource) -> None:
    if _runtime is not None:
        _runtime.model_loaded(source)


@hookimpl
def mlx_lm_model_unloading(source: ModelSource) -> None:
    if _runtime is not None:
        _runtime.model_unloading(source)


@hookimpl
def mlx_lm_prefilled(source: ModelSource, start: int, tokens: int, seconds: float) -> None:
    if _runtime is not None:
        _runtime.prefilled(source, start, tokens, seconds)


@hookimpl
def mlx_lm_engine_started(engine: Engine) -> None:
    if _runtime is not None:
        _runtime.engine = engine
        if _runtime.warmer is not None:
            _runtime.warmer.start()


@hookimpl
def mlx_lm_generation_checkpoints() -> GenerationCheckpoints | None:
    return _runtime.checkpoints if _runtime is not None else None


@hookimpl
def mlx_lm_idle_task() -> Callable[[], bool] | None:
    return _runtime.idle_turn if _runtime is not None else None


@hookimpl
def mlx_lm_busy_task() -> Callable[[], None] | None:
    return _runtime.busy_turn if _runtime is not None else None


@hookimpl
def mlx_lm_routes() -> Sequence[Route]:
    if _runtime is None:
        return []
    from .serving.routes import routes

    return routes(_runtime)


@hookimpl
def mlx_lm_request_began(request: Served) -> None:
    if _runtime is not None:
        _runtime.requests.began(request)


@hookimpl
def mlx_lm_request_ended(request: Served) -> None:
    if _runtime is not None:
        _runtime.requests.ended(request)


@hookimpl
def mlx_lm_shutdown(timeout: float) -> bool | None:
    if _runtime is None or _runtime.settings.ssd_cache is None:
        return None
    return _runtime.shutdown(timeout)


@hookimpl
def mlx_lm_shutdown_timeout() -> float | None:
    return _runtime.settings.shutdown_timeout if _runtime is not None else None


@hookimpl
def mlx_lm_merge_row(caches: Sequence[Any]) -> list[Any] | None:
    from .caches import merge_row

    return merge_row(caches)


@hookimpl
def mlx_lm_kv_scheme() -> KVScheme | None:
    return _runtime.scheme() if _runtime is not None else None


@hookimpl
def mlx_lm_speculation() -> Speculation | None:
    return _runtime.speculation() if _runtime is not None else None


@hookimpl
def mlx_lm_admit(request: Admission) -> Refused | None:
    return _runtime.admit(request) if _runtime is not None else None


@hookimpl
def mlx_lm_hold(source: ModelSource, tokens: Sequence[int], max_tokens: int, preempted: int | None) -> Preparation | None:
    return _runtime.hold(source, tokens, max_tokens, preempted) if _runtime is not None else None


@hookimpl
def mlx_lm_room(caches: Sequence[Any]) -> int | None:
    return _runtime.room(caches) if _runtime is not None else None


@hookimpl
def mlx_lm_decoding(rows: Sequence[Row]) -> Refused | None:
    return _runtime.guard.decoding(rows) if _runtime is not None else None
