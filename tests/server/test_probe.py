"""`cache probe`: what it says is what a request then finds, offline and asked of a server; asking changes nothing."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlx_lm_hooks import ModelSource, Request
from support.models import document
from support.server import tiered, user

from mlx_lm_tiered.cli import main
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.serving.probe import Prober
from mlx_lm_tiered.settings import Settings

TEXT = document(2500)
OTHER = TEXT[:1500] + " Something else entirely. " + TEXT[1500:]


def probed(capsys, *argv: object, code: int = 0) -> dict:
    capsys.readouterr()
    assert main(["cache", "probe", *map(str, argv), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def messages(tmp_path):
    def write(text: str):
        file = tmp_path / "messages.json"
        file.write_text(json.dumps(user(text)))
        return file

    return write


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_lfm2"])
def test_what_it_says_is_what_a_request_finds(model, cache_dir, tmp_path, capsys, request, messages):
    model = request.getfixturevalue(model)
    with tiered(model, cache_dir, log=tmp_path / "log") as server:
        assert probed(capsys, "--server", server.url, "--messages", messages(TEXT), code=1)["hit_tokens"] == 0
        cold = server.chat(user(TEXT), max_tokens=4)
        before = server.stats()
        in_ram = probed(capsys, "--server", server.url, "--messages", messages(TEXT))
        assert (in_ram["hit_tier"], in_ram["hit_tokens"], in_ram["prompt_tokens"]) == ("ram", cold.prompt_tokens - 1, cold.prompt_tokens)
        other = probed(capsys, f"--server={server.url}", "--messages", messages(OTHER), code=0 if "llama" in str(model) else 1)
        after = server.stats()
        assert [after[name] for name in ("lookups", "hits", "misses", "puts")] == [before[name] for name in ("lookups", "hits", "misses", "puts")]
        assert server.flush()[0] == 200
        offline = probed(capsys, cache_dir, "--model", model, "--messages", messages(OTHER), code=0 if "llama" in str(model) else 1)
        assert offline["hit_tokens"] == other["hit_tokens"]
        assert offline["divergence"]["at"] == other["divergence"]["at"] > 100
        assert OTHER[1500:].startswith(" Something") and "omething" in offline["divergence"]["prompt"] + offline["divergence"]["before"]
        assert (offline["divergence"]["before"] + offline["divergence"]["stored"]).strip()[5:-5] in TEXT
        found = server.chat(user(OTHER), max_tokens=4)
        assert found.cached_tokens == other["hit_tokens"]
    offline = probed(capsys, cache_dir, "--model", model, "--messages", messages(TEXT))
    assert (offline["hit_tier"], offline["hit_tokens"]) == ("ssd", cold.prompt_tokens - 1)


def test_the_route_takes_tokens_and_refuses_what_is_no_prompt(tiny_llama, cache_dir, tmp_path, capsys):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        def ask(body) -> tuple[int, dict]:
            status, answer = server.request("POST", "/admin/cache/probe", body)
            return status, json.loads(answer)

        answer = server.complete(TEXT, tokens=True, max_tokens=3)
        assert server.flush()[0] == 200
        tokens = ask({"prompt": TEXT})[1]["around"]
        status, found = ask({"tokens": list(range(5000, 5040))})
        assert status == 200 and found["hit_tokens"] == 0 and found["prompt_tokens"] == 40 and found["nearest_tier"] is None
        assert ask({"prompt": TEXT})[1]["hit_tokens"] == answer.prompt_tokens - 1
        longer = ask({"prompt": TEXT})[1]
        assert {"ram", "queue", "ssd"} == set(longer["tiers"]) and longer["tiers"]["ssd"]["hit"] == answer.prompt_tokens - 1
        for body in ({"tokens": []}, {"tokens": ["x"]}, {"tokens": [1], "prompt": "x"}, {"tokens": [2**70]}, {}, [], b"{", b"[" * 100_000, {"messages": [{}]}):
            status, told = ask(body)
            assert status == 400 and told["error"] and "\n" not in told["error"], body
        # What others said is not told, only what the client has itself.
        diverging = ask({"prompt": TEXT[:900] + " zebra"})[1]
        assert set(diverging["around"]) == {"from", "tokens"} and "stored" not in json.dumps(diverging)
        assert len(tokens["tokens"]) <= 32
        assert main(["cache", "probe", "--server", server.url, "--prompt", ""]) == 2
        assert server.stats()["faults"] == {}
    for_people(tiny_llama, cache_dir, tmp_path, capsys)
    assert main(["cache", "probe", "--server", server.url, "--prompt", "x"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_the_model_that_the_server_starts_with_is_waited_for():
    """The HTTP side answers before the generation thread has loaded the model."""
    runtime = Runtime(Settings())
    prober = Prober(runtime)
    request = Request("POST", "/admin/cache/probe", {}, {}, json.dumps({"tokens": [1, 2, 3]}).encode(), True)
    runtime.args = argparse.Namespace(model=None)
    assert prober.handle(request).status == 503
    runtime.args = argparse.Namespace(model="m")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(prober.handle, request)
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        runtime.model_loaded(ModelSource(Path("m")))
        assert answer.result(10).status == 200
    ended = Runtime(Settings())
    ended.args = runtime.args
    ended.close()
    assert Prober(ended).handle(request).status == 503


def for_people(model, cache_dir, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT[:900] + " zebra")
    assert main(["cache", "probe", str(cache_dir), "--model", str(model), "--prompt", f"@{file}"]) == 0
    out = capsys.readouterr().out
    assert "in the SSD tier" in out and "diverges at token" in out and "zebra" in out
    # Another state of the model has no entries; it is said what differs.
    assert main(["cache", "probe", str(cache_dir), "--model", str(model), "--prompt", "x", "--kv-scheme", "affine:8:32"]) == 1
    assert "has another KV scheme" in capsys.readouterr().out
