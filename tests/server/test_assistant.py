"""A trained assistant in real servers: picked up by --draft-model, the answers of plain decoding, faults named."""

from __future__ import annotations

import json
import shutil

import pytest

from support.models import ASSISTANT, document
from support.server import ServerFailed, tiered

PROMPT = document(700)
STOPS = (1, 6, 7)
PATHS = {"batch": {}, "single": {"seed": 7, "temperature": 0.1}}  # a seed has mlx-lm serve a request outside its batch


def ask(server, prompt: str, count: int, **options):
    answer = server.complete(prompt, max_tokens=count, tokens=True, **options)
    return answer.text, answer.tokens, answer.finish_reason


def turns(server, options: dict) -> list:
    """For each place to stop at an answer, and the next turn's."""
    firsts = [ask(server, f"{count} {PROMPT}", count, **options) for count in STOPS]
    seconds = [ask(server, f"{count} {PROMPT}{first[0]} and so", 8, **options) for count, first in zip(STOPS, firsts, strict=True)]
    return [*firsts, *seconds, ask(server, PROMPT, 60, **options)]


@pytest.mark.parametrize(
    ("path", "flags"),
    [("batch", ()), ("single", ()), ("batch", ("--kv-scheme", "affine:8:32")), ("batch", ("--paged-kv", "--paged-kv-block-size", "16", "--paged-kv-pool", "16MB"))],
    ids=["batch", "single", "quantized", "paged"],
)
def test_turns_from_ram_and_disk_are_those_of_plain_decoding(path, flags, tiny_gemma4, cache_dir, tmp_path):
    options, scheme = PATHS[path], flags if "--kv-scheme" in flags else ()
    with tiered(tiny_gemma4, None, "--prompt-cache-bytes", "0", *scheme, log=tmp_path / "plain.log") as server:
        expected = turns(server, options)
    seen = []
    for number in range(2):
        with tiered(tiny_gemma4, cache_dir, "--draft-model", str(ASSISTANT), *flags, log=tmp_path / f"{number}.log") as server:
            assert turns(server, options) == expected
            seen.append(server.stats())
            if seen[-1]["paged"]:
                assert seen[-1]["paged"]["blocks_used"] > 0 == seen[-1]["paged"]["blocks_reserved"]
            assert server.terminate() == 0
    for stats, tier in zip(seen, ("ram", "ssd"), strict=True):
        found = stats["speculation"]
        assert stats["hits_by_tier"][tier] >= len(STOPS) and stats["faults"] == {} and stats["keys_shortened"] == 0
        assert found["source"] == "assistant" and found["draft_tokens"] == 2 and found["refused"] is None
        assert found["acceptance"] > 0.2 and found["draft_model"]["model"] == str(ASSISTANT)


def test_where_drafts_stand_and_what_they_see_changes_acceptance_only(tiny_gemma4, tmp_path):
    found = {}
    for flags in ((), ("--assistant-position", "advance"), ("--assistant-window", "2")):
        with tiered(tiny_gemma4, None, "--draft-model", str(ASSISTANT), *flags, log=tmp_path / "log") as server:
            found[flags] = ask(server, PROMPT, 200), server.stats()["speculation"]["acceptance"]
    answers, acceptance = zip(*found.values(), strict=True)
    assert answers[0] == answers[1] == answers[2] and len(set(acceptance)) == 3


def test_a_damaged_artifact_ends_the_start_and_another_models_is_named(tiny_gemma4, tiny_llama, tmp_path):
    with tiered(tiny_llama, None, "--draft-model", str(ASSISTANT), log=tmp_path / "llama.log") as server:
        assert ask(server, PROMPT, 4)[1]
        assert "Gemma 4" in server.stats()["speculation"]["refused"]
    broken = shutil.copytree(ASSISTANT, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["hidden_size"] += 32
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ServerFailed, match="exited with code 2") as failed:
        tiered(tiny_gemma4, None, "--draft-model", str(broken), log=tmp_path / "broken.log")
    assert "model.embed_tokens.weight" in str(failed.value) and "Traceback" not in str(failed.value)
