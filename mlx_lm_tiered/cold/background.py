"""The writer thread: takes tensors as bytes, hashes and writes them in small pieces, makes way for requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .writer import EntryWriter

logger = logging.getLogger("mlx_lm_tiered")

PIECE = 1 << 20  # bytes between two looks at whether the engine is busy
MAX_AHEAD = 2  # tensors waiting to be written; more would only hold memory
POLL = 0.01  # seconds between two looks while paused


class Closed(Exception):
    """The writer was closed before the entry became durable."""


class Write:
    """One entry on its way: opened by the writer thread, fed by the generation thread.

    `done(write, error)` is called once, on the writer thread, with None after the
    entry became durable. After a failure, later pieces are ignored.
    """

    def __init__(self, open_: Callable[[], EntryWriter], done: Callable[[Write, BaseException | None], None]):
        self.open = open_
        self.done = done
        self.writer: EntryWriter | None = None
        self.opened = False
        self.settled = False


class WriterThread:
    """Works off what was submitted, in order. `paused()` is asked before each piece, `worked()` told the processor seconds it took; `roomy()` is called when another tensor may come, `idle()` called between steps, and returns seconds to its next call, or None."""

    def __init__(
        self,
        paused: Callable[[], bool],
        worked: Callable[[float], None],
        roomy: Callable[[], None],
        idle: Callable[[], float | None],
    ):
        self._paused = paused
        self._worked = worked
        self._roomy = roomy
        self._idle = idle
        self._condition = threading.Condition()
        self._work: deque[tuple[Write, str, Any]] = deque()  # (write, step or tensor name, bytes)
        self._tensors = 0
        self._closing = False
        self._nudged = False
        self._current: Write | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-lm-tiered-writer", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Whether another tensor may be submitted."""
        return self._tensors < MAX_AHEAD and not self._closing

    def start(self, write: Write) -> None:
        self._submit(write, "open", None)

    def tensor(self, write: Write, name: str, data: memoryview) -> None:
        """Submit a tensor's bytes; `data` is kept until it is written."""
        self._submit(write, "tensor", (name, data))

    def commit(self, write: Write) -> None:
        self._submit(write, "commit", None)

    def cancel(self, write: Write, error: BaseException) -> None:
        """Give an entry up that cannot be fed any further."""
        self._submit(write, "cancel", error)

    def nudge(self) -> None:
        """Have `idle` called again soon."""
        with self._condition:
            self._nudged = True
            self._condition.notify_all()

    def close(self, timeout: float) -> bool:
        """Stop after the current piece; what is unfinished is given up. False when the thread did not end in time."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _submit(self, write: Write, step: str, data: Any) -> None:
        with self._condition:
            self._work.append((write, step, data))
            self._tensors += step == "tensor"
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            wait = self._idle()  # takes its owner's locks, so not under ours
            with self._condition:
                if not (self._work or self._closing or self._nudged):
                    self._condition.wait(wait)
                self._nudged = False
                if self._closing:
                    break
                if not self._work:
                    continue
                write, step, data = self._work.popleft()
            try:
                if not write.settled:
                    self._step(write, step, data)
            except Exception as error:  # whatever happens to one entry, the next is written
                self._settle(write, error)
            data = None  # the tensor's memory goes now, not when the next one comes
            if step == "tensor":
                with self._condition:
                    self._tensors -= 1
                self._roomy()
        while self._work:
            write, _, _ = self._work.popleft()
            self._settle(write, Closed("the writer was closed"))
        if self._current is not None:
            self._settle(self._current, Closed("the writer was closed"))

    def _step(self, write: Write, step: str, data: Any) -> None:
        if step == "tensor":
            name, view = data
            for start in range(0, max(1, len(view)), PIECE):
                with self._piece():
                    assert write.writer is not None
                    write.writer.write(name, view[start : start + PIECE])
            return
        with self._piece():
            if step == "open":
                self._current = write
                write.writer = write.open()
                write.opened = True
            elif step == "cancel":
                self._settle(write, data)
            else:
                assert write.writer is not None
                write.writer.commit()
                self._settle(write, None)

    @contextmanager
    def _piece(self) -> Iterator[None]:
        """One piece of work, when it may be done. What counts is the processor's time: nobody decodes slower while the disk works."""
        self._make_way()
        started = time.thread_time()
        try:
            yield
        finally:
            self._worked(time.thread_time() - started)

    def _make_way(self) -> None:
        while self._paused() and not self._closing:
            with self._condition:
                self._condition.wait(POLL)
        if self._closing:
            raise Closed("the writer was closed")

    def _settle(self, write: Write, error: BaseException | None) -> None:
        if write.settled:
            return
        write.settled = True
        if self._current is write:
            self._current = None
        writer, write.writer = write.writer, None
        if writer is not None and error is not None:
            try:
                writer.abort()
            except OSError as failure:  # the file stays until a later start reaps it
                logger.debug("SSD cache: giving up an entry: %s", failure)
        write.done(write, error)
