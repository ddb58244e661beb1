"""Paged KV in real servers: requests share blocks, every tier gives the tokens of plain caches, and a short pool makes requests wait, not fail."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_lm_tiered.bench import exhaustion
from mlx_lm_tiered.bench.client import RequestFailed
from mlx_lm_tiered.bench.server import Server
from support.models import ENDLESS, TINY, document
from support.server import stock, tiered
from support.waiting import until

TEXTS = [document(900), document(900) + " It is", document(120, start=900), document(400, start=2000), document(60, start=3000)]
PAGED = ["--paged-kv", "--paged-kv-block-size", "16", "--paged-kv-pool", "16MB"]
RESTORE = ["--ssd-restore", "always"]
CLIENTS = 24


def ask(server: Server, text: str, count: int = 24, **options):
    return server.complete(text, max_tokens=count, tokens=True, logit_bias=ENDLESS, **options)


def together(server: Server, texts=TEXTS, count: int = 24) -> list[list[int]]:
    with ThreadPoolExecutor(len(texts)) as pool:
        return [answer.tokens for answer in pool.map(lambda text: ask(server, text, count), texts)]


def conversation(number: int) -> list[dict[str, str]]:
    """One of four system prompts, and a question."""
    return [{"role": "system", "content": document(200, start=100 * (number % 4))}, {"role": "user", "content": document(60 + 10 * (number % 7), start=300 * (number % 40))}]


def patiently(server: Server, messages: list[dict[str, str]]) -> list[int]:
    """A short reply; connecting again where the system turned the connection away, as mlx-lm's server has a short queue of them."""
    while True:
        try:
            return server.chat(messages, max_tokens=8, tokens=True, logit_bias=ENDLESS).tokens
        except ConnectionError:
            time.sleep(0.05)


def settled(server: Server, **expected: int) -> dict:
    """What `/stats` says of paging once it says what is expected."""
    until = time.monotonic() + 20
    while True:
        paged = server.stats()["paged"]
        if all(paged[name] == value for name, value in expected.items()) or time.monotonic() > until:
            return paged
        time.sleep(0.02)


@pytest.mark.parametrize("family, scheme", (("llama", None), ("gemma3_text", None), ("llama", "affine:4:32")))
def test_every_tier_gives_the_tokens_of_caches_without_paging(family, scheme, cache_dir, tmp_path):
    """Alone, in a batch, from RAM, outside the batch; from disk with and without paging. A scheme in both spellings."""
    model = TINY[family]
    form = ["--kv-scheme", scheme] if scheme else []
    with tiered(model, None, *form, log=tmp_path / "alone") if scheme else stock(model, tmp_path / "stock") as server:
        expected = [ask(server, text).tokens for text in TEXTS]
    upstreams = ["--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "0"] if scheme else []
    with tiered(model, cache_dir, *PAGED, *RESTORE, *upstreams, log=tmp_path / "first") as server:
        assert together(server) == expected
        hits = [ask(server, text) for text in TEXTS]
        assert [hit.tokens for hit in hits] == expected and all(hit.cached_tokens > 0 for hit in hits)
        assert [ask(server, text, seed=7).tokens for text in TEXTS] == expected
        # Outside the batch, with a reply much shorter than it was promised blocks for.
        assert ask(server, TEXTS[4], 400, seed=7, stop=["e"]).tokens
        before = settled(server, blocks_reserved=0)
        assert before["blocks_reserved"] == 0
        # Of models with rings or recurrent state, prefixes are stored as well that the whole cannot serve. Else what is
        # shared hangs on whether the second text came when the first one's reply was done.
        assert (before["blocks_shared"] > 0 or family == "llama") and before["block_tokens"] == 16
        hit = ask(server, TEXTS[0] + " or")
        paged = settled(server, blocks_reserved=0)
        if family == "llama":
            # The longest common prefix is there once, in RAM's count of bytes as well.
            own = -(-(hit.prompt_tokens + 24) // 16) - paged["blocks_shared"] + 1
            assert paged["blocks_shared"] >= hit.cached_tokens // 16 > 10 and paged["blocks_used"] - before["blocks_used"] <= own
        stats = server.stats()
        if scheme:
            kv = stats["kv"]
            assert kv["scheme"] == "affine:4:32@0" and kv["predicted_bytes"] <= kv["actual_bytes"] < 1.2 * kv["predicted_bytes"]
            assert paged["block_bytes"] / 16 == kv["bytes_per_1000_tokens"][model.name] / 1000
        assert stats["faults"] == {}
        if family == "llama":
            # The last request may not have let go of all its blocks yet.
            until = time.monotonic() + 20
            while (stats := server.stats())["ram"]["bytes"] != stats["paged"]["blocks_used"] * paged["block_bytes"] and time.monotonic() < until:
                time.sleep(0.02)
            assert stats["ram"]["bytes"] == stats["paged"]["blocks_used"] * paged["block_bytes"]
        assert server.flush()[0] == 200
        server.request("POST", "/admin/drain")
        assert settled(server, blocks_used=0)["blocks_used"] == 0, "what is on disk only takes no blocks"
        again = [ask(server, text) for text in TEXTS]
        assert [one.tokens for one in again] == expected and all(one.cached_tokens > 0 for one in again)
        assert server.terminate() == 0
    if family != "llama":
        return
    with tiered(model, cache_dir, *RESTORE, *form, log=tmp_path / "plain") as server:
        again = [ask(server, text) for text in TEXTS]
        assert [one.tokens for one in again] == expected and all(one.cached_tokens > 0 for one in again)
        assert ask(server, TEXTS[2] + " and").tokens and server.terminate() == 0
    with tiered(model, cache_dir, *PAGED, *RESTORE, *form, log=tmp_path / "third") as server:
        # The first that comes is restored: it is in blocks, as those are that join it.
        assert together(server) == expected and server.stats()["hits_by_tier"]["ssd"] > 0
        assert server.stats()["paged"]["blocks_used"] * server.stats()["paged"]["block_bytes"] == server.stats()["ram"]["bytes"]
        again = [ask(server, text) for text in TEXTS]
        assert [one.tokens for one in again] == expected and all(one.cached_tokens > 0 for one in again)
        assert server.stats()["faults"] == {}


def test_more_requests_than_blocks(tiny_llama, tmp_path):
    """Many requests on a pool for few: each gets its right tokens, waits its turn, and leaves nothing behind."""
    texts = [conversation(i) for i in range(40)]
    with stock(tiny_llama, tmp_path / "stock") as server:
        with ThreadPoolExecutor(8) as pool:
            expected = list(pool.map(lambda text: patiently(server, text), texts))
    with tiered(tiny_llama, None, "--paged-kv", "--paged-kv-block-size", "16", "--paged-kv-pool", "900kB", "--speculation", "ngram", log=tmp_path / "log") as server:
        until(lambda: server.stats()["paged"]["blocks"] > 0)  # made when the model is loaded, before any request
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda text: patiently(server, text), texts))
        assert answers == expected
        paged = settled(server, blocks_reserved=0, waiting=0)
        assert paged["waits"] > 0 and paged["refused_503"] == paged["refused_400"] == 0
        assert paged["blocks_peak"] <= paged["blocks"] and server.stats()["faults"] == {}
        with pytest.raises(RequestFailed) as caught:
            ask(server, document(3000), 2000)
        assert caught.value.status == 400 and "blocks of 16 tokens, more than the" in str(caught.value)
        assert patiently(server, texts[0]) == expected[0]


def test_rows_leave_and_come_back_where_replies_are_longer_than_what_was_promised(tiny_llama, tmp_path):
    """Six long replies on a pool for two, without a disk: the tokens of mlx-lm's own server, and none is refused."""
    texts = [document(60 + 10 * i, start=100 * i) for i in range(6)]
    with stock(tiny_llama, tmp_path / "stock") as server:
        expected = together(server, texts, 300)
    with tiered(tiny_llama, None, "--paged-kv", "--paged-kv-block-size", "16", "--paged-kv-pool", "1200kB", "--speculation", "ngram", log=tmp_path / "log") as server:
        assert together(server, texts, 300) == expected
        paged, stats = settled(server, blocks_reserved=0, waiting=0), server.stats()
        assert paged["preempted"] > 0 and paged["refused_503"] == paged["blocks_reserved"] == 0 and stats["faults"] == {}
        assert sum(stats["hits_by_tier"].values()) + stats["misses"] == 6, "coming back is no request's lookup"


def test_exhaustion_with_tiers_a_restart_drains_and_clients_that_go():
    """Some of the two hundred requests of ``mlx_lm.tiered bench exhaustion``."""
    found = exhaustion.run(None, 20, room=3)
    assert found["faults"] == [] and found["right"] >= 17 and found["given_up"] == 2
    assert found["restored"] > 0 and 0 < found["blocks_peak"] <= found["blocks"]
    assert found["blocks_used_left"] == found["blocks_reserved_left"] == found["waiting_left"] == 0


def test_a_model_takes_its_pool_along_when_another_comes(tiny_llama, tiny_lfm2, tmp_path):
    with tiered(tiny_llama, None, *PAGED, log=tmp_path / "log") as server:
        first = ask(server, TEXTS[0])
        blocks = server.stats()["paged"]["blocks"]
        other = ask(server, TEXTS[0], model=str(tiny_lfm2))
        paged = server.stats()["paged"]
        assert other.tokens and 0 < paged["blocks"] != blocks, "one pool, of the model that is loaded"
        # A request may name a draft model of mlx-lm's own: its caches take no pool of their own.
        drafted = ask(server, TEXTS[0], model=str(tiny_llama), draft_model=str(tiny_llama))
        assert drafted.tokens == first.tokens and server.stats()["paged"]["blocks"] == blocks
        again = ask(server, TEXTS[0], model=str(tiny_llama))
        assert again.tokens == first.tokens and again.cached_tokens == 0 and server.stats()["paged"]["blocks"] == blocks
        assert ask(server, TEXTS[0], model=str(tiny_llama)).cached_tokens > 0 and server.stats()["faults"] == {}


def test_a_client_that_goes_away_in_prefill_or_while_it_waits_leaves_no_promise(tiny_llama, tmp_path):
    with tiered(tiny_llama, None, *PAGED[:3], "--paged-kv-pool", "1500kB", "--prefill-step-size", "16", log=tmp_path / "log") as server:
        ask(server, TEXTS[2], 2)
        threads = []
        for number in range(6):
            body = {"prompt": document(700, start=50 * number), "max_tokens": 200, "stream": True}

            def leave(body=body) -> None:
                events = server.stream("/v1/completions", body)
                next(events)
                events.close()

            threads.append(threading.Thread(target=leave))
            threads[-1].start()
        for thread in threads:
            thread.join()
        paged = settled(server, blocks_reserved=0, waiting=0)
        assert paged["blocks_reserved"] == paged["waiting"] == 0
        assert ask(server, TEXTS[0]).tokens and server.stats()["faults"] == {}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--paged-kv", "--kv-scheme", "affine:4@100"], "--paged-kv has blocks of one form, and --kv-scheme affine:4:64@100 changes it at token 100; use affine:4:64"),
        (["--paged-kv", "--kv-scheme", "turbo@9"], "--paged-kv has blocks of one form, and --kv-scheme turbo:k8v3@9 changes it at token 9; use turbo:k8v3"),
        (["--paged-kv", "--kv-bits", "4"], "--paged-kv has blocks of one form, and --kv-bits affine:4:64@5000 changes it at token 5000; add --quantized-kv-start 0"),
        (["--paged-kv", "--prompt-cache-bytes", "0"], "--paged-kv needs the RAM tier, which --prompt-cache-bytes 0 switches off"),
        (["--paged-kv", "--prompt-cache-size", "0"], "--paged-kv needs the RAM tier, which --prompt-cache-size 0 switches off"),
        (["--paged-kv", "--paged-kv-block-size", "0"], "--paged-kv-block-size 0: a block has at least one token"),
        (["--paged-kv", "--paged-kv-pool", "0"], "--paged-kv-pool 0 leaves no block"),
        (["--paged-kv", "--paged-kv-pool", "2GB", "--memory-budget", "1GB"], "--paged-kv-pool of 2 GB does not fit into --memory-budget of 1 GB"),
        (["--paged-kv-pool", "2GB"], "--paged-kv-pool does nothing without --paged-kv"),
    ],
)
def test_what_cannot_be_combined_ends_the_start_in_one_sentence(flags, says, tiny_llama, tmp_path):
    from mlx_lm_hooks import Invocation, UsageError
    from mlx_lm_tiered import plugin

    flags = [{"MODEL": str(tiny_llama), "TMP": str(tmp_path)}.get(flag, flag) for flag in flags]
    arguments = parsed(flags)
    with pytest.raises(UsageError) as caught:
        plugin.mlx_lm_configure(Invocation("server", *arguments))
    assert says in str(caught.value) and str(caught.value).count("\n") == 0 and plugin.current() is None


def parsed(flags: list[str]):
    """The arguments of a server's command line, and the names of those that were given."""
    from mlx_lm_tiered import settings

    parser = argparse.ArgumentParser()
    parser.add_argument("--draft-model")
    parser.add_argument("--num-draft-tokens")
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--prompt-cache-bytes")
    parser.add_argument("--prompt-cache-size", type=int)
    parser.add_argument("--kv-group-size", type=int, default=64)
    parser.add_argument("--quantized-kv-start", type=int, default=5000)
    settings.add_arguments(parser.add_argument_group("tiered"), "server")
    found = parser.parse_args(flags)
    return found, frozenset(flag[2:].replace("-", "_") for flag in flags if flag.startswith("--"))


def test_without_the_flag_nothing_of_paging_is_imported(tiny_llama):
    code = (
        "import sys, json\n"
        "import mlx_lm_tiered\n"
        "mlx_lm_tiered.enable()\n"
        "from mlx_lm.utils import load\n"
        "from mlx_lm.generate import generate\n"
        f"model, tokenizer = load({str(tiny_llama)!r})\n"
        "generate(model, tokenizer, 'hello', max_tokens=2)\n"
        "import mlx_lm_tiered.runtime, mlx_lm_tiered.plugin\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('mlx_lm_tiered.paged')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("command", ["generate", "chat", "script"])
def test_what_is_no_server_does_not_page(command):
    from mlx_lm_hooks import Invocation, UsageError
    from mlx_lm_tiered.paged.options import check
    from mlx_lm_tiered.schemes.spec import PLAIN
    from mlx_lm_tiered.settings import Settings

    with pytest.raises(UsageError, match="--paged-kv is for servers; leave it out"):
        check(Settings(paged_kv=True), PLAIN, Invocation(command, argparse.Namespace()))
