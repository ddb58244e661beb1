"""Showing that something long goes on: a bar on a terminal, a line elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 28
_REDRAW_SECONDS = 0.2


class Progress:
    """Progress of one step, called with (done, total). Used as a context manager.

    On a terminal one line is redrawn, also between calls, so that the seconds run;
    it is wiped at the end. Elsewhere the step's name is written once. `amount` writes
    (done, total); `ended` stands there when all is done but the step goes on.
    """

    def __init__(
        self,
        step: str,
        out: TextIO | None = None,
        *,
        amount: Callable[[int, int], str] = lambda done, total: f"{done:,}/{total:,} tokens",
        ended: str = "prompt read, answering",
    ):
        self._step = step
        self._amount = amount
        self._ended_text = ended
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._done, self._total = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, daemon=True, name="progress")

    def __call__(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._terminal:
            self._thread.start()
        else:
            print(f"{self._step} …", file=self._out, flush=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._terminal:
            self._thread.join()
            self._write("\r\x1b[K")

    def _redraw(self) -> None:
        while not self._ended.wait(_REDRAW_SECONDS):
            self._write("\r\x1b[K" + self.line())

    def line(self) -> str:
        """What is shown right now."""
        seconds = f"{time.monotonic() - self._started:.0f} s"
        if not self._total:
            return f"{self._step} … {seconds}"
        if self._done >= self._total:
            return f"{self._step}: {self._ended_text} … {seconds}"
        filled = _WIDTH * self._done // self._total
        return f"{self._step} [{'#' * filled}{'.' * (_WIDTH - filled)}] {self._amount(self._done, self._total)} {seconds}"

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
