"""Fault 25's kind: restoring must not take longer than computing. A real server over a disk made slow."""

from __future__ import annotations

import json

from support.models import document
from support.server import tiered, user

# Every read of a tensor takes so long; an entry of the tiny model has six.
SLOW = """
import os, time
def slow_preadv(*arguments, real=os.preadv):
    time.sleep(0.4)
    return real(*arguments)
os.preadv = slow_preadv
"""


def ask(server, number):
    return server.chat(user(f"{number} " + document(3000, start=300 * number)), tokens=True, max_tokens=6)


def test_25_what_is_faster_is_done_and_the_tokens_are_the_same(tiny_llama, cache_dir, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    with tiered(tiny_llama, cache_dir, "--no-writebehind", log=tmp_path / "fill") as server:
        cold = [ask(server, number) for number in range(6)]
        assert server.terminate() == 0
    auto = ["--ssd-restore", "auto"]
    with tiered(tiny_llama, cache_dir, *auto, log=tmp_path / "fast") as server:
        fast = [ask(server, number) for number in (0, 1)]
        stats = server.stats()["ssd"]
        [rates] = stats["rates"].values()
        assert stats["decisions"] | {"last": 0} == {"restored": 2, "partly": 0, "recomputed": 0, "last": 0}, stats
        last = stats["decisions"]["last"]
        assert 0 < last["restore_ms"] < last["compute_ms"] and last["tokens"] == last["offered_tokens"] == fast[1].cached_tokens
        assert rates["prefill_tokens_per_s"] > 0 and rates["restore_bytes_per_s"] > 0 and rates["restores"] >= 1
        assert "ms expected with a restore" in server.log()
        server.terminate()
    with tiered(tiny_llama, cache_dir, *auto, log=tmp_path / "slow.log", env={"PYTHONPATH": str(tmp_path / "slow")}) as server:
        # It takes two to believe it.
        slow = [ask(server, number) for number in (2, 3, 4)]
        decisions = server.stats()["ssd"]["decisions"]
        assert decisions["restored"] == 2 and decisions["recomputed"] == 1, decisions
        assert decisions["last"]["restore_ms"] > decisions["last"]["compute_ms"] > 0 == decisions["last"]["tokens"]
        assert "recomputed" in server.log()
        server.terminate()
    flags = ["--ssd-restore", "always"]
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "always", env={"PYTHONPATH": str(tmp_path / "slow")}) as server:
        always = ask(server, 5)
    assert [answer.cached_tokens > 1000 // 4 for answer in [*fast, *slow, always]] == [True, True, True, True, False, True]
    assert [answer.tokens for answer in [*fast, *slow, always]] == [answer.tokens for answer in cold]
    assert json.loads((cache_dir / "rates.json").read_text())["models"]


def test_never_writes_and_does_not_restore(tiny_llama, cache_dir, tmp_path):
    flags = ["--ssd-restore", "never", "--ssd-demote-idle", "0.1"]
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "first") as server:
        cold = ask(server, 0)
        assert server.flush()[0] == 200 and server.stats()["ssd"]["stored"] == 1
        # What cannot come back stays in RAM.
        assert ask(server, 0).cached_tokens > 0 and server.stats()["demotions"] == 0
        assert "written only" in server.log()
        server.terminate()
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "second") as server:
        again = ask(server, 0)
        assert again.cached_tokens == 0 and server.stats()["ssd"]["restores"] == 0
    assert again.tokens == cold.tokens
