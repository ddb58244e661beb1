"""The main job, against real server processes: what was computed once is not computed again."""

import signal
import socket
import threading
import time

import pytest

from support.models import ENDLESS, document
from support.server import RequestFailed, stock, tiered, user
from support.waiting import until

LONG = 3000  # characters: several hundred tokens, past the tiny models' window of 64


def ask(server, *texts, **options):
    return server.chat(user(*texts), tokens=True, max_tokens=12, **options)


# A seed sends upstream's server down its sequential path.
PATHS = {"batch": {}, "sequential": {"seed": 7}}
# The paths' questions begin with the same few tokens of the chat template.
APART = ("--prompt-cache-min-tokens", "64")


def test_the_same_prompt_is_cold_once(tiny_model, cache_dir, tmp_path):
    def answers(server):
        return [ask(server, f"{path}: {document(LONG)}", **options) for path, options in PATHS.items()]

    with stock(tiny_model, tmp_path / "stock.log") as server:
        stocks = answers(server)
    with tiered(tiny_model, cache_dir, *APART, log=tmp_path / "first.log") as server:
        colds, warms = answers(server), answers(server)
        assert server.terminate() == 0
    with tiered(tiny_model, cache_dir, *APART, log=tmp_path / "second.log") as server:
        restoreds = answers(server)
        stats = server.stats()
    for expected, cold, warm, restored in zip(stocks, colds, warms, restoreds, strict=True):
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == restored.cached_tokens == cold.prompt_tokens - 1
        assert expected.tokens == cold.tokens == warm.tokens == restored.tokens
    assert stats["hits_by_tier"] == {"ram": 0, "queue": 0, "ssd": 2, "shared": 0}
    assert stats["tokens_saved"] == sum(restored.cached_tokens for restored in restoreds)
    assert stats["faults"] == {}


def test_a_conversation_goes_on_after_a_restart(tiny_model, cache_dir, tmp_path):
    """Fault 9: recurrent layers too reuse the earlier turn."""
    more = "And what does the module return?"
    questions = {path: f"{path}: {document(LONG)}" for path in PATHS}
    first, same_process = {}, {}
    with tiered(tiny_model, cache_dir, log=tmp_path / "first.log") as server:
        for path, question in questions.items():
            first[path] = ask(server, question, **PATHS[path])
            same_process[path] = ask(server, question, first[path].text, more, **PATHS[path])
        assert server.terminate() == 0
    with tiered(tiny_model, cache_dir, log=tmp_path / "second.log") as server:
        for path, question in questions.items():
            least = first[path].prompt_tokens - 1
            assert same_process[path].cached_tokens >= least
            restored = ask(server, question, first[path].text, more, **PATHS[path])
            again = ask(server, question, first[path].text, more, **PATHS[path])
            assert restored.cached_tokens >= least
            assert restored.tokens == same_process[path].tokens == again.tokens
            assert again.cached_tokens == again.prompt_tokens - 1
        assert server.stats()["hits_by_tier"]["ssd"] >= len(PATHS)


def test_short_prompts_hit_too(tiny_llama, cache_dir, tmp_path):
    """Fault 27."""
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        cold = ask(server, "hi")
        assert server.terminate() == 0
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        assert ask(server, "hi").cached_tokens == cold.prompt_tokens - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_request_finish_and_saves(tiny_llama, cache_dir, tmp_path, number):
    """Fault 14."""
    question = document(LONG)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        answers = []
        running = threading.Thread(target=lambda: answers.append(server.chat(user(question), max_tokens=400, tokens=True, logit_bias=ENDLESS)))
        running.start()
        until(lambda: server.stats()["lookups"])
        server.signal(number)
        time.sleep(0.05)
        with pytest.raises((RequestFailed, OSError)):
            server.chat(user("too late"))
        running.join(60)
        assert server.process.wait(60) == 0
        assert answers and answers[0].completion_tokens == 400
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        assert ask(server, question).cached_tokens == answers[0].prompt_tokens - 1


def test_a_second_signal_exits_at_once(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        threading.Thread(target=lambda: pytest.raises((RequestFailed, OSError), server.chat, user("a"), max_tokens=10**6, logit_bias=ENDLESS), daemon=True).start()
        until(lambda: server.stats()["lookups"])
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.running
        server.signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM


def test_the_shutdown_timeout_holds(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, "--shutdown-timeout", "1", log=tmp_path / "log") as server:
        threading.Thread(target=lambda: pytest.raises((RequestFailed, OSError), server.chat, user("a"), max_tokens=10**6, logit_bias=ENDLESS), daemon=True).start()
        until(lambda: server.stats()["lookups"])
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.process.wait(15) == 1
        assert 0.9 < time.monotonic() - start < 10


def test_a_stalled_client_does_not_keep_the_stop_from_saving(tiny_llama, cache_dir, tmp_path):
    env = {"MLX_LM_TIERED_WRITEBEHIND": "0"}
    with tiered(tiny_llama, cache_dir, "--shutdown-timeout", "4", log=tmp_path / "log", env=env) as server:
        ask(server, document(LONG))
        with socket.create_connection((server.host, server.port)) as stalled:
            stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
            server.healthy()
            assert server.terminate(15) == 1
    assert list(cache_dir.rglob("*.safetensors"))


def test_flush_means_durable(tiny_llama, cache_dir, tmp_path):
    """200 only when a SIGKILL right after it loses nothing; a look at the evidence."""
    question = document(LONG)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        cold = ask(server, question)
        status, report = server.flush()
        server.kill()
    assert status == 200 and report["durable"]
    assert report["pending"] == report["dropped"] == report["failed"] == 0
    assert report["longest_durable_prefix_tokens"] >= cold.prompt_tokens
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        assert ask(server, question).cached_tokens == cold.prompt_tokens - 1


def test_without_time_what_is_saved_already_counts(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, "--shutdown-timeout", "0", log=tmp_path / "log", env={"MLX_LM_TIERED_WRITEBEHIND": "0"}) as server:
        ask(server, document(LONG))
        assert server.request("POST", "/admin/cache/flush?timeout=0")[0] == 503
        assert server.flush()[0] == 200
        assert server.request("POST", "/admin/cache/flush?timeout=0")[0] == 200
        assert server.terminate() == 0


def test_flush_without_an_ssd_tier_promises_nothing(tiny_llama, tmp_path):
    with tiered(tiny_llama, None, log=tmp_path / "log") as server:
        ask(server, "hi")
        status, report = server.flush()
    assert status == 503 and not report["durable"]


def test_without_writebehind_a_flush_still_saves(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log", env={"MLX_LM_TIERED_WRITEBEHIND": "0"}) as server:
        ask(server, document(LONG))
        time.sleep(2)
        assert server.stats()["ssd"]["entries"] == 0
        status, report = server.flush()
        assert status == 200 and report["entries"] >= 1


def test_writebehind_needs_no_flush(tiny_llama, cache_dir, tmp_path):
    question = document(LONG)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        cold = ask(server, question)
        until(lambda: server.stats()["ssd"]["entries"])
        server.kill()
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        assert ask(server, question).cached_tokens == cold.prompt_tokens - 1


def test_eviction_from_ram_spills(tiny_llama, cache_dir, tmp_path):
    """Fault 23's kind: what leaves RAM unwritten is written, and comes back from there."""
    questions = [f"{i} " + document(LONG, start=300 * i) for i in range(6)]
    flags = ["--prompt-cache-bytes", "3MB", "--no-writebehind"]
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "log") as server:
        first = [ask(server, q) for q in questions]
        assert server.flush()[0] == 200
        second = [ask(server, q) for q in questions]
        stats = server.stats()
    assert stats["spills"] >= 1 and stats["ram"]["bytes"] <= 3 * 10**6
    assert [a.cached_tokens for a in second] == [a.prompt_tokens - 1 for a in first]
    assert [a.tokens for a in second] == [a.tokens for a in first]


def test_a_flush_right_after_the_first_answer_waits_for_the_fingerprint(real_model, cache_dir, tmp_path):
    """Half a gigabyte of weights is still being hashed then."""
    with tiered(real_model, cache_dir, log=tmp_path / "log") as server:
        server.chat(user("hi"), max_tokens=1)
        status, report = server.flush()
    assert status == 200 and report["entries"] >= 1
