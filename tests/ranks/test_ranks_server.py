"""Two real ranks over the loopback address: each keeps its shard, and a prefix is used by both or by none."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from mlx_lm_tiered.bench import small_model
from mlx_lm_tiered.bench.ranked_server import RankedServer, plain
from mlx_lm_tiered.bench.server import tiered_flags
from mlx_lm_tiered.bench.text import document
from support.server import tiered
from support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")

PROMPTS = [document(1500), document(3000)[1500:2600]]
ENDED = 30.0  # seconds, of a stop with nothing to wait for


def start(model: Path, place: Path, *flags: str) -> RankedServer:
    return RankedServer(model, place / "log", tiered_flags(place / "cold", *flags))


def ask(server: RankedServer) -> list[list[int]]:
    return [server.complete(prompt, tokens=True, max_tokens=24).tokens for prompt in PROMPTS]


def by_rank(server: RankedServer) -> list[dict]:
    ranks = until(lambda: (found := server.stats()["ranks"])["current"] and found)
    return ranks["reports"]


def files(place: Path) -> list[Path]:
    return sorted((place / "cold" / "v1").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def pipelining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.write(tmp_path_factory.mktemp("qwen") / "model", pipelines=True)


def test_tensor_sharding_restarts_and_losses(tiny_llama: Path, tmp_path: Path):
    with plain(tiny_llama, tmp_path / "plain", "--prompt-cache-size", "0") as server:
        expected = ask(server)

    with start(tiny_llama, tmp_path) as server:
        assert ask(server) == expected
        cold = by_rank(server)
        assert [report["tokens_saved"] for report in cold] == [0, 0]
        server.terminate(ENDED, rank=1)
        assert "all saved" in server.log() and "Node with rank" not in server.log()
    fingerprints = {path.parent.name for path in files(tmp_path)}
    assert len(fingerprints) == 2  # one a rank

    with start(tiny_llama, tmp_path) as server:
        assert ask(server) == expected
        for report in by_rank(server):
            assert report["hits_by_tier"]["ssd"] == 2
            assert report["tokens_saved"] == report["prompt_tokens"] - 2  # all but one of each prompt
        status, flushed = server.flush()
        assert status == 200 and [report["durable"] for report in flushed["ranks"]] == [True, True]
        server.terminate(ENDED, rank=None)

    # What one rank has lost, nobody uses.
    damaged = min(fingerprints)
    for path in files(tmp_path):
        if path.parent.name == damaged:
            path.write_bytes(path.read_bytes()[:-7] + b"\xff" * 7)
    with start(tiny_llama, tmp_path, "--ssd-cache-verify", "always") as server:
        assert ask(server) == expected
        assert [report["tokens_saved"] for report in by_rank(server)] == [0, 0]
        assert server.stats()["ranks"]["agreed"] == 0
        # Nobody waits for ever for one that was killed.
        os.kill(server.pids[1], signal.SIGKILL)
        server.wait_ended(ENDED)

    with start(tiny_llama, tmp_path) as server:
        assert ask(server) == expected
        until(lambda: all(report["ssd"]["corrupt"] == 0 for report in by_rank(server)))


def test_quantized_kv(tiny_llama: Path, tmp_path: Path):
    with tiered(tiny_llama, None, "--kv-scheme", "affine:8:32", log=tmp_path / "alone") as server:
        expected = ask(server)
    for attempt in ("cold", "restarted"):
        with start(tiny_llama, tmp_path, "--kv-scheme", "affine:8:32") as server:
            assert ask(server) == expected
            for report in by_rank(server):
                assert report["tokens_saved"] == (0 if attempt == "cold" else report["prompt_tokens"] - 2)


def test_pipelining(pipelining: Path, tmp_path: Path):
    with plain(pipelining, tmp_path / "plain", "--pipeline", "--prompt-cache-size", "0") as server:
        expected = ask(server)
    for attempt in ("cold", "restarted"):
        with start(pipelining, tmp_path, "--pipeline") as server:
            assert ask(server) == expected
            for report in by_rank(server):
                assert report["tokens_saved"] == (0 if attempt == "cold" else report["prompt_tokens"] - 2)
