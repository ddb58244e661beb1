"""Requests held back for a preparation, in upstream's own `ResponseGenerator`, while others decode."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.models import TINY
from support.waiting import until
from test_seam_server import ask, serving
from witness import Prefixes

from mlx_lm_patches.mailbox import give_up

WAITS = "This request waits. "


class Preparation:
    def __init__(self):
        self.ready = threading.Event()
        self.steps = 0
        self.cancelled = threading.Event()
        self.fail = False

    def step(self) -> bool:
        if self.fail:
            raise RuntimeError("it fails on purpose")
        self.steps += 1
        return self.ready.is_set()

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def preparations(monkeypatch, llama):
    """What was begun: one for every request whose text begins with `WAITS`."""
    made: list[Preparation] = []
    tokenizer = llama[1]

    def prepare(self, source, tokens):
        if WAITS.strip() not in tokenizer.decode(tokens):
            return None
        assert str(source.path).endswith("tiny-llama")
        made.append(Preparation())
        return made[-1]

    monkeypatch.setattr(Prefixes, "prepare", prepare, raising=False)
    return made


@pytest.fixture
def tokenized(monkeypatch):
    """The requests that upstream tokenized."""
    import mlx_lm.server as server

    seen = []
    original = server.ResponseGenerator._tokenize
    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", lambda self, *args: seen.append(args[1]) or original(self, *args))
    return seen


@pytest.fixture(scope="module")
def plain(tiny_llama):
    """The reply's tokens without any joining, by text and length."""
    with serving(tiny_llama) as (_, generator):
        return {text: ask(generator, text, max_tokens=n)[0] for text, n in (("first", 150), (WAITS, 8), ("third", 8))}


def test_those_that_decode_go_on_and_the_held_one_joins_when_it_is_ready(tiny_llama, tokenized, preparations, plain):
    with serving(tiny_llama) as (plugin, generator), ThreadPoolExecutor() as pool:
        ask(generator, "warm up")
        first = pool.submit(ask, generator, "first", max_tokens=150)
        held = pool.submit(ask, generator, WAITS, max_tokens=8)
        until(lambda: preparations)
        third = pool.submit(ask, generator, "third", max_tokens=8)
        assert third.result(20)[0] == plain["third"]  # passes the one that waits
        assert first.result(20)[0] == plain["first"]
        assert not held.done() and plugin.engine.busy and not preparations[0].cancelled.is_set()
        until(lambda: not plugin.engine.decoding)
        preparations[0].ready.set()
        plugin.engine.wake()
        assert held.result(20)[0] == plain[WAITS]
        until(lambda: preparations[0].cancelled.is_set() and not plugin.engine.busy)
    assert len(preparations) == 1
    assert len({id(request) for request in tokenized}) == len(tokenized) == 4  # each once


def test_it_joins_a_batch_that_decodes(tiny_llama, preparations, plain):
    with serving(tiny_llama) as (_, generator), ThreadPoolExecutor() as pool:
        ask(generator, "warm up")
        first = pool.submit(ask, generator, "first", max_tokens=150)
        held = pool.submit(ask, generator, WAITS, max_tokens=8)
        until(lambda: preparations and preparations[0].steps > 0)
        preparations[0].ready.set()
        assert held.result(20)[0] == plain[WAITS] and first.result(20)[0] == plain["first"]


def test_while_nothing_decodes_the_end_of_the_wait_is_told(tiny_llama, preparations):
    """Upstream's poll alone would take up to 0.1 s."""
    waits = []
    with serving(tiny_llama) as (plugin, generator), ThreadPoolExecutor() as pool:
        ask(generator, "warm up")
        for i in range(8):
            held = pool.submit(ask, generator, WAITS + str(i), max_tokens=1)
            until(lambda i=i: len(preparations) > i and preparations[i].steps > 1)
            time.sleep(0.02)
            started = time.monotonic()
            preparations[i].ready.set()
            plugin.engine.wake()
            until(lambda i=i: preparations[i].cancelled.is_set() or held.done())
            waits.append(time.monotonic() - started)
            held.result(20)
    assert sorted(waits)[2] < 0.05, waits


def test_a_client_that_goes_cancels_what_is_prepared(tiny_llama, preparations):
    with serving(tiny_llama) as (plugin, generator), ThreadPoolExecutor() as pool:
        ask(generator, "warm up")
        queues = []
        put = generator.requests.put
        generator.requests.put = lambda item: (queues.append(item), put(item))
        held = pool.submit(ask, generator, WAITS)
        until(lambda: preparations)
        give_up(next(item for item in queues if isinstance(item, tuple))[0])
        until(preparations[0].cancelled.is_set)
        with pytest.raises(ConnectionAbortedError):
            held.result(20)
        assert ask(generator, "others")[0] and not plugin.engine.busy or plugin.engine.decoding


def test_a_preparation_that_fails_is_no_reason_to_wait(tiny_llama, preparations, plain):
    with serving(tiny_llama) as (_, generator), ThreadPoolExecutor() as pool:
        ask(generator, "warm up")
        held = pool.submit(ask, generator, WAITS, max_tokens=8)
        until(lambda: preparations)
        preparations[0].fail = True
        assert held.result(20)[0] == plain[WAITS]


def test_a_sequential_request_is_delivered_at_once(tiny_llama, preparations):
    with serving(tiny_llama) as (_, generator):
        ask(generator, "warm up")
        assert ask(generator, WAITS, seed=3)[0] and not preparations


def test_an_error_in_the_tokenizer_is_the_requests_own(tiny_llama, preparations, monkeypatch):
    import mlx_lm.server as server

    original = server.ResponseGenerator._tokenize
    calls = []

    def failing(self, tokenizer, request, args):
        calls.append(request)
        if request.messages[0]["content"] == "broken":
            raise ValueError("no such text")
        return original(self, tokenizer, request, args)

    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", failing)
    with serving(tiny_llama) as (_, generator):
        ask(generator, "warm up")
        with pytest.raises(ValueError, match="no such text"):
            ask(generator, "broken")
        assert len(calls) == 2 and ask(generator, "others")[0]


def test_after_the_loop_began_anew_a_request_is_tokenized_for_its_own_model(tiny_llama, preparations, monkeypatch):
    """It begins anew with the default model, whatever was served last."""
    import mlx_lm.server as server

    used = []
    original = server.ResponseGenerator._tokenize

    def tokenize(self, tokenizer, request, args):
        used.append((args.model.model, self.model_provider.model_key[0]))
        return original(self, tokenizer, request, args)

    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", tokenize)
    other = str(TINY["lfm2"])
    with serving(tiny_llama) as (_, generator):
        before = ask(generator, "others", model=other)[0]
        broken = server._format_top_logprobs
        with monkeypatch.context() as patch:
            patch.setattr(server, "_format_top_logprobs", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ask(generator, "others", model=other)
        assert server._format_top_logprobs is broken
        until(lambda: generator.model_provider.model_key is not None and generator.model_provider.model_key[0] == str(tiny_llama))
        assert ask(generator, "others", model=other)[0] == before
    assert used and all(asked == loaded for asked, loaded in used), used


def test_what_a_request_waits_for_behind_its_restore_is_found_when_that_is_done():
    from mlx_lm_patches.holding import Behind

    restore, room, asked = Preparation(), Preparation(), []
    waiting = Behind(restore, lambda: asked.append(1) or room)
    assert not waiting.step() and not asked, "others may take the room meanwhile"
    restore.ready.set()
    assert not waiting.step() and not waiting.step() and len(asked) == 1
    room.ready.set()
    assert waiting.step()
    waiting.cancel()
    assert restore.cancelled.is_set() and room.cancelled.is_set()
    cancelled = Behind(Preparation(), lambda: asked.append(2))
    cancelled.cancel()
    assert len(asked) == 1
