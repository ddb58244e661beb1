"""A generation is gone on with while another decodes, in real servers: its checkpoint is read beside, from a disk that is slow."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from test_background_restores import Stream
from test_checkpoints import CHAT, EVERY, answers, body, checkpoints, interrupted

from support.server import tiered
from support.waiting import until

INJECTOR = Path(__file__).resolve().parents[1] / "support" / "injector"
SLOW = 0.25  # seconds of each read; there is one of each tensor at least
TOKENS = 400


@pytest.fixture
def slow_disk(cache_dir, tmp_path):
    """The environment of a server whose disk is slow once `begin()` was called."""
    control = tmp_path / "control"
    env = {
        "PYTHONPATH": f"{INJECTOR}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "INJECT_UNDER": str(cache_dir),
        "INJECT_CONTROL": str(control),
    }
    yield env, lambda: control.write_text(json.dumps({"preadv": SLOW}))


class Timed(Stream):
    """A stream that knows the longest time between two of its pieces since `since`."""

    def __init__(self, server, prompt):
        self.pieces: list[float] = []
        super().__init__(server, prompt)
        events = self._events

        def timed():
            try:
                for event in events:
                    self.pieces.append(time.monotonic())
                    yield event
            finally:
                events.close()

        self._events = timed()

    def longest(self, since: float) -> float:
        pieces = [at for at in self.pieces if at >= since] + [time.monotonic()]
        return max(later - one for one, later in zip([since, *pieces], pieces, strict=False))


def test_it_is_read_beside_those_that_decode(tiny_llama, cache_dir, tmp_path, slow_disk):
    env, slow = slow_disk
    request = body(max_tokens=TOKENS)
    interrupted(tiered(tiny_llama, cache_dir, "--generation-checkpoint", EVERY, log=tmp_path / "log"), cache_dir, request)
    with tiered(tiny_llama, cache_dir, "--generation-checkpoint", EVERY, log=tmp_path / "log", env=env) as server:
        with Timed(server, "A story") as stream, ThreadPoolExecutor() as pool:
            slow()
            # A client that goes ends the reading, and leaves the checkpoint.
            client = HTTPConnection(server.host, server.port)
            client.request("POST", CHAT, json.dumps(request | {"stream": True}))
            until(lambda: server.stats()["ssd"]["restores_in_flight"])
            client.close()
            until(lambda: server.stats()["ssd"]["restores_cancelled"] == 1)
            assert checkpoints(server)["resumed"] == 0
            sent = time.monotonic()
            resumed = pool.submit(answers, server, request)
            until(lambda: checkpoints(server)["resumed"])
            took, longest = time.monotonic() - sent, stream.longest(sent)
            (got,) = resumed.result()
        seen = server.stats()
        (want,) = answers(server, request)  # its checkpoint is void: from the beginning
    assert seen["checkpoints"]["resumed_in_background"] == 1 and seen["ssd"]["restores_in_background"] == 2, seen
    # Read at one go, they would have stood still for all of it.
    assert took > 4 * SLOW and longest < 2 * SLOW, (took, longest)
    assert seen["ssd"]["held_seconds_last"] > 4 * SLOW and seen["ssd"]["restores_in_flight"] == 0 and seen["faults"] == {}
    assert got.text == want.text and got.usage["completion_tokens"] == TOKENS
