"""Finding, loading and calling plugins: a typed face over pluggy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from . import specs
from .markers import PROJECT
from .requests import Served
from .speculation import Speculation
from .types import Admission, Engine, GenerationCheckpoints, Host, Invocation, KVScheme, ModelSource, PluginError, PrefixCache, Preparation, Refused, Route, Row, Serves, UsageError

PLUGIN_GROUP = "mlx_lm.plugins"
HOST_GROUP = "mlx_lm.host"
PLUGINS_ENV = "MLX_LM_PLUGINS"


def installed_plugins() -> dict[str, EntryPoint]:
    """The installed plugins by name."""
    return {ep.name: ep for ep in entry_points(group=PLUGIN_GROUP)}


def find_host() -> Host:
    """The installed host. Raises PluginError when there is none."""
    for ep in entry_points(group=HOST_GROUP):
        return ep.load()
    raise PluginError("nothing installed hooks mlx-lm; reinstall mlx-lm-tiered")


def split_names(values: Iterable[str]) -> list[str]:
    """Plugin names from repeated and comma-separated values, each once, in order."""
    names = (name.strip() for value in values for name in value.split(","))
    return list(dict.fromkeys(name for name in names if name))


def names_from_environment() -> list[str]:
    """The plugins that ``MLX_LM_PLUGINS`` asks for."""
    return split_names([os.environ.get(PLUGINS_ENV, "")])


class Plugins:
    """The loaded plugins. One method per hook; see `specs` for what each means."""

    def __init__(self, manager: pluggy.PluginManager, names: list[str]):
        self._manager = manager
        self._hook = manager.hook
        self.names = names

    @classmethod
    def load(cls, names: Iterable[str]) -> Plugins:
        """Load plugins by name. Raises UsageError for a name that is not installed, PluginError for a plugin that does not load."""
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(specs)
        installed = installed_plugins()
        names = list(names)
        for name in names:
            if name not in installed:
                known = ", ".join(sorted(installed)) or "none"
                raise UsageError(f"no plugin named {name!r} is installed (installed: {known})")
            try:
                plugin = installed[name].load()
            except Exception as error:
                raise PluginError(f"the plugin {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
            manager.register(plugin, name=name)
        manager.check_pending()
        return cls(manager, names)

    def add_arguments(self, parser: argparse.ArgumentParser, command: str) -> None:
        """Give every plugin its own group of `parser`."""
        for name in self.names:
            plugin = self._manager.get_plugin(name)
            group = parser.add_argument_group(f"plugin {name}")
            others = [p for p in self._manager.get_plugins() if p is not plugin]
            hook = self._manager.subset_hook_caller("mlx_lm_add_arguments", others)
            hook(group=group, command=command)

    def configure(self, invocation: Invocation) -> None:
        self._hook.mlx_lm_configure(invocation=invocation)

    def unconfigure(self) -> None:
        self._hook.mlx_lm_unconfigure()

    def prefix_cache(self, max_entries: int | None, max_bytes: int | None, serves: Serves) -> PrefixCache | None:
        return self._hook.mlx_lm_prefix_cache(max_entries=max_entries, max_bytes=max_bytes, serves=serves)

    def model_loaded(self, source: ModelSource) -> None:
        self._hook.mlx_lm_model_loaded(source=source)

    def model_unloading(self, source: ModelSource) -> None:
        self._hook.mlx_lm_model_unloading(source=source)

    def prefilled(self, source: ModelSource, start: int, tokens: int, seconds: float) -> None:
        self._hook.mlx_lm_prefilled(source=source, start=start, tokens=tokens, seconds=seconds)

    def engine_started(self, engine: Engine) -> None:
        self._hook.mlx_lm_engine_started(engine=engine)

    def generation_checkpoints(self) -> GenerationCheckpoints | None:
        return self._hook.mlx_lm_generation_checkpoints()

    def idle_tasks(self) -> list[Callable[[], bool]]:
        return [task for task in self._hook.mlx_lm_idle_task() if task is not None]

    def busy_tasks(self) -> list[Callable[[], None]]:
        return [task for task in self._hook.mlx_lm_busy_task() if task is not None]

    def routes(self) -> list[Route]:
        return [route for routes in self._hook.mlx_lm_routes() for route in routes]

    def request_began(self, request: Served) -> None:
        self._hook.mlx_lm_request_began(request=request)

    def request_ended(self, request: Served) -> None:
        self._hook.mlx_lm_request_ended(request=request)

    def shutdown(self, timeout: float) -> bool:
        """True when no plugin lost anything."""
        return all(saved is not False for saved in self._hook.mlx_lm_shutdown(timeout=timeout))

    def shutdown_timeout(self) -> float | None:
        return self._hook.mlx_lm_shutdown_timeout()

    def merge_row(self, caches: list[Any]) -> list[Any] | None:
        return self._hook.mlx_lm_merge_row(caches=caches)

    def kv_scheme(self) -> KVScheme | None:
        return self._hook.mlx_lm_kv_scheme()

    def speculation(self) -> Speculation | None:
        return self._hook.mlx_lm_speculation()

    def hold(self, source: ModelSource, tokens: Sequence[int], max_tokens: int, preempted: int | None) -> Preparation | None:
        return self._hook.mlx_lm_hold(source=source, tokens=tokens, max_tokens=max_tokens, preempted=preempted)

    def admit(self, request: Admission) -> Refused | None:
        return self._hook.mlx_lm_admit(request=request)

    def room(self, caches: list[Any]) -> int | None:
        return self._hook.mlx_lm_room(caches=caches)

    def decoding(self, rows: Sequence[Row]) -> Refused | None:
        return self._hook.mlx_lm_decoding(rows=rows)


_enabled: Plugins | None = None


def enable(names: str | Iterable[str], **settings: Any) -> Plugins:
    """Switch plugins on in a script, in place of ``--plugin``.

    `settings` are the plugins' settings under their flags' names with underscores
    (``ssd_cache="dir"``). Enabling again replaces what was enabled. Raises
    UsageError for settings that cannot work and PluginError when mlx-lm cannot be
    hooked; then nothing is enabled.
    """
    global _enabled
    plugins = Plugins.load(split_names([names]) if isinstance(names, str) else names)
    disable()
    invocation = Invocation("script", argparse.Namespace(**settings), frozenset(settings))
    try:
        plugins.configure(invocation)
        find_host().activate(plugins, invocation)
    except BaseException:
        plugins.unconfigure()
        raise
    _enabled = plugins
    return plugins


def disable() -> None:
    """Undo `enable`. Does nothing when nothing is enabled."""
    global _enabled
    if _enabled is None:
        return
    find_host().deactivate()
    _enabled.unconfigure()
    _enabled = None
