"""A server held to a memory budget: stored prefixes make room, what cannot fit is refused, and everything else goes on."""

from __future__ import annotations

import json
import threading
import time

from support.models import ENDLESS, document
from support.server import stock, tiered, user

# tiny-llama: weights of 2.9 MB, 1,536 bytes per token. A CPU keeps a chunk's attention scores, so chunks are short here.
STEP = ("--prefill-step-size", "64")
PATHS = {"batch": {}, "sequential": {"seed": 7}}


def guarded(model, directory, budget, tmp_path):
    return tiered(model, directory, "--memory-budget", budget, *STEP, log=tmp_path / "log")


def ask(server, text, **options):
    return server.chat(user(text), tokens=True, max_tokens=8, **options)


def post(server, text, **options):
    body = {"messages": user(text), "max_tokens": 8, "temperature": 0.0, **options}
    return server.request("POST", "/v1/chat/completions", body)


def begin(server, answers, text, tokens):
    """A long answer in a thread of its own, under way when this returns."""
    thread = threading.Thread(target=lambda: answers.append(server.chat(user(text), max_tokens=tokens, logit_bias=ENDLESS)))
    thread.start()
    deadline = time.monotonic() + 60
    while "progress" not in server.log() and time.monotonic() < deadline:
        time.sleep(0.02)
    return thread


def test_stored_prefixes_make_room_and_come_back(tiny_llama, cache_dir, tmp_path):
    with guarded(tiny_llama, cache_dir, "6.5MB", tmp_path) as server:
        for path, how in PATHS.items():
            before = server.stats()
            texts = [f"{path} {i} {document(2000, start=300 * i)}" for i in range(4)]
            first = [ask(server, text, **how) for text in texts]
            stats = server.stats()
            memory = stats["memory"]
            assert memory["relieved_entries"] >= before["memory"]["relieved_entries"] + 2
            assert memory["live"] <= memory["budget"] == 6_500_000
            for text, before_it in zip(texts, first, strict=True):
                again = ask(server, text, **how)
                assert again.tokens == before_it.tokens and again.cached_tokens == again.prompt_tokens - 1
            assert server.stats()["hits_by_tier"]["ssd"] > before["hits_by_tier"]["ssd"]
        assert memory["relieved_unsaved"] == memory["refused_400"] == memory["refused_503"] == 0 and stats["faults"] == {}


def test_a_disk_that_takes_nothing_is_no_reason_to_refuse(tiny_llama, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with guarded(tiny_llama, blocker / "cold", "8MB", tmp_path) as server:
        for i in range(4):
            ask(server, f"{i} {document(2000, start=300 * i)}")
        memory = server.stats()["memory"]
        assert memory["relieved_unsaved"] >= 1 and memory["refused_503"] == 0
        assert server.flush()[0] == 503  # what was given up is not called durable


def test_a_prompt_that_can_never_fit_is_refused_for_good(tiny_llama, cache_dir, tmp_path):
    with guarded(tiny_llama, cache_dir, "6MB", tmp_path) as server:
        for how in PATHS.values():
            before = ask(server, "hello", **how)
            for stream in (False, True):
                status, body = post(server, document(12000), stream=stream, **how)
                assert status == 400
                assert "of 6 MB (--memory-budget)" in json.loads(body)["error"]
            assert ask(server, "hello", **how).tokens == before.tokens
        memory = server.stats()["memory"]
        assert server.healthy() and memory["refused_400"] == 4 and memory["refused_503"] == 0


def test_a_prompt_that_does_not_fit_beside_another_is_told_to_come_again(tiny_llama, cache_dir, tmp_path):
    with guarded(tiny_llama, cache_dir, "6.3MB", tmp_path) as server:
        beside, answers = document(3800), []
        running = begin(server, answers, document(1800), 400)
        connection, response = server._send("POST", "/v1/chat/completions", {"messages": user(beside), "max_tokens": 4, "stream": True})
        status, again, error = response.status, response.headers["Retry-After"], json.loads(response.read())["error"]
        connection.close()
        running.join()
        assert status == 503 and int(again) > 0 and "of the memory budget of 6.3 MB are in use" in error
        assert answers[0].completion_tokens == 400
        assert server.chat(user(beside), max_tokens=4).completion_tokens == 4


def test_a_reply_that_outgrows_the_budget_ends_and_its_prefix_is_kept(tiny_llama, cache_dir, tmp_path):
    with guarded(tiny_llama, cache_dir, "4.6MB", tmp_path) as server, stock(tiny_llama, tmp_path / "stock", *STEP) as plain:
        for number, how in enumerate(PATHS.values()):
            for stream in (False, True):
                text = f"{number} {stream} {document(2000)}"
                status, body = post(server, text, max_tokens=4000, logit_bias=ENDLESS, stream=stream, **how)
                if stream:
                    error = json.loads(body.strip().rpartition(b"data: ")[2])["error"]
                    assert status == 200 and b"[DONE]" not in body and error["code"] == 503
                    assert "out of memory after" in error["message"]
                else:
                    assert status == 503 and "out of memory after" in json.loads(body)["error"]
            again = ask(server, text, **how)
            assert again.cached_tokens == again.prompt_tokens - 1
            assert again.tokens == ask(plain, text, **how).tokens
        assert server.stats()["memory"]["ended"] == 4


def test_the_newest_row_ends_and_the_older_goes_on(tiny_llama, cache_dir, tmp_path):
    with guarded(tiny_llama, cache_dir, "5MB", tmp_path) as server:
        answers = []
        older = begin(server, answers, "one", 700)
        status, body = post(server, "two", max_tokens=2000, logit_bias=ENDLESS)
        older.join()
        assert status == 503 and "out of memory after" in json.loads(body)["error"]
        assert answers[0].completion_tokens == 700 and answers[0].finish_reason == "length"


def test_a_model_over_the_budget_is_an_answer_not_a_crash(tiny_llama, tmp_path):
    with guarded(tiny_llama, None, "1MB", tmp_path) as server:
        for how in PATHS.values():
            status, body = post(server, "hello", **how)
            assert status == 503 and "takes 2.89 MB, more than the memory budget of 1 MB" in json.loads(body)["error"]
        assert server.healthy()
        assert "the model takes 2.89 MB, more than the memory budget of 1 MB" in server.log().partition("POST")[0]
