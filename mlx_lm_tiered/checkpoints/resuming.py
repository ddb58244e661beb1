"""Checkpoints read ahead of their requests, so that those that decode go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from mlx_lm_hooks import ModelSource

from ..cold.ahead import Ahead
from ..cold.catalog import ColdEntry
from ..cold.restoring import Restorer


class Resumption(Ahead):
    """The contract's `CheckpointPreparation`: the newest checkpoint of one request, read in the background."""

    def __init__(
        self, restorer: Restorer, source: ModelSource, namespace: str, settled: Callable[[], bool], locate: Callable[[], ColdEntry | None]
    ):
        super().__init__(restorer, settled, locate)
        self.source = source
        self.namespace = namespace


class Resumptions:
    """Those of a server. Generation thread only; no two are of the same request."""

    def __init__(self, restorer: Restorer):
        self._restorer = restorer
        self._open: list[Resumption] = []
        self.seconds = {"last": 0.0, "total": 0.0}  # that requests were held back for; may be read from anywhere

    def begin(
        self, source: ModelSource, namespace: str, settled: Callable[[], bool], locate: Callable[[], ColdEntry | None]
    ) -> Resumption | None:
        """Begin to read the checkpoint of a request; None when it has none, or another run of the same request is waiting for it."""
        if self._of(source, namespace) is not None:
            return None
        one = Resumption(self._restorer, source, namespace, settled, locate)
        if one.step():
            one.cancel()
            return None
        self._open.append(one)
        return one

    def reading(self, source: ModelSource, namespace: str) -> bool:
        """Whether a request waits for this checkpoint and it is not there yet."""
        one = self._of(source, namespace)
        return one is not None and not one.step()

    def take(self, source: ModelSource, namespace: str) -> Resumption | None:
        """What was read for this request, once it is about to be served. The caller takes its caches."""
        one = self._of(source, namespace)
        if one is not None:
            self._open.remove(one)
            seconds = one.seconds
            self.seconds = {"last": seconds, "total": self.seconds["total"] + seconds}
        return one

    def cancel(self, source: ModelSource) -> None:
        """Give up those of a model that goes."""
        for one in self._open:
            if one.source == source:
                one.cancel()

    def _of(self, source: ModelSource, namespace: str) -> Resumption | None:
        self._open = [one for one in self._open if not one.closed]
        return next((one for one in self._open if (one.source, one.namespace) == (source, namespace)), None)
