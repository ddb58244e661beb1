"""A plugin of the tests' own: a plain prefix cache, and a record of every hook call.

`Witness` is registered in this process; `install` puts the same plugin, as
``--plugin witness``, where another process finds it, writing its record to the
file that ``WITNESS_LOG`` names.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pluggy

from mlx_lm_hooks import Invocation, Plugins, Reply, Route, Taken, UsageError, hookimpl, specs

CACHE_CLASSES = ("KVCache", "RotatingKVCache", "ArraysCache", "QuantizedKVCache", "CacheList")


class Prefixes:
    """A `PrefixCache` that stores deep copies in a list."""

    def __init__(self, witness: Witness):
        self.witness = witness
        self.entries: list[tuple[Any, list[int], list[Any], str]] = []
        self.fail = False

    def _check(self) -> None:
        if self.fail:
            raise RuntimeError("the witness fails on purpose")

    def owns(self, caches: Any) -> bool:
        return all(type(cache).__name__ in CACHE_CLASSES for cache in caches)

    def take(self, source: Any, tokens: Any) -> Taken | None:
        from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

        self._check()
        best = None
        for owner, key, caches, _ in self.entries:
            common = next((i for i, (a, b) in enumerate(zip(key, tokens, strict=False)) if a != b), min(len(key), len(tokens)))
            length = min(common, len(tokens) - 1)
            usable = length == len(key) or can_trim_prompt_cache(caches)
            if owner == source and length > 0 and usable and (best is None or length > best[0]):
                best = (length, key, caches)
        self.witness.note("take", tokens=len(tokens), length=best[0] if best else 0)
        if best is None:
            return None
        length, key, caches = best
        caches = copy.deepcopy(caches)
        if len(key) > length:
            trim_prompt_cache(caches, len(key) - length)
        return Taken(caches, length)

    def put(self, source: Any, tokens: Any, caches: Any, *, role: str = "assistant") -> None:
        self._check()
        self.witness.note("put", tokens=len(tokens), role=role, offsets=offsets(caches), path=str(source.path))
        self.entries = [e for e in self.entries if not (e[0] == source and list(tokens)[: len(e[1])] == e[1] and e[3] == role)]
        self.entries.append((source, list(tokens), copy.deepcopy(caches), role))

    def snapshot(self, source: Any, tokens: Any, caches: Any, *, role: str = "user") -> None:
        self._check()
        self.witness.note("snapshot", tokens=len(tokens), role=role, offsets=offsets(caches), path=str(source.path))
        self.entries.append((source, list(tokens), copy.deepcopy(caches), role))

    def observe(self, caches: Any) -> None:
        self._check()
        self.witness.note("observe", offsets=offsets(caches))

    def trim(self, *, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        self._check()
        while self.entries and (
            (max_entries is not None and len(self) > max_entries) or (max_bytes is not None and self.nbytes > max_bytes)
        ):
            self.entries.pop(0)

    def by_role(self) -> dict[str, tuple[int, int]]:
        roles = {role for *_, role in self.entries}
        sizes = {role: [sum(c.nbytes for c in e[2]) for e in self.entries if e[3] == role] for role in roles}
        return {role: (len(size), sum(size)) for role, size in sizes.items()}

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for entry in self.entries for c in entry[2])

    def __len__(self) -> int:
        return len(self.entries)


def offsets(caches: Any) -> list[int]:
    """What those caches that count say they hold."""
    return sorted({c.offset for c in caches if isinstance(getattr(c, "offset", None), int)})


class Witness:
    """Implements every hook, and remembers."""

    def __init__(self, log: str | None = None):
        self.log = log
        self.events: list[dict[str, Any]] = []
        self.prefixes: list[Prefixes] = []
        self.engine: Any = None
        self.scheme: Any = None
        self.speculation: Any = None
        self.work = 0
        self.saved = True
        self.lock = threading.Lock()

    def note(self, event: str, **details: Any) -> None:
        details["event"] = event
        with self.lock:
            self.events.append(details)
            if self.log:
                with open(self.log, "a", encoding="utf-8") as file:
                    file.write(json.dumps(details) + "\n")

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    def plugins(self) -> Plugins:
        """The plugin manager's face with this plugin alone."""
        manager = pluggy.PluginManager("mlx_lm")
        manager.add_hookspecs(specs)
        manager.register(self, name="witness")
        manager.check_pending()
        return Plugins(manager, ["witness"])

    @hookimpl
    def mlx_lm_add_arguments(self, group: Any, command: str) -> None:
        group.add_argument("--witness-note", default="none", help="A note for the witness")
        group.add_argument("--witness-save", default="yes", choices=["yes", "no"])
        group.add_argument("--witness-timeout", type=float, default=30.0)

    @hookimpl
    def mlx_lm_configure(self, invocation: Invocation) -> None:
        args = vars(invocation.args)
        if args.get("witness_note") == "bad":
            raise UsageError("--witness-note cannot be bad; give another note")
        self.note("configure", command=invocation.command, given=sorted(invocation.given), note=args.get("witness_note"))
        self.saved = args.get("witness_save") != "no"
        self.timeout = args.get("witness_timeout", 30.0)

    @hookimpl
    def mlx_lm_unconfigure(self) -> None:
        self.note("unconfigure")

    @hookimpl
    def mlx_lm_prefix_cache(self, max_entries: int | None, max_bytes: int | None, serves: str) -> Prefixes:
        self.note("prefix_cache", max_entries=max_entries, max_bytes=max_bytes, serves=serves)
        self.prefixes.append(Prefixes(self))
        return self.prefixes[-1]

    @hookimpl
    def mlx_lm_kv_scheme(self) -> Any:
        return self.scheme

    @hookimpl
    def mlx_lm_speculation(self) -> Any:
        return self.speculation

    @hookimpl
    def mlx_lm_model_loaded(self, source: Any) -> None:
        self.note(
            "model_loaded",
            path=str(source.path),
            adapter=str(source.adapter_path),
            draft=str(source.draft.path) if source.draft else None,
            scheme=source.kv_scheme,
            generation=source.generation,
        )

    @hookimpl
    def mlx_lm_engine_started(self, engine: Any) -> None:
        self.engine = engine
        self.note("engine_started", alive=engine.alive)

    @hookimpl
    def mlx_lm_idle_task(self) -> Any:
        return self.idle

    def idle(self) -> bool:
        self.work = max(0, self.work - 1)
        if self.work:
            self.note("idle", thread=threading.current_thread().name)
        return self.work > 0

    @hookimpl
    def mlx_lm_busy_task(self) -> Any:
        return self.hurry

    def hurry(self) -> None:
        self.note("busy", busy=self.engine.busy, thread=threading.current_thread().name)

    @hookimpl
    def mlx_lm_routes(self) -> list[Route]:
        def echo(request: Any) -> Reply:
            body = {"method": request.method, "query": dict(request.query), "body": request.body.decode(), "local": request.local}
            return Reply(200, json.dumps(body).encode())

        def broken(request: Any) -> Reply:
            raise RuntimeError("the route fails on purpose")

        return [
            Route("GET", "/witness", echo),
            Route("POST", "/witness", echo),
            Route("DELETE", "/witness", echo),
            Route("GET", "/witness/open", echo, access="all"),
            Route("GET", "/witness/broken", broken),
        ]

    @hookimpl
    def mlx_lm_shutdown(self, timeout: float) -> bool:
        busy = self.engine.busy if self.engine else None
        alive = self.engine.alive if self.engine else None
        self.note("shutdown", timeout=timeout, busy=busy, alive=alive, at=time.time())
        return self.saved

    @hookimpl
    def mlx_lm_shutdown_timeout(self) -> float:
        return self.timeout


def install(directory: Path) -> Path:
    """Make `directory` one that finds ``--plugin witness`` when it is on ``PYTHONPATH``, and return it."""
    info = directory / "witness-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_lm.plugins]\nwitness = witness_entry:plugin\n")
    (directory / "witness.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    (directory / "witness_entry.py").write_text(
        f"import os\nfrom witness import Witness\n\nplugin = Witness(os.environ.get({'WITNESS_LOG'!r}))\n"
    )
    return directory


def events(log: Path) -> list[dict[str, Any]]:
    """The record that another process's witness wrote."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def environment(directory: Path, log: Path) -> dict[str, str]:
    """The environment in which a process finds the witness."""
    return {**os.environ, "PYTHONPATH": str(directory), "WITNESS_LOG": str(log)}
