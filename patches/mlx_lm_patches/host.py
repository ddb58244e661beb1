"""The host: makes mlx-lm call the hooks (entry point ``patches`` in the group ``mlx_lm.host``)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_lm_hooks.manager import Plugins
from mlx_lm_hooks.types import Invocation, PluginError, SeamReport

from . import finder, ranks, sites, startup
from .features import SEAMS
from .runtime import Runtime
from .seam import SUPPORTED, Applied, Seam, check, supported
from .source import Sources

log = logging.getLogger("mlx_lm_patches")

# What a plugin cannot do without, by command; other features are optimisations.
_REQUIRED = {
    "server": {"prefix", "loads", "idle", "http"},
    "generate": {"loads", "scripts"},
    "chat": {"loads", "scripts"},
    "script": {"loads", "scripts"},
}


class Host:
    """Implements the contract's `Host`. One for the process."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._applied = Applied()
        self._seams: list[Seam] = []
        self._unknown: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether plugins are switched on."""
        return self._runtime is not None

    def activate(self, plugins: Plugins, invocation: Invocation) -> None:
        """Gate every feature, then hook what is loaded; what is imported later is hooked then. Replaces an earlier activation."""
        self.deactivate()
        ranks.refuse_unless_joined(invocation)
        runtime = Runtime(plugins, invocation)
        needed = {"schemes", "rows"} if runtime.scheme is not None else set()
        if runtime.ranks is not None:
            needed.add("ranks")
        seams, unknown = _gate(invocation, needed | ({"speculation"} if runtime.speculation is not None else set()))
        self._runtime = runtime
        self._seams, self._unknown = seams, unknown
        try:
            for name in finder.WATCHED:
                if name in sys.modules:
                    self.module_loaded(sys.modules[name])
        except BaseException:
            self.deactivate()
            raise
        finder.install().wanted = True

    def module_loaded(self, module: ModuleType) -> None:
        """Hook a watched module, and what it has loaded."""
        if self._runtime is not None:
            self._applied.apply(self._seams, self._unknown, sys.modules, self._runtime)

    def deactivate(self) -> None:
        """Restore what is still ours; wrappers that others hold pass through from now on."""
        if self._runtime is None:
            return
        finder.install().wanted = False
        self._runtime.active = False
        self._runtime = None
        self._applied.undo()

    def seams(self) -> list[SeamReport]:
        """Every seam against the installed mlx-lm, read from its source."""
        sources = Sources()
        return [check(seam, sources) for seam in SEAMS]

    def start_up(self) -> Mapping[str, Any]:
        return sites.start_up()

    def launch(self, command: str, argv: Sequence[str]) -> None:
        """Run ``mlx_lm.COMMAND ARGV`` in this process."""
        if command not in finder.COMMANDS:
            raise PluginError(f"there is no command {command!r}; there are {', '.join(finder.COMMANDS)}")
        startup.set_command(command)
        sys.argv = [f"mlx_lm.{command}", *argv]
        module = import_module(f"mlx_lm.{command}")
        startup.bind(module, command)
        module.main()


def _gate(invocation: Invocation, also: set[str]) -> tuple[list[Seam], set[str]]:
    """The seams to apply and the names of those to probe. Raises PluginError when a feature that is needed, by the command or as one of `also`, is blocked."""
    from .arguments import strict_from_environment

    strict = bool(getattr(invocation.args, "plugin_strict", False)) or strict_from_environment()
    sources = Sources()
    version = sources.version()
    if not supported(version):
        raise PluginError(f"mlx-lm {version} is not supported; install a version with pip install 'mlx-lm{SUPPORTED}'")
    required = _REQUIRED.get(invocation.command, set()) | also
    blocked: dict[str, str] = {}
    unknown: set[str] = set()
    for report in (check(seam, sources) for seam in SEAMS):
        problem = f"{report.name}: {report.detail}"
        if report.state == "unknown-body":
            unknown.add(report.name)
            if strict:
                blocked.setdefault(report.feature, problem)
            else:
                log.warning("mlx-lm %s is new to the plugins: %s", version, problem)
        elif report.state != "ok":
            blocked.setdefault(report.feature, problem)
    for feature, problem in blocked.items():
        if strict or feature in required:
            raise PluginError(f"mlx-lm {version} cannot be hooked for {feature}: {problem}")
        log.warning("mlx-lm %s: going on without %s: %s", version, feature, problem)
    return [seam for seam in SEAMS if seam.feature not in blocked], unknown


host = Host()
