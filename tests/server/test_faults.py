"""Faults that users of mlx-lm and of its peers have hit, as kinds, against real server processes.

The numbers are those of the list the project was given; the fault is named where it is tested.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from support.models import document
from support.server import Server, stock, tiered, tiered_flags, user
from support.waiting import until

LONG = 3000


def ask(server, *texts, **options):
    return server.chat(user(*texts), tokens=True, max_tokens=12, **options)


# A seed sends upstream's server down its sequential path.
PATHS = [{}, {"seed": 5}]


def test_1_a_prompt_that_is_prompt_and_completion(tiny_llama, tmp_path):
    """The exact hit leaves one token to forward, and the server lives."""
    with tiered(tiny_llama, None, log=tmp_path / "log") as server:
        for number, options in enumerate(PATHS):
            exact = 0
            for length in range(1, 9):
                prompt = f"{number} " + document(200, start=50 * length)
                first = server.complete(prompt, tokens=True, max_tokens=length, **options)
                second = server.complete(prompt + first.text, tokens=True, max_tokens=4, **options)
                assert second.cached_tokens < second.prompt_tokens
                exact += second.prompt_tokens == first.prompt_tokens + length
                assert server.healthy()
            assert exact, "no completion tokenized back to itself; the fault was not provoked"


def test_7_hits_refresh_recency(tiny_llama, tmp_path):
    """What a request with another ending used is kept over what nobody asked for since."""
    with tiered(tiny_llama, None, "--prompt-cache-size", "3", log=tmp_path / "log") as server:
        often = document(LONG)
        first = ask(server, often + " What is a list?")
        unused = [ask(server, f"{i} other " * 20) for i in range(2)]
        other = ask(server, often + " How is a file opened?")
        assert 0 < other.cached_tokens < other.prompt_tokens - 1
        again = ask(server, often + " What is a list?")
        assert again.cached_tokens == first.prompt_tokens - 1
        assert ask(server, "0 other " * 20).cached_tokens < unused[0].prompt_tokens - 1


def test_8_the_byte_cap_holds_on_every_path(tiny_llama, tmp_path):
    with tiered(tiny_llama, None, "--prompt-cache-bytes", "4MB", log=tmp_path / "log") as server:
        for options in PATHS:
            before = server.stats()["ram"]["evictions"]
            for i in range(8):
                ask(server, f"{i} {options} " + document(LONG, start=100 * i), **options)
                ram = server.stats()["ram"]
                assert ram["bytes"] <= ram["max_bytes"] == 4 * 10**6
            assert ram["evictions"] > before


def test_10_a_boundary_entry_serves_where_a_wrapped_ring_cannot(tiny_gemma3, cache_dir, tmp_path):
    system = {"role": "system", "content": document(LONG)}
    with tiered(tiny_gemma3, cache_dir, log=tmp_path / "log") as server:
        first = server.chat([system, *user("What is a list?")], tokens=True)
        other = server.chat([system, *user("How is a file opened?")], tokens=True)
        assert other.cached_tokens > 0.8 * first.prompt_tokens
        assert server.terminate() == 0
    with tiered(tiny_gemma3, cache_dir, log=tmp_path / "log2") as server:
        third = server.chat([system, *user("Why is the sky blue?")], tokens=True)
        assert third.cached_tokens == other.cached_tokens
    with stock(tiny_gemma3, tmp_path / "stock") as server:
        assert server.chat([system, *user("Why is the sky blue?")], tokens=True).tokens == third.tokens


def test_18_weights_changed_under_the_same_name(tiny_llama, cache_dir, tmp_path):
    """Another revision in the same directory: nothing of the old one is reused."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    question = document(LONG)
    with tiered(model, cache_dir, log=tmp_path / "first.log") as server:
        ask(server, question)
        assert server.terminate() == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1001] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with tiered(model, cache_dir, log=tmp_path / "second.log") as server:
        assert ask(server, question).cached_tokens == 0
    weights[-1001] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with tiered(model, cache_dir, log=tmp_path / "third.log") as server:
        assert ask(server, question).cached_tokens > 0


@pytest.mark.parametrize("flags", [["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]])
def test_18_another_scheme(tiny_llama, cache_dir, tmp_path, flags):
    question = document(LONG)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        ask(server, question)
        assert server.terminate() == 0
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "second.log") as server:
        cold = ask(server, question)
        assert cold.cached_tokens == 0
        warm = ask(server, question)
        assert warm.cached_tokens == cold.prompt_tokens - 1
        assert server.terminate() == 0
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "third.log") as server:
        restored = ask(server, question)
        assert restored.cached_tokens == cold.prompt_tokens - 1
    assert restored.tokens == warm.tokens == cold.tokens


def test_19_a_flipped_bit_is_a_miss_and_the_file_is_quarantined(tiny_llama, cache_dir, tmp_path):
    question = document(LONG)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        cold = ask(server, question)
        assert server.terminate() == 0
    files = [f for f in cache_dir.rglob("*.safetensors")]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[-len(content) // 3] ^= 4
        file.write_bytes(content)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        again = ask(server, question)
        stats = server.stats()
        log = server.log()
    assert again.cached_tokens == 0 and again.tokens == cold.tokens
    assert stats["ssd"]["quarantined"] >= 1
    assert log.count("quarantine") <= 3


@pytest.mark.parametrize("kill_after", [0.0, 0.05, 0.2])
def test_20_killed_while_saving(tiny_llama, cache_dir, tmp_path, kill_after):
    question = document(LONG)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log", env={"MLX_LM_TIERED_WRITEBEHIND": "0"}) as server:
        cold = ask(server, question)
        server.signal(signal.SIGTERM)
        time.sleep(kill_after)
        server.kill()
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        again = ask(server, question)
        assert again.cached_tokens in (0, cold.prompt_tokens - 1)
        assert again.tokens == cold.tokens
        assert server.terminate() == 0
    names = [path.name for path in cache_dir.rglob("*") if path.is_file()]
    assert not [name for name in names if "tmp" in name], names


def test_21_the_directory_deleted_while_running(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        first = ask(server, document(LONG))
        assert server.flush()[0] == 200
        shutil.rmtree(cache_dir)
        assert ask(server, document(LONG)).tokens == first.tokens
        assert ask(server, "another " * 50).finish_reason in ("length", "stop")
        until(lambda: server.flush()[0] == 200, 60, every=0.5)
        assert list(cache_dir.rglob("*.safetensors"))
        assert server.log().count("WARNING") <= 3


def test_21_a_directory_that_cannot_be_made(tiny_llama, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with tiered(tiny_llama, blocker / "cold", log=tmp_path / "log") as server:
        cold = ask(server, document(LONG))
        assert ask(server, document(LONG)).cached_tokens == cold.prompt_tokens - 1
        assert server.flush()[0] == 503
        assert len(re.findall(r"WARNING.*serving goes on", server.log())) == 1


def test_28_cached_tokens_were_not_forwarded(tiny_llama, cache_dir, tmp_path):
    """What usage reports as cached is what the prefill skipped."""
    totals = []
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        ask(server, document(LONG))
        longer = document(LONG) + " and then more of the same kind of text " * 10
        answer = server.chat(user(longer), max_tokens=4, progress=lambda done, total: totals.append(total))
    assert totals and 0 < answer.cached_tokens == answer.prompt_tokens - totals[-1]


def test_31_logs_are_bounded_and_a_miss_is_explained(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        for i in range(20):
            ask(server, f"number {i} " + document(300, start=10 * i))
        assert server.terminate() == 0
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        ask(server, "number 3 " + document(300, start=31))
        assert server.stats()["ssd"]["entries"] >= 20, "not scanned yet"
        assert server.log().count("\n") < 20
        line = [line for line in server.log().splitlines() if "diverge" in line]
    assert len(line) == 1 and re.search(r"token \d+", line[0])


def test_routes_are_for_this_machine_and_this_origin(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        assert server.request("GET", "/stats")[0] == 200
        assert server.request("GET", "/stats", headers={"Origin": "http://evil.example"})[0] == 403
        assert server.request("POST", "/admin/cache/flush", b"", headers={"Origin": "http://evil.example"})[0] == 403
        assert server.request("POST", "/stats", b"")[0] in (404, 405)
    with tiered(tiny_llama, cache_dir, "--admin-routes", "off", log=tmp_path / "log2") as server:
        assert server.request("GET", "/stats")[0] == 404


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--plugin", "tiered", "--ssd-cache-max", "1GB"], "does nothing without --ssd-cache"),
        (["--plugin", "tiered", "--ssd-cache", "kv", "--prompt-cache-bytes", "0"], "needs the RAM tier"),
        (["--plugin", "tiered", "--ssd-cache", "kv", "--ssd-cache-max", "plenty"], "is not a size"),
        (["--plugin", "turbo"], "tiered"),
    ],
)
def test_what_cannot_work_exits_2_with_one_sentence(tiny_llama, tmp_path, flags, says):
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "server", "--model", str(tiny_llama), "--port", "1", *flags],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not os.listdir(tmp_path)


def test_two_servers_share_a_directory(tiny_llama, cache_dir, tmp_path):
    """Fault 30's kind: neither deletes nor spoils what the other wrote, and each uses it while both run."""
    texts = {"a": document(LONG), "b": "b " + document(LONG)}
    flags = ["--ssd-restore", "always"]
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "a") as a, tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "b") as b:
        cold = {"a": ask(a, texts["a"]), "b": ask(b, texts["b"])}
        assert a.flush()[0] == b.flush()[0] == 200
        for server, text in ((b, "a"), (a, "b")):
            deadline = time.monotonic() + 30
            while not server.stats()["ssd"]["found_later"] and time.monotonic() < deadline:
                server.complete("hi", max_tokens=1)  # requests make it look, every few seconds
                time.sleep(0.1)
            answer = ask(server, texts[text])
            assert answer.cached_tokens == cold[text].prompt_tokens - 1 and answer.tokens == cold[text].tokens
            assert server.stats()["hits_by_tier"]["ssd"] == 1
        assert a.terminate() == 0
        # The one that goes on has lost nothing by it.
        assert b.request("POST", "/admin/drain", b"")[0] == 200
        assert ask(b, texts["b"]).cached_tokens == cold["b"].prompt_tokens - 1
        assert b.stats()["ssd"]["corrupt"] == 0
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "c") as c:
        for text in texts:
            assert ask(c, texts[text]).tokens == cold[text].tokens
        assert c.stats()["hits_by_tier"]["ssd"] == 2


def test_a_port_in_use_ends_as_on_stock(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "a") as a:
        b = Server(tiny_llama, tmp_path / "b", [*tiered_flags(cache_dir), "--port", str(a.port)], wait=False)
        try:
            until(lambda: "Address already in use" in b.log(), 60)
        finally:
            b.kill()
        assert ask(a, "hi").completion_tokens > 0
