"""A long conversation against real servers: little is written, and a restart goes on as if nothing had happened."""

from __future__ import annotations

import shutil
import signal

from support.models import document
from support.server import stock, tiered, user

from mlx_lm_tiered.bench.writes import stored

TURNS = 20


def questions(turns):
    return [document(160, start=200 * i) + f" What is part {i}?" for i in range(turns)]


def talk(server, texts, turns, **options):
    """Go on with a conversation; returns it, and the last answer."""
    answer = None
    for question in questions(TURNS + 1)[len(texts) // 2 : turns]:
        texts = [*texts, question]
        answer = server.chat(user(*texts), max_tokens=10, tokens=True, **options)
        texts = [*texts, answer.text]
    return texts, answer


def one_copy(directory):
    """Bytes of the longest entry's tokens."""
    tokens, size = stored(directory)
    return tokens * size


def test_after_twenty_turns_and_a_restart_the_answer_is_upstreams(tiny_model, cache_dir, tmp_path):
    with tiered(tiny_model, cache_dir, log=tmp_path / "first.log") as server:
        texts = []
        for turn in range(1, TURNS + 1):
            texts, _ = talk(server, texts, turn)
            assert server.flush()[0] == 200
        before = server.stats()
        copy = shutil.copytree(cache_dir, tmp_path / "copy")
        _, expected = talk(server, texts, TURNS + 1)
        server.kill()
    ssd = before["ssd"]
    assert before["faults"] == {} and ssd["segments"] >= TURNS - 1 and ssd["longest_chain"] >= TURNS
    assert ssd["new_token_bytes"] < 1.5 * one_copy(copy)
    with tiered(tiny_model, copy, log=tmp_path / "second.log") as server:
        _, restored = talk(server, texts, TURNS + 1)
        stats = server.stats()
    with stock(tiny_model, tmp_path / "stock.log") as server:
        said, _ = talk(server, [], TURNS)
        assert said == texts
        _, upstream = talk(server, said, TURNS + 1)
    assert restored.tokens == expected.tokens == upstream.tokens
    assert restored.cached_tokens == expected.cached_tokens > restored.prompt_tokens * 0.8
    assert stats["hits_by_tier"]["ssd"] == 1 and stats["faults"] == {}
    assert stats["ssd"]["corrupt"] == stats["ssd"]["gone"] == 0


def test_each_turn_goes_on_after_a_kill(tiny_llama, cache_dir, tmp_path):
    """A chain whose every segment was written by another process, each killed after its flush."""
    texts = []
    for turn in range(1, 7):
        with tiered(tiny_llama, cache_dir, log=tmp_path / f"{turn}.log") as server:
            texts, answer = talk(server, texts, turn)
            assert server.flush()[0] == 200
            ssd = server.stats()["ssd"]
            server.signal(signal.SIGKILL)
    assert answer.cached_tokens > answer.prompt_tokens * 0.6
    assert ssd["longest_chain"] == 6 and ssd["not_identical"] == 0
