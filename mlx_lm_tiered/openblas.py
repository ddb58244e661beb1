"""OpenBLAS for mlx on a Linux CPU.

mlx's CPU wheel carries the reference BLAS. A shared OpenBLAS that is loaded
first takes its place: prefill in float32 runs some twenty times faster. Other
platforms do not need it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Mapping
from glob import glob

INSTALL_HINT = "OpenBLAS is not installed, so the CPU computes about 20 times slower than it could; on Debian or Ubuntu: apt-get install libopenblas0-pthread"


def find() -> str | None:
    """The library's name or path as a loader takes it; None where there is none or none is needed."""
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.util.find_library("openblas")
    if found:
        return found
    # Without ldconfig or a compiler ctypes finds nothing; Debian's place is known.
    known = sorted(glob("/usr/lib/*-linux-gnu/libopenblas.so.0"))
    return known[0] if known else None


def preload_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` in which new processes load OpenBLAS first, if it is there."""
    result = dict(environment)
    library = find()
    if library:
        result["LD_PRELOAD"] = os.pathsep.join(filter(None, [library, result.get("LD_PRELOAD")]))
    return result


def load() -> str | None:
    """Load OpenBLAS into this process, before mlx is imported. Returns what was loaded."""
    library = find()
    if library:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return library
