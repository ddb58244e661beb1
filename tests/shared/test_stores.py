"""Real servers and real stores: what one machine has computed another one answers with, token by token, whatever the network does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from cold_helpers import grown, restore, same
from mlx_lm_tiered.bench.faulty import FAULTS, faulty
from mlx_lm_tiered.bench.stores import NGINX, WEBDAV_MODULES, s3, webdav
from mlx_lm_tiered.shared.cleaning import Cleaning
from mlx_lm_tiered.shared.objects import StoreFailed, open_objects
from shared_helpers import NAMES, POOL, TOKENS, Machine, conversation, push
from support.models import document
from support.server import tiered, user
from support.waiting import until

needs_nginx = pytest.mark.skipif(NGINX is None or not any(path.exists() for path in WEBDAV_MODULES), reason="nginx with its WebDAV modules is not installed")
needs_moto = pytest.mark.skipif(find_spec("moto") is None, reason="moto is not installed")
KINDS = [pytest.param(webdav, marks=needs_nginx, id="webdav"), pytest.param(s3, marks=needs_moto, id="s3")]


@pytest.fixture(params=KINDS)
def real(request, tmp_path, monkeypatch):
    """A store behind a proxy."""
    with request.param(tmp_path / "store") as store, faulty(store.port) as proxy:
        store = store.at(proxy.port)
        for name, value in store.env.items():
            monkeypatch.setenv(name, value)
        yield SimpleNamespace(url=store.url, env=store.env, proxy=proxy)


def ask(server, text):
    return server.chat(user(text), tokens=True, max_tokens=8)


def test_a_second_machine_answers_with_what_the_first_has_computed(real, tiny_model_of, tmp_path):
    texts = [f"Number {i}. " + document(2500, start=700 * i) for i in range(5)]
    last = "Number 6. " + document(2500, start=4200)

    @contextmanager
    def machine(name):
        flags = ("--shared-cache", real.url, "--shared-cache-write", "always" if name == "a" else "off")
        env = {**real.env, "MLX_LM_TIERED_SHARED_CACHE_TEAM": "a key"}
        with tiered(tiny_model_of(real.url), tmp_path / name, *flags, log=tmp_path / f"{name}.log", env=env) as server:
            yield server
            assert server.stats()["faults"] == {} and "a key" not in server.log()

    with machine("a") as a:
        first = [ask(a, text) for text in texts]
        until(lambda: a.flush()[0] == 200 and not a.stats()["shared"]["pending"])
        expected = ask(a, last)
    with machine("b") as b:
        second = [ask(b, texts[0])]
        with ThreadPoolExecutor(2) as pool:  # one of them joins the other
            second += pool.map(lambda text: ask(b, text), texts[1:3])
        stats = b.stats()
        assert stats["hits_by_tier"]["shared"] == stats["shared"]["fetched"] == 3 and stats["shared"]["requests"]["put"] == 0
        assert all(answer.cached_tokens == answer.prompt_tokens - 1 for answer in second)
        assert "from the shared store" in b.log()
        assert b"Shared store" in b.request("GET", "/tiered")[1]
        assert b'mlx_lm_shared_cache_lookups_total{result="fetched"} 3.0' in b.request("GET", "/metrics")[1]
        real.proxy.share = 0.2
        second += [ask(b, text) for text in texts[3:]]
        assert [answer.tokens for answer in second] == [answer.tokens for answer in first]
        if "http" in real.url:
            real.proxy.share, real.proxy.delay = 0.0, 6.0
            started = time.monotonic()
            assert ask(b, last).tokens == expected.tokens
            assert time.monotonic() - started < 15, "the wait for a store that hangs is bounded"
            real.proxy.delay = 0.0


def test_a_servers_uploads_keep_to_its_bandwidth(tiny_llama, tmp_path):
    """One piece goes at once; what it has used up is not there for the next."""
    flags = ("--shared-cache", f"file://{tmp_path / 'store'}", "--shared-cache-write", "always", "--shared-cache-bandwidth", "1KB")
    with tiered(tiny_llama, tmp_path / "ssd", *flags, log=tmp_path / "log") as server:
        ask(server, document(2500))
        assert server.flush()[0] == 200
        until(lambda: list((tmp_path / "store").rglob("pieces/*")))
        time.sleep(1.5)
        assert not list((tmp_path / "store").rglob("entries/*")) and server.stats()["shared"]["pending"] > 0


@pytest.fixture
def tiny_model_of(tiny_llama, tiny_gemma3):
    """Caches that can be cut on one store, rings on the other."""
    return lambda url: tiny_gemma3 if url.startswith("s3:") else tiny_llama


def test_faults_of_the_network_cost_tries_and_never_a_wrong_byte(real, tmp_path):
    """One reply in eight is dropped, cut off or corrupted: each round is another machine, which has the entry bit for bit or not at all."""
    objects = open_objects(real.url)
    a = Machine(tmp_path / "a", objects)
    conversation(a.cold, 400, 700, 900)
    push(objects, a.cold, TOKENS)
    a.close()
    real.proxy.share = 0.12
    fetched, rounds = 0, 20
    for number in range(rounds):
        b = Machine(tmp_path / f"b{number}", open_objects(real.url))
        started = time.monotonic()
        fetch = b.ask([*TOKENS, 5])
        assert time.monotonic() - started < 13
        there = restore(b.cold, TOKENS)
        assert (there is not None) == (fetch.entry is not None)
        if there is not None:
            assert same(there, grown(900))
            fetched += 1
        b.close()
    assert fetched > rounds // 2 and all(real.proxy.counts()[fault] for fault in FAULTS)


def test_an_upload_through_a_faulty_network_is_whole_or_not_there(real, tmp_path):
    objects = open_objects(real.url)
    a = Machine(tmp_path / "a", objects)
    conversation(a.cold, 400, 900)
    real.proxy.share = 0.3
    for _ in range(20):
        try:
            push(objects, a.cold, TOKENS)
            break
        except StoreFailed:
            continue
    real.proxy.share = 0.0
    b = Machine(tmp_path / "b", open_objects(real.url))
    assert b.ask([*TOKENS, 5]).entry is not None and same(restore(b.cold, TOKENS), grown(900))
    assert Cleaning(objects, NAMES.team, POOL, 1, 0).clean().gone == 1
    assert objects.folders(NAMES.team.folder) in ([], [NAMES.folder.rpartition("/")[2]])
    assert not list(objects.files(f"{NAMES.folder}/pieces")) and not list(objects.files(f"{NAMES.folder}/rungs"))
    for machine in (a, b):
        machine.close()
