"""Generations go on after a kill: real servers, SIGKILLed while they answer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from mlx_lm_tiered.cold import listing
from support.models import ENDLESS, TINY
from support.server import Answer, RequestFailed, Server, tiered, user

CHAT = "/v1/chat/completions"
EVERY = "8"
PAGED = ["--paged-kv", "--paged-kv-block-size", "16", "--paged-kv-pool", "16MB"]
TOKENS = 900
PROMPT = user("Tell me about lists.")

# What differs is which state must come back: a batch of two rows, caches that cannot be cut, a sequential generation. More of
# them, and going on from every token, in tests/seams/test_seam_checkpoints.py.
CASES = {
    "llama, two rows": ("llama", {}, {"messages": user("What is a tuple?"), "repetition_penalty": 1.2, "repetition_context_size": 40}),
    "lfm2": ("lfm2", {}),
    "lfm2, speculating": ("lfm2", {}),
    "lfm2, drafted for": ("lfm2", {}),
    "llama, two rows, paged": ("llama", {}, {"messages": user("What is a tuple?"), "repetition_penalty": 1.2, "repetition_context_size": 40}),
    "gemma4_text, drafted for, paged, quantized": ("gemma4_text", {}),
    "llama, single": ("llama", {"seed": 7, "temperature": 0.8, "repetition_penalty": 1.3, "repetition_context_size": 40}),
}


def body(**options):
    return {"messages": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "logit_bias": ENDLESS} | options


def answers(server: Server, *requests: dict) -> list[Answer]:
    """The answers to requests that are made at once."""

    def ask(request: dict) -> Answer:
        return server.chat(request["messages"], **{name: value for name, value in request.items() if name != "messages"})

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def checkpoints(server: Server) -> dict:
    return server.stats()["checkpoints"]


def interrupted(server: Server, root: Path, *requests: dict) -> None:
    """Have the requests answered, and kill the server once each has a checkpoint on disk, long before their ends."""

    def read(request: dict) -> None:
        with suppress(RequestFailed, OSError, HTTPException):  # the server is killed under it
            for _ in server.stream(CHAT, request):
                pass

    threads = [threading.Thread(target=read, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(kept(root)) < len(requests) and time.monotonic() < deadline:
        time.sleep(0.005)
    seen = checkpoints(server)
    server.kill()
    for thread in threads:
        thread.join()
    assert seen["failed"] == 0 and seen["running"] == len(requests), "not killed while all were being answered"


def kept(root: Path) -> set[str]:
    """The requests that have a checkpoint on disk."""
    with suppress(FileNotFoundError):
        return {found.meta.namespace for found in listing.entries(root) if found.meta is not None and found.meta.companion is not None}
    return set()


@pytest.mark.parametrize("case", CASES)
def test_a_killed_generation_goes_on(case, cache_dir, tmp_path):
    family, *options = CASES[case]
    requests = [body(**one) for one in options]
    drafts = {"speculating": ["--speculation", "ngram"], "drafted for": ["--draft-model", str(TINY["llama"])]}
    drafting = [flag for name, given in drafts.items() if name in case for flag in given]
    flags = ["--generation-checkpoint", EVERY, *drafting, *(PAGED if "paged" in case else []), *(["--kv-scheme", "affine:8:32"] if "quantized" in case else [])]
    server = tiered(TINY[family], cache_dir, *flags, log=tmp_path / "log")
    interrupted(server, cache_dir, *requests)
    if case == "llama, two rows, paged":
        # Where there will never be room for it, its checkpoint stays.
        with tiered(TINY[family], cache_dir, *flags[:-1], "30kB", log=tmp_path / "log") as server:
            with pytest.raises(RequestFailed, match="more than the .* of the pool"):
                answers(server, requests[0])
            assert checkpoints(server)["skipped"] == {"no-blocks": 1} and server.stats()["paged"]["blocks_used"] == 0
    with tiered(TINY[family], cache_dir, *flags, log=tmp_path / "log") as server:
        got = answers(server, *requests)
        seen = server.stats()
        want = answers(server, *requests)  # the checkpoints are void: from the beginning
        assert checkpoints(server)["resumed"] == len(requests)
        if "paged" in case:
            # What was restored went on in blocks, and leaves those of the stored answer.
            assert seen["paged"]["blocks_used"] * 16 >= TOKENS and seen["paged"]["blocks_reserved"] == seen["paged"]["refused_503"] == 0
    if "seed" in requests[0]:
        # Upstream's sequential path shows logits processors only what of the prompt was not reused, so reuse changes the answer.
        with tiered(TINY[family], None, log=tmp_path / "log") as server:
            want = answers(server, *requests)
    assert seen["checkpoints"]["resumed"] == len(requests) and seen["checkpoints"]["resumed_tokens"] >= int(EVERY) * len(requests)
    assert seen["faults"] == {}
    if drafting:
        # A draft model's caches hold nothing of it after the kill: they catch up with what was generated before.
        assert seen["speculation"]["accepted"] > 0 and seen["speculation"]["drafted"] < TOKENS * 4
    if seen["speculation"] and seen["speculation"]["draft_model"]:
        assert seen["speculation"]["draft_model"]["computed_tokens"] >= TOKENS / 2
    assert [one.text for one in got] == [one.text for one in want] and all(len(one.text) > TOKENS for one in got)
    assert {one.usage["completion_tokens"] for one in got + want} == {TOKENS}
    assert {one.finish_reason for one in got + want} == {"length"}


def test_another_request_begins_anew_and_the_damaged_checkpoint_too(tiny_llama, cache_dir, tmp_path):
    server = tiered(tiny_llama, cache_dir, "--generation-checkpoint", EVERY, log=tmp_path / "log")
    interrupted(server, cache_dir, body())
    with tiered(tiny_llama, cache_dir, "--generation-checkpoint", EVERY, log=tmp_path / "log") as server:
        (changed,) = answers(server, body(top_p=0.5))
        assert checkpoints(server)["resumed"] == 0
        # Damaged after it was indexed; of every file of the chain the last byte.
        for found in listing.entries(cache_dir):
            if found.meta is not None and found.meta.namespace in kept(cache_dir):
                # Those of the changed request, which was answered, are being removed meanwhile.
                with suppress(FileNotFoundError), open(found.path, "r+b") as file:
                    file.truncate(found.nbytes - 1)
        (got,) = answers(server, body())
        seen = server.stats()
    assert seen["checkpoints"]["resumed"] == 0 and seen["ssd"]["corrupt"] >= 1
    assert got.text == changed.text and got.usage["completion_tokens"] == TOKENS


def test_a_client_that_goes_leaves_its_checkpoint_and_completion_removes_it(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, "--generation-checkpoint", EVERY, log=tmp_path / "log") as server:
        stream = server.stream(CHAT, body(max_tokens=3000))
        for _ in range(40):
            next(stream)
        stream.close()
        deadline = time.monotonic() + 30
        while checkpoints(server)["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        status, report = server.flush()
        assert status == 200 and report["pending"] == 0
        assert checkpoints(server)["written"] >= 1 and checkpoints(server)["removed"] == 0
        assert len(kept(cache_dir)) == 1
        # Another max_tokens is another request.
        answers(server, body())
        assert checkpoints(server)["resumed"] == 0
        answers(server, body(max_tokens=3000))
        assert server.flush()[0] == 200
        seen = checkpoints(server)
        assert seen["resumed"] == 1 and seen["removed"] == 2 and seen["pending"] == 0 and not kept(cache_dir)
        answers(server, body(max_tokens=20, logprobs=True, stream=False))
        assert checkpoints(server)["skipped"] == {"logprobs": 1}
