"""The contract between mlx-lm and its plugins.

A plugin imports this package and pluggy, nothing else of the hosting side:
`hookimpl` marks its hook implementations, `specs` lists the hooks, `types`,
`requests` and `speculation` have what crosses the line. The host (the code that makes mlx-lm call the
hooks) is found through the entry-point group ``mlx_lm.host``.

Importing this package is cheap: pluggy is loaded on first use.
"""

from importlib import import_module

# True to type checkers, which cannot follow `__getattr__`. `typing` has it too, but costs its import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .manager import (
        Plugins as Plugins,
        disable as disable,
        enable as enable,
        find_host as find_host,
        installed_plugins as installed_plugins,
    )
    from .markers import (
        hookimpl as hookimpl,
        hookspec as hookspec,
    )
    from .requests import (
        Served as Served,
    )
    from .speculation import (
        Speculation as Speculation,
        SpeculativeRow as SpeculativeRow,
        Speculator as Speculator,
    )
    from .types import (
        Admission as Admission,
        CheckpointPreparation as CheckpointPreparation,
        Companion as Companion,
        Engine as Engine,
        GenerationCheckpoints as GenerationCheckpoints,
        GenerationState as GenerationState,
        Host as Host,
        Invocation as Invocation,
        KVScheme as KVScheme,
        ModelSource as ModelSource,
        PluginError as PluginError,
        PrefixCache as PrefixCache,
        Preparation as Preparation,
        Ranks as Ranks,
        Refused as Refused,
        Reply as Reply,
        Request as Request,
        RequestCheckpoints as RequestCheckpoints,
        Route as Route,
        Row as Row,
        SeamReport as SeamReport,
        Serves as Serves,
        Taken as Taken,
        UsageError as UsageError,
    )

_HOMES = {
    "hookimpl": "markers",
    "hookspec": "markers",
    "Plugins": "manager",
    "enable": "manager",
    "disable": "manager",
    "find_host": "manager",
    "installed_plugins": "manager",
    "Admission": "types",
    "CheckpointPreparation": "types",
    "Companion": "types",
    "Engine": "types",
    "GenerationCheckpoints": "types",
    "GenerationState": "types",
    "Host": "types",
    "Invocation": "types",
    "KVScheme": "types",
    "ModelSource": "types",
    "PluginError": "types",
    "PrefixCache": "types",
    "Preparation": "types",
    "Ranks": "types",
    "Refused": "types",
    "Route": "types",
    "Row": "types",
    "Reply": "types",
    "Request": "types",
    "RequestCheckpoints": "types",
    "SeamReport": "types",
    "Served": "requests",
    "Serves": "types",
    "Speculation": "speculation",
    "SpeculativeRow": "speculation",
    "Speculator": "speculation",
    "Taken": "types",
    "UsageError": "types",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f"{__name__}.{home}"), name)
