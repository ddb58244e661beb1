"""Speculation in real servers: the same answers as without, to the next turn from RAM and from the disk, and beside other requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.models import TINY, document
from support.server import RequestFailed, stock, tiered

TEXT = document(700)
PROMPT = TEXT + TEXT[:200]  # so that what follows was there before
STOPS = (1, 6, 7)
PAGED = ("--paged-kv", "--paged-kv-block-size", "16", "--paged-kv-pool", "16MB")


PATHS = {"batch": {}, "single": {"seed": 7, "temperature": 0.1}}  # a seed has mlx-lm serve a request outside its batch


def ask(server, prompt: str, count: int, **options):
    """Text, tokens and reason of an answer; streamed ones have no tokens."""
    answer = server.complete(prompt, max_tokens=count, tokens=not options.get("stream"), **options)
    return answer.text, answer.tokens, answer.completion_tokens, answer.finish_reason


def turns(server, options: dict) -> list:
    """For each place to stop at an answer and the next turn's; one that is streamed, and one with a stop word."""
    firsts = [ask(server, f"{count} {PROMPT}", count, **options) for count in STOPS]
    seconds = [ask(server, f"{count} {PROMPT}{first[0]} and so", 8, **options) for count, first in zip(STOPS, firsts, strict=True)]
    return [*firsts, *seconds, ask(server, PROMPT, 40, stream=True, **options), ask(server, PROMPT, 40, stop=["\n"], **options)]


@pytest.mark.parametrize(("family", "path"), [("gemma4_text", "batch"), ("lfm2", "single")])  # the rest in tests/speculation
def test_turns_from_ram_and_disk_are_those_of_plain_decoding(family, path, cache_dir, tmp_path):
    model, speculating, options = TINY[family], ("--speculation", "ngram", "--num-draft-tokens", "4"), PATHS[path]
    with tiered(model, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = turns(server, options)
        assert "speculation" not in server.complete(PROMPT, max_tokens=4).usage
    with tiered(model, cache_dir, *speculating, log=tmp_path / "first.log") as server:
        assert turns(server, options) == expected and "stop" in {answer[3] for answer in expected}
        warm = server.stats()
        assert server.terminate() == 0
    with tiered(model, cache_dir, *speculating, log=tmp_path / "second.log") as server:
        assert turns(server, options) == expected
        restored = server.stats()
    assert warm["hits_by_tier"]["ram"] >= len(STOPS) and restored["hits_by_tier"]["ssd"] >= len(STOPS)
    for stats in (warm, restored):
        found = stats["speculation"]
        assert stats["faults"] == {} and found["source"] == "ngram" and found["draft_tokens"] == 4 and found["refused"] is None
        assert 0 < found["accepted"] <= found["drafted"] and found["target_calls"] > 0
        assert len(found["acceptance_by_position"]) <= 4 and all(0 <= rate <= 1 for rate in found["acceptance_by_position"])
        assert stats["keys_shortened"] == 0


def test_requests_at_once_answer_as_each_alone_and_usage_says_what_was_drafted(tiny_gemma4, tmp_path):
    prompts = [f"{number} {PROMPT}" for number in range(3)]
    with tiered(tiny_gemma4, None, "--speculation", "ngram", log=tmp_path / "log") as server:
        alone = [ask(server, prompt, 40) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: ask(server, prompt, 40), prompts))
        before = server.stats()["speculation"]
        answers = [server.complete(PROMPT, max_tokens=40, stream=stream, **options) for options in PATHS.values() for stream in (True, False)]
        stats = server.stats()
    assert together == alone and stats["faults"] == {}
    told = [answer.usage["speculation"] for answer in answers]
    assert told[0] == told[1] and told[2] == told[3] and 0 < told[0]["accepted_tokens"] <= told[0]["drafted_tokens"]
    for name, counted in (("accepted_tokens", "accepted"), ("drafted_tokens", "drafted"), ("target_calls", "target_calls")):
        assert sum(one[name] for one in told) == stats["speculation"][counted] - before[counted]


def test_auto_measures_and_answers_the_same(tiny_llama, tmp_path):
    with tiered(tiny_llama, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = [ask(server, PROMPT, 60, **options) for options in PATHS.values()]
    with tiered(tiny_llama, None, "--speculation", "ngram", "--num-draft-tokens", "auto", log=tmp_path / "auto.log") as server:
        assert [ask(server, PROMPT, 60, **options) for options in PATHS.values()] == expected
        stats = server.stats()
    found = stats["speculation"]
    assert stats["faults"] == {} and found["draft_tokens"] == "auto" and found["requests"] == 2
    assert found["auto"]["step_seconds"] > 0 and found["target_calls"] > 0


def test_strictly_nothing_is_taken_back(tiny_lfm2, tmp_path):
    """Recurrent state, whose accepted tokens are forwarded once more otherwise."""
    with tiered(tiny_lfm2, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = [ask(server, PROMPT, 60, **options) for options in PATHS.values()]
    with tiered(tiny_lfm2, None, "--speculation", "ngram", "--spec-strict", log=tmp_path / "strict.log") as server:
        assert [ask(server, PROMPT, 60, **options) for options in PATHS.values()] == expected
        stats = server.stats()
    found = stats["speculation"]
    assert stats["faults"] == {} and found["strict"] and found["replays"] == 0 < found["accepted"] < found["target_calls"]


def test_who_decides_sampled_tokens(tiny_llama, tmp_path):
    """Rejection where a request draws its tokens and chose no random numbers."""
    sampled = {"temperature": 0.3, "top_p": 0.95}
    with tiered(tiny_llama, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = [ask(server, PROMPT, 40, **options) for options in PATHS.values()]
    with tiered(tiny_llama, None, "--speculation", "ngram", "--spec-sampling", "rejection", log=tmp_path / "log") as server:
        assert [ask(server, PROMPT, 40, **options) for options in PATHS.values()] == expected
        before = server.stats()["speculation"]
        answers = [ask(server, PROMPT, 40, **sampled) for _ in range(3)]
        stats = server.stats()
    found = stats["speculation"]
    assert before["rejection_requests"] == 0 and found["rejection_requests"] == 3 and found["sampling"] == "rejection"
    assert stats["faults"] == {} and found["accepted"] > before["accepted"] and {len(answer[1]) for answer in answers} <= set(range(1, 41))


@pytest.mark.parametrize("paging", [(), PAGED], ids=["plain", "paged"])
def test_2_and_3_turns_with_a_draft_model_are_those_of_plain_decoding(paging, tiny_gemma4, tiny_llama, cache_dir, tmp_path):
    """Its own caches come from RAM and, after a restart, from the disk, as the requests' do; they are never in blocks."""
    drafting = ("--draft-model", str(tiny_llama), "--ssd-restore", "always", *paging)
    with tiered(tiny_gemma4, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = turns(server, {})
    reused = []
    for start in ("first", "second"):
        with tiered(tiny_gemma4, cache_dir, *drafting, log=tmp_path / f"{start}.log") as server:
            assert turns(server, {}) == expected
            stats = server.stats()
            if paging:
                assert stats["paged"]["blocks_used"] > 0 == stats["paged"]["blocks_reserved"] and stats["ram"]["bytes"] > stats["paged"]["blocks_used"] * stats["paged"]["block_bytes"]
                server.request("POST", "/admin/drain")
                assert server.stats()["paged"]["blocks_used"] == 0
            assert server.terminate() == 0
        found = stats["speculation"]
        assert stats["faults"] == {} and stats["keys_shortened"] == 0
        assert found["source"] == "draft" and found["draft_tokens"] == 3 and found["refused"] is None and found["accepted"] > 0
        reused.append((stats["hits_by_tier"], found["draft_model"]))
    (warm, first), (restored, second) = reused
    assert warm["ram"] >= len(STOPS) and restored["ssd"] >= len(STOPS)
    assert first["reused_tokens"] > len(STOPS) * 150 and second["reused_tokens"] > 1.5 * first["reused_tokens"] and second["computed_tokens"] < first["computed_tokens"] / 2


def test_a_draft_model_leaves_requests_in_their_batch(tiny_gemma4, tiny_llama, tmp_path):
    prompts = [f"{number} {PROMPT}" for number in range(8)]
    with tiered(tiny_gemma4, None, "--draft-model", str(tiny_llama), log=tmp_path / "log") as server:
        alone = [ask(server, prompt, 40) for prompt in prompts]
        before = server.stats()["speculation"]["target_calls"]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: ask(server, prompt, 40), prompts))
        stats = server.stats()
    assert together == alone and stats["faults"] == {}
    # One at a time each would verify drafts as before.
    assert before > 100 and stats["speculation"]["target_calls"] - before < before / 2


def test_16_penalties_see_the_whole_history_with_a_draft_model(tiny_llama, tmp_path):
    """mlx-lm by itself shows logits processors the last token of the prompt and what is behind it: with penalties for what was said its draft model changes the answer."""
    penalties = {"repetition_penalty": 1.3, "repetition_context_size": 60}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    flags = ("--draft-model", str(tiny_llama))

    def answers(server) -> list:
        return [ask(server, PROMPT, 40, **penalty, **options)[0] for penalty in penalties for options in PATHS.values()]

    with tiered(tiny_llama, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = answers(server)
    with tiered(tiny_llama, None, *flags, "--prompt-cache-bytes", "0", log=tmp_path / "log") as server:
        assert answers(server) == expected
        stats = server.stats()
    assert stats["faults"] == {} and stats["speculation"]["requests"] == 4 and stats["speculation"]["accepted"] > 40
    with stock(tiny_llama, tmp_path / "stock.log", *flags) as server:
        text = server.complete(PROMPT, max_tokens=40, **penalties[0]).text
    assert text != expected[0], "mlx-lm has no such fault any more"


def test_a_draft_model_with_other_tokens_is_named_and_the_requests_are_plain(tiny_gemma4, tiny_llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    data = json.loads((other / "tokenizer.json").read_text())
    words = data["model"]["vocab"]
    data["model"]["vocab"] = {word: (number + 1) % len(words) for word, number in words.items()}
    (other / "tokenizer.json").write_text(json.dumps(data))
    with tiered(tiny_gemma4, None, "--prompt-cache-bytes", "0", log=tmp_path / "plain.log") as server:
        expected = [ask(server, PROMPT, 12, **options) for options in PATHS.values()]
    with tiered(tiny_gemma4, None, "--draft-model", str(other), "--prompt-cache-bytes", "0", log=tmp_path / "log") as server:
        assert [ask(server, PROMPT, 12, **options) for options in PATHS.values()] == expected
        stats, log = server.stats(), server.log()
    refused = stats["speculation"]["refused"]
    assert re.fullmatch(r"token \d+ is '[^\n]+' to the draft model and '[^\n]+' to the model", refused), refused
    assert log.count(refused) == 1 and stats["speculation"]["requests"] == 0 and stats["faults"] == {}


@pytest.mark.parametrize(("flags", "says"), [
    (("--draft-model", "/no/such/model"), "--draft-model /no/such/model: there is no such directory"),
    (("--speculation", "ngram", "--spec-trace", "/no/such/trace"), "--spec-trace /no/such/trace cannot be written: No such file or directory"),
])
def test_what_is_not_there_ends_the_start(tiny_llama, flags, says):
    command = [sys.executable, "-m", "mlx_lm.server", "--plugin", "tiered", "--model", str(tiny_llama), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and [line for line in done.stderr.splitlines() if "error:" in line and says in line] == done.stderr.splitlines()[-1:]


def test_speculation_off_leaves_a_draft_model_to_mlx_lm(tiny_llama, tmp_path):
    """Its caches are beside the model's; with paged KV these are in blocks and those are not."""
    found = []
    for paging in (), PAGED:
        with tiered(tiny_llama, None, "--speculation", "off", "--draft-model", str(tiny_llama), *paging, log=tmp_path / "log") as server:
            answers = [server.complete(PROMPT, max_tokens=24, tokens=True) for _ in range(2)]
            stats = server.stats()
        assert "speculation" not in answers[0].usage and stats["speculation"] is None and len(answers[0].text) > 8
        assert answers[1].cached_tokens > 0 and stats["faults"] == {}
        found.append((answers[0].tokens, answers[1].tokens))
    assert found[0] == found[1]
    own = stats["ram"]["bytes"] - stats["paged"]["blocks_used"] * stats["paged"]["block_bytes"]
    assert stats["paged"]["blocks_used"] > 0 == stats["paged"]["blocks_reserved"] and own > 0


def test_a_request_may_say_how_many_drafts_it_wants_and_the_trace_shows_them(tiny_llama, tmp_path):
    file = tmp_path / "trace.jsonl"
    flags = ["--speculation", "ngram", "--num-draft-tokens", "4", "--spec-trace", str(file), "--prompt-cache-bytes", "0"]
    numbers = (None, 0, 2, 100, "auto")
    with tiered(tiny_llama, None, *flags, log=tmp_path / "log") as server:
        found = {}
        for path, options in PATHS.items():
            for number in numbers:
                asked = {} if number is None else {"num_draft_tokens": number}
                answer = server.complete(PROMPT, max_tokens=60, tokens=True, **options, **asked)
                found[path, number] = answer.tokens, answer.usage.get("speculation")
        assert server.stats()["speculation"]["auto"] is not None
        for number in ("some", -1):
            with pytest.raises(RequestFailed, match="num_draft_tokens"):
                ask(server, PROMPT, 4, num_draft_tokens=number)
        log = server.log()
        stats = server.stats()["speculation"]
    rounds = [json.loads(line) for line in file.read_text().splitlines()]
    request = 0
    for path in PATHS:
        assert len({tuple(found[path, number][0]) for number in numbers}) == 1
        for number in numbers:
            told = found[path, number][1]
            if number == 0:
                assert told is None
                continue
            request += 1
            drafts = [len(line["drafted"]) for line in rounds if line["request"] == request]
            assert sum(drafts) == told["drafted_tokens"] and len(drafts) == told["target_calls"]
            if number != "auto":
                assert max(drafts) == {None: 4, 2: 2}.get(number, max(drafts)) and (number != 100 or 4 < max(drafts) <= 64)
    assert request == stats["requests"] and file.stat().st_mode & 0o777 == 0o600
    assert log.count("of them right") == len({line["request"] for line in rounds})
