"""`--warm FILE`: prompts are prefilled at start, in idle time, and are no client's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm_hooks import UsageError
from support.models import document
from support.server import tiered, user
from support.waiting import until

from mlx_lm_tiered.serving.warm import read

TEXT = document(2500)


def write(file: Path, *prompts: dict) -> Path:
    file.write_text("\n".join(json.dumps(prompt) for prompt in prompts) + "\n")
    return file


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_lfm2"])
def test_a_warmed_prompt_hits_and_what_is_stored_is_left_alone(model, cache_dir, tmp_path, request):
    model = request.getfixturevalue(model)
    system = [{"role": "system", "content": TEXT}]
    file = write(tmp_path / "prompts.jsonl", {"messages": [*system, *user("hello")]}, {"prompt": TEXT})
    with tiered(model, cache_dir, "--warm", str(file), log=tmp_path / "log") as server:
        until(lambda: server.stats()["warm"]["done"])
        stats = server.stats()
        assert stats["warm"] == {"prompts": 2, "prefilled": 2, "already_stored": 0, "gave_way": 0, "failed": 0, "done": True}
        assert stats["lookups"] == stats["hits"] == stats["misses"] == stats["prompt_tokens"] == 0
        text = server.complete(TEXT, max_tokens=2)
        assert text.cached_tokens == text.prompt_tokens - 1
        # What follows the warmed system prompt may be another question.
        chat = server.chat([*system, *user("What else?")], max_tokens=2)
        assert chat.cached_tokens > 0.9 * (chat.prompt_tokens - 20)
        assert server.stats()["lookups"] == server.stats()["hits"] == 2
        assert server.log().count("warmed 2 of 2 prompts") == 1
        assert server.terminate() == 0
    if "lfm2" in str(model):
        return  # of what is stored another model says no more
    with tiered(model, cache_dir, "--warm", str(file), log=tmp_path / "again") as server:
        until(lambda: server.stats()["warm"]["done"])
        stats = server.stats()
        assert stats["warm"]["already_stored"] == 2 and stats["warm"]["prefilled"] == stats["puts"] == stats["ssd"]["restores"] == 0


def test_it_gives_way_to_clients_and_to_a_stop(tiny_llama, tmp_path):
    file = write(tmp_path / "prompts.jsonl", {"prompt": document(60_000)})
    with tiered(tiny_llama, None, "--warm", str(file), "--prefill-step-size", "8", log=tmp_path / "log") as server:
        until(lambda: "Prompt processing progress" in server.log())
        answer = server.chat(user("hello"), max_tokens=3)
        assert answer.completion_tokens == 3
        stats = until(lambda: (s := server.stats())["warm"]["gave_way"] and s)
        assert stats["lookups"] == 1 and not stats["warm"]["done"] and stats["warm"]["failed"] == 0
        progress = server.log().count("Prompt processing progress")
        until(lambda: server.log().count("Prompt processing progress") > progress)  # it is sent again
        assert server.terminate() == 0
    log = server.log()
    assert "failed" not in log.replace("0 failed", "") and "warmed 0 of 1 prompts" in log
    done, total = map(int, re.findall(r"Prompt processing progress: (\d+)/(\d+)", log)[-1])
    assert done < 0.9 * total, "the stop waited for the whole prompt"


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', "line 3: it is not JSON"),
        ('{"prompt": "a"}\n{"messages": []}\n', "line 2: its messages are not a list"),
        ('{"prompt": "a", "max_tokens": 9}', "line 1: it has 'max_tokens'"),
        ('[{"prompt": "a"},\n {"prompt": 1}]', "item 2: its prompt is not a text"),
        ('[{"prompt": "a"},\n {"prompt": }]', "line 2: it is not JSON"),
        ("\n \n", "there is no prompt in"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=range(7),
)
def test_errors_in_the_file_are_told_with_their_place(tmp_path, text, because):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(file)
    assert because in str(caught.value) and "\n" not in str(caught.value)


def test_a_list_is_taken_like_lines(tmp_path):
    prompts = [{"prompt": "a"}, {"messages": user("b"), "tools": [{"type": "function"}]}]
    (tmp_path / "list.json").write_text(json.dumps(prompts, indent=2))
    assert read(tmp_path / "list.json") == read(write(tmp_path / "lines.jsonl", *prompts))


@pytest.mark.parametrize(("content", "argv", "because"), [("{}", ["--model", "."], "line 1: it has to have"), ('{"prompt": "a"}', [], "--warm needs --model")])
def test_a_server_does_not_start_with_what_cannot_work(tmp_path, content, argv, because):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "server", "--plugin", "tiered", "--warm", str(file), *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and because in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr
