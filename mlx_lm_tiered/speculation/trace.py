"""``--spec-trace FILE``: what became of each draft, for tests and for people who look.

One JSON object a line: ``request`` (the number of the request in this run, from 1), ``position`` (tokens of the sequence
before the round, where the first emitted one stands), ``drafted`` (token ids), ``accepted`` (how many of them), ``emitted`` (token ids: the one that was sampled before
the round, and the accepted ones).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from mlx_lm_hooks import UsageError

from ..statistics import Statistics


class Trace:
    """A file that is appended to, its owner's only. Raises UsageError when it cannot be opened. A write that fails is one warning and the end of it."""

    def __init__(self, path: Path, statistics: Statistics):
        self._path = path
        self._statistics = statistics
        self._file: int | None = None
        try:
            # Without a reader a pipe would be waited for.
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise OSError("it is not a regular file")
            os.fchmod(self._file, 0o600)
        except OSError as error:
            self.close()
            raise UsageError(f"--spec-trace {path} cannot be written: {error.strerror or error}") from None

    def round(self, request: int, position: int, drafted: Sequence[int], accepted: int, emitted: Sequence[int]) -> None:
        """Write a line."""
        if self._file is None:
            return
        line = {"request": request, "position": position, "drafted": list(drafted), "accepted": accepted, "emitted": list(emitted)}
        left = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._statistics.fault("spec_trace", f"--spec-trace {self._path} ends here: {error.strerror or error}")
            self.close()

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
