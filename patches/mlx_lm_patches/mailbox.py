"""Where the generation thread puts what it has for one request."""

from __future__ import annotations

from typing import Any

from mlx_lm_hooks.types import Refused

from .shortage import without_memory

_GONE = "_mlx_lm_patches_gone"


class Cancelled(ConnectionAbortedError):
    """The client went away before its request was served."""

    def __init__(self) -> None:
        super().__init__("the client has gone")


def give_up(queue: Any) -> None:
    """Note that nobody waits for what will be put on a request's queue. Any thread."""
    setattr(queue, _GONE, True)


def given_up(queue: Any) -> bool:
    return getattr(queue, _GONE, False)


class Mailbox:
    """Stands for the queue on which a request's HTTP thread waits, and knows how far the request has come.

    Upstream puts its context, tuples of progress, responses, and at the end None or
    an exception. What comes after the end is let go.

    The context makes the HTTP thread send the status line, and comes before upstream
    knows what the request needs. With a `door` it is held back until the request is
    admitted (`open`) or anything else is put, so that a refusal can still be the answer.

    Where several ranks serve a request `together`, whether its client has gone is known
    to one of them, and is upstream's to share; a request `to_the_end` cannot be stopped.
    """

    def __init__(self, queue: Any, door: bool = False, args: Any = None, *, together: bool = False, to_the_end: bool = False):
        self.queue = queue
        self.args = args  # upstream's, of the request
        self.context: Any = None
        self.ended = False
        self.held = False  # whether the context waits for admission
        self._door = door
        self._together = together
        self._to_the_end = to_the_end

    @property
    def cancelled(self) -> bool:
        """Whether the client has gone."""
        return not self._together and given_up(self.queue)

    @property
    def stopped(self) -> bool:
        """Whether nobody waits for more."""
        return self.ended or self.cancelled or (self.context is not None and self.context._should_stop)

    def put(self, item: Any) -> None:
        if self.context is None and hasattr(item, "stop"):
            self.context = item
            if self._to_the_end:
                item.stop = lambda: None
            if self.ended:
                item.stop()
            elif self._door:
                self.held = True
                return
        if self.ended:
            return
        if item is None or isinstance(item, Exception):
            self.ended = True
        if isinstance(item, Exception):
            item = without_memory(item) or item
            _without_frames(item)
        if isinstance(item, Refused):
            self.held = False
        self.open()
        self.queue.put(item)

    def open(self) -> None:
        """Let the context through: the request is admitted."""
        if self.held:
            self.held = False
            self.queue.put(self.context)

    def fail(self, error: Exception) -> None:
        """End the request with an error; upstream lets go of it as of one whose client has gone."""
        self.put(error)
        if self.context is not None:
            self.context.stop()


def _without_frames(error: BaseException | None) -> None:
    """Have an error, and what it came from, let go of its frames. They hold the request's caches, which must go now: whoever has gone reads no answer."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
