"""The HTTP client that tests and benchmarks measure with, against a stock server process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.models import TINY, document
from support.server import RequestFailed, Server, ServerFailed, stock, user


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with stock(TINY["llama"], tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def test_streamed_and_whole_answers_agree(server: Server):
    streamed = server.chat(user(document(1500)), max_tokens=12)
    whole = server.chat(user(document(1500)), max_tokens=12, tokens=True)
    assert streamed.text == whole.text != ""
    assert streamed.completion_tokens == len(whole.tokens) == 12
    assert streamed.prompt_tokens == whole.prompt_tokens > 300
    assert whole.cached_tokens > 300
    assert 0 < streamed.ttft <= streamed.elapsed
    assert streamed.message["content"] == streamed.text


def test_progress_counts_up_to_the_prompt(server: Server):
    seen: list[tuple[int, int]] = []
    answer = server.complete(document(6000, start=50), max_tokens=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (answer.prompt_tokens, answer.prompt_tokens)


def test_a_refused_request_says_why(server: Server):
    with pytest.raises(RequestFailed, match="max_tokens must be at least 1") as failed:
        server.complete("x", max_tokens=0)
    assert failed.value.status == 400
    with pytest.raises(RequestFailed, match="404"):
        server.stats()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path):
    command = (sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)")
    with pytest.raises(ServerFailed, match=r"exited with code 3\nthe reason"):
        Server("none", tmp_path / "log", command=command)
