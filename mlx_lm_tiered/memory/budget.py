"""How much memory mlx may hold, and how much it does. Bytes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

# Of a device or machine that names no working set: the rest is for everything that is not an array.
SHARE = 0.8

# Of control groups, version 2 and 1; "max" or a huge number where there is no limit.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def budget(chosen: int | None) -> tuple[int | None, str]:
    """The limit that holds, and where it comes from in words. None for no limit, which `chosen` 0 asks for.

    It is the smaller of `chosen` and the device's recommended working set; of devices
    that recommend none, the smaller of `chosen` and all their memory, and without
    `chosen` 80 % of that.
    """
    if chosen == 0:
        return None, "off"
    recommended, memory = device_limits()
    if recommended is not None and (chosen is None or recommended < chosen):
        return recommended, "the device's recommended working set"
    if chosen is None:
        return (None, "off") if memory is None else (int(memory * SHARE), f"{SHARE:.0%} of memory")
    if recommended is None and memory is not None and memory < chosen:
        return memory, "all memory there is"
    return chosen, "--memory-budget"


def device_limits() -> tuple[int | None, int | None]:
    """The default device's recommended working set (Metal names one), and its memory (CUDA: its own; CPU: the machine's, or what its control group allows)."""
    if mx.default_device() == mx.Device(mx.cpu):
        return None, machine_memory()
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    memory = info.get("total_memory", info.get("memory_size"))
    return (int(recommended) if recommended else None), (int(memory) if memory else None)


def machine_memory(limits: tuple[Path, ...] = _LIMITS) -> int | None:
    """Physical memory, or the control group's limit when that is smaller; None when neither can be read."""
    found = []
    with suppress(ValueError, OSError):  # the limits below may still be known
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            found.append(int(text))
    return min(found, default=None)


def live() -> int:
    """Bytes of all arrays. What the allocator keeps for reuse is not counted: it is given back when asked for."""
    return mx.get_active_memory()
