"""The ranks of a distributed server: who they are, what they gather, and work that rank 0 has all of them do.

Upstream shares each request of rank 0 with the others by a pickle of what its queue had.
What rank 0 wants done everywhere travels there as well, as a `Control`, so it reaches all
of them between the same two steps.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlx_lm_hooks.types import Invocation, PluginError

LOOKS = 0.01  # seconds between two questions for results
PARENT_LOOKS = 0.5  # seconds between two looks whether the launcher is there
# mlx.launch tells a process its rank by this; whoever else starts them stops them, too.
RANK_ENV = "MLX_RANK"


class Control(NamedTuple):
    """In a request's place on rank 0's queue. `kind` is ``wake``, ``begin``, ``collect``, ``forget`` or ``stop``."""

    kind: str
    number: int = 0
    name: str = ""
    argument: Any = None


def control(kind: str, *details: Any) -> tuple[Any, Control, None]:
    """As upstream's queue has it."""
    return None, Control(kind, *details), None


class Work:
    """One piece of work that was asked of all ranks, on this one. Its result is JSON, once it has one."""

    def __init__(self, work: Callable[[Any], Any] | None, name: str, argument: Any):
        self._result = b""
        self._work = work
        self._name = name
        self._argument = argument
        threading.Thread(target=self._run, name="mlx-lm-ranks-work", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._work is None:
                raise ValueError(f"nothing here answers {self._name!r}")
            result = json.dumps({"result": self._work(self._argument)})
        except Exception as error:
            result = json.dumps({"error": f"{type(error).__name__}: {error}"})
        self._result = result.encode()

    @property
    def result(self) -> bytes:
        """Empty until it is done."""
        return self._result


class Group:
    """Implements the contract's `Ranks` over mlx's collectives."""

    def __init__(self, rank: int, size: int, sharding: str):
        self.rank = rank
        self.size = size
        self.sharding = sharding
        self.put: Callable[[Any], None] | None = None  # rank 0: how something comes to upstream's queue
        self.complete = True
        self.alive: Callable[[], bool] = lambda: False  # whether the generation thread runs
        self._work: dict[str, Callable[[Any], Any]] = {}
        self._begun: dict[int, Work] = {}
        self._numbers = itertools.count(1)
        self._collected: dict[int, list[bytes]] = {}
        self._changed = threading.Condition()

    @property
    def shard(self) -> str:
        """Which part of a model this process has (see `ModelSource`)."""
        return f"{self.sharding} {self.rank}/{self.size}"

    @property
    def asked(self) -> bool:
        """Whether work is being done that all ranks were asked for."""
        return bool(self._begun)

    # The contract

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        import mlx.core as mx

        flat: Any = mx.distributed.all_gather(mx.array(list(numbers), dtype=mx.int32)).tolist()
        width = len(numbers)
        return [flat[at : at + width] for at in range(0, len(flat), width)]

    def answers(self, name: str, work: Callable[[Any], Any]) -> None:
        self._work[name] = work

    def ask(self, name: str, argument: Any, timeout: float) -> list[Any]:
        assert self.put is not None, "only rank 0 asks"
        number, until = next(self._numbers), time.monotonic() + timeout
        self.put(control("begin", number, name, argument))
        try:
            while (results := self._collect(number, until)) is None:
                time.sleep(LOOKS)
        finally:
            self.put(control("forget", number))
            with self._changed:
                self._collected.pop(number, None)
        answers = [json.loads(result) for result in results]
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [answer["result"] for answer in answers]

    def _collect(self, number: int, until: float) -> list[bytes] | None:
        """Ask once; None when not all are done. Raises TimeoutError."""
        assert self.put is not None
        with self._changed:
            self._collected.pop(number, None)
            self.put(control("collect", number))
            while number not in self._collected:
                left = until - time.monotonic()
                if left <= 0 or not (self.complete and self.alive()):
                    raise TimeoutError("not all ranks have answered")
                self._changed.wait(min(left, 0.25))
            return self._collected[number] or None

    # On the generation thread, between the same two steps of all ranks

    def obey(self, order: Control) -> None:
        """Do what rank 0 wants done everywhere."""
        if order.kind == "begin":
            self._begun[order.number] = Work(self._work.get(order.name), order.name, order.argument)
        elif order.kind == "forget":
            self._begun.pop(order.number, None)
        elif order.kind == "collect":
            work = self._begun.get(order.number)
            results = self._gather_bytes(work.result if work is not None else b"")
            with self._changed:
                if self.rank == 0:
                    self._collected[order.number] = results
                self._changed.notify_all()

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """What each rank gave; nothing at all when one of them gave nothing."""
        import mlx.core as mx

        sizes = [size for (size,) in self.gather([len(mine)])]
        if 0 in sizes:
            return []
        most = max(sizes)
        rows: Any = mx.distributed.all_gather(mx.array(list(mine.ljust(most)), dtype=mx.uint8).reshape(1, most)).tolist()
        return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def join(command: str, args: Any) -> Group | None:
    """The ranks that this process is one of; None when it is alone. Raises PluginError for commands that plugins do not serve so."""
    import mlx.core as mx

    group = mx.distributed.init()
    if group.size() == 1:
        return None
    if command != "server":
        raise PluginError(f"plugins serve several ranks in mlx_lm.server only; run mlx_lm.{command} without them or in one process")
    return Group(group.rank(), group.size(), "pipeline" if args.pipeline else "tensor")


def refuse_unless_joined(invocation: Invocation) -> None:
    """Raise PluginError when there are other ranks that an invocation knows nothing of."""
    import mlx.core as mx

    if invocation.ranks is None and mx.distributed.init().size() > 1:
        raise PluginError("plugins serve several ranks in mlx_lm.server only; run this without them or in one process")


def watch_launcher(gone: Callable[[], None]) -> None:
    """Have `gone` called when the launcher that started this process, one of several ranks, has ended: nobody else would stop them."""
    parent = os.getppid()
    if RANK_ENV not in os.environ or parent == 1:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOKS)
        gone()

    threading.Thread(target=watch, name="mlx-lm-launcher", daemon=True).start()
