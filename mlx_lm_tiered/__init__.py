"""RAM and SSD tiers for mlx-lm's KV caches, as a plugin for an unmodified mlx-lm."""

from typing import Any

__version__: str  # of the installed package
__all__ = ["__version__", "disable", "enable", "stats"]


def enable(**settings: Any) -> None:
    """Switch the plugin on in a script; see `mlx_lm_hooks.enable` and the settings table in the documentation."""
    from mlx_lm_hooks import enable as enable_plugins

    enable_plugins("tiered", **settings)


def disable() -> None:
    """Undo `enable`."""
    from mlx_lm_hooks import disable as disable_plugins

    disable_plugins()


def stats() -> dict[str, Any] | None:
    """What `GET /stats` answers, for a script; None while the plugin is off."""
    from .plugin import current

    runtime = current()
    return None if runtime is None else runtime.report()


def __getattr__(name: str) -> Any:
    # Asked for seldom, and reading an installed package's metadata takes longer than all of this.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mlx-lm-tiered")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "0+unknown"
