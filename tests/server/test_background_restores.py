"""Restores while others decode, in real servers: nobody's tokens change, and what is damaged is computed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.models import ENDLESS, document
from support.server import tiered, user

TEXTS = [f"Text {i}. " + document(2500, start=700 * i) for i in range(3)]


def ask(server, text):
    return server.chat(user(text), max_tokens=10, stream=False, logprobs=True)


@pytest.fixture(scope="module")
def server(tiny_llama, tmp_path_factory):
    """A server whose RAM tier holds nothing long, so that every long prompt comes back from the disk."""
    home = tmp_path_factory.mktemp("background")
    with tiered(tiny_llama, home / "cold", "--prompt-cache-bytes", "300000", "--ssd-cache-verify", "always", log=home / "log") as server:
        deadline = time.monotonic() + 60
        server.first = [ask(server, text) for text in TEXTS]
        while server.flush()[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield server


class Stream:
    """A request that decodes until it is let go, and its text."""

    def __init__(self, server, prompt: str):
        body = {"prompt": prompt, "max_tokens": 2500, "temperature": 0.0, "logit_bias": ENDLESS}
        self._events = server.stream("/v1/completions", body)
        self._ending = threading.Event()
        self.text = ""
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self):
        self._thread.start()
        while not self.text:
            time.sleep(0.005)
        return self

    def _follow(self):
        for event in self._events:
            self.text += event["choices"][0]["text"]
            if self._ending.is_set():
                self._events.close()
                return

    def __exit__(self, *exc):
        assert self._thread.is_alive(), "it ended before what it was to go along with"
        self._ending.set()
        self._thread.join()


def test_restores_join_those_that_decode(server):
    with Stream(server, "A story") as alone:
        time.sleep(0.5)
    before = server.stats()["ssd"]
    with Stream(server, "A story") as stream, ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda text: ask(server, text), TEXTS))
    after = server.stats()["ssd"]
    for first, answer in zip(server.first, answers, strict=True):
        assert answer.text == first.text and answer.cached_tokens == first.prompt_tokens - 1
    assert after["restores_in_background"] - before["restores_in_background"] == 3
    assert after["held_seconds_total"] > before["held_seconds_total"] and after["restores_in_flight"] == 0
    length = min(len(alone.text), len(stream.text))
    assert length > 50 and alone.text[:length] == stream.text[:length]


def test_a_damaged_file_is_computed_while_others_decode(server):
    for path in server.log_path.parent.joinpath("cold").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-17] ^= 1
        path.write_bytes(data)
    with Stream(server, "A story"):
        answer = ask(server, TEXTS[0])
    assert answer.text == server.first[0].text and answer.cached_tokens < 100
    assert server.stats()["ssd"]["quarantined"] >= 1 and server.healthy()
