"""What plugins see of a request, from what its HTTP thread gets."""

from __future__ import annotations

from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_hooks import Refused, Served
from mlx_lm_patches.mailbox import Cancelled
from mlx_lm_patches.served import Follower, served_for


class Runtime:
    """Notes what plugins are told."""

    def __init__(self, failing: bool = False):
        self.told: list[tuple[str, Served]] = []
        self.faults = 0
        self.plugins = SimpleNamespace(request_began=lambda request: self._tell("began", request), request_ended=lambda request: self._tell("ended", request))
        self._failing = failing

    def _tell(self, what: str, request: Served) -> None:
        self.told.append((what, request))
        if self._failing:
            raise RuntimeError("a plugin's fault")

    def fault(self, where: str, error: BaseException) -> None:
        self.faults += 1


def token(finish: str | None = None) -> Any:
    return SimpleNamespace(token=1, finish_reason=finish)


def followed(runtime: Runtime, *items: Any) -> Served:
    follower = Follower(runtime, Queue(), 5.0)  # type: ignore[arg-type]
    for item in items:
        follower.note(item)
    follower.end()
    return follower.served


def context(reused: int = 40) -> Any:
    return SimpleNamespace(prompt=list(range(100)), prompt_cache_count=reused, stop=lambda: None)


def test_a_request_from_its_arrival_to_its_end():
    runtime = Runtime()
    served = followed(runtime, context(), (0, 60), (32, 60), token(), token(), token("length"), None)
    assert runtime.told == [("began", served), ("ended", served)]
    assert (served.arrived, served.prompt_tokens, served.reused_tokens, served.processed, served.to_process) == (5.0, 100, 40, 32, 60)
    assert (served.tokens, served.finish) == (3, "length")
    assert served.first_token <= served.last_token <= served.ended


def test_what_mlx_lm_finds_after_it_has_told_of_the_request_is_seen():
    late = context(-1)
    follower = Follower(Runtime(), Queue(), 0.0)  # type: ignore[arg-type]
    follower.note(late)
    assert follower.served.reused_tokens == 0
    late.prompt_cache_count = 70
    follower.note(token())
    assert follower.served.reused_tokens == 70


@pytest.mark.parametrize(("items", "finish"), [
    ([Refused(503, "no memory")], "refused"), ([context(), ValueError("no")], "error"), ([Cancelled()], "abort"), ([context(), token()], "abort"), ([], "abort"),
    ([context(), token("stop"), None], "stop"),
])  # fmt: skip
def test_how_it_ended(items, finish):
    assert followed(Runtime(), *items).finish == finish


def test_both_threads_have_the_same_object_and_a_plugins_fault_stays_its_own():
    queue: Queue[Any] = Queue()
    first = served_for(queue)
    runtime = Runtime(failing=True)
    follower = Follower(runtime, queue, 1.0)  # type: ignore[arg-type]
    follower.end()
    assert follower.served is first is served_for(queue) and runtime.faults == 2
