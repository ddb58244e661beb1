"""What runs here: versions, platform, device. For reports of the doctor and the benchmarks."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import openblas

_PACKAGES = ("mlx-lm-tiered", "mlx-lm", "mlx", "pluggy", "safetensors", "tokenizers")


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def on_cpu() -> bool:
    """Whether mlx computes on the CPU here. Imports mlx. Raises ImportError when mlx does not load."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


def device() -> str:
    """mlx's default device in words. Imports mlx. Raises ImportError when mlx does not load."""
    import mlx.core as mx

    default = mx.default_device()
    info: dict[str, Any] = mx.device_info()
    name = info.get("device_name") or info.get("architecture") or ""
    return f"{default.type.name} {name}".strip()


def machine() -> dict[str, Any]:
    """Operating system, processor kind, cores this process may use, memory in bytes, OpenBLAS."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "openblas": openblas.find(),
    }
