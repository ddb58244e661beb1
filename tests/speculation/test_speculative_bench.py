"""``mlx_lm.tiered bench speculative`` with small numbers."""

from __future__ import annotations

import json

import pytest

from mlx_lm_tiered.bench import speculative, stops
from mlx_lm_tiered.cli import main
from support.models import TINY


def test_each_task_is_measured_against_plain_decoding(tmp_path, capsys):
    file = tmp_path / "figures.json"
    options = ["--gammas", "3", "--prefix-tokens", "120", "--decode-tokens", "40", "--repeats", "1"]
    assert main(["bench", "speculative", "--model", str(TINY["llama"]), *options, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["task"], row["gamma"]) for row in rows] == [("copy", 3), ("edit", 3), ("free", 3)]
    for row in rows:
        assert row["tokens_equal"] and row["speedup"] > 0 and row["accepted"] <= row["drafted"] and row["auto_speedup"] > 0
    assert rows[0]["accepted"] > 0 and "acceptance" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "flags"), [("gemma3_text", ["--tokens", "60"]), ("lfm2", ["--tokens", "120", "--part", "2/2"])])
def test_stops_everywhere_leave_what_plain_decoding_does(family, flags, tmp_path):
    """Past the window, and with state that goes back by a replay. The command does every stop of 2,000 tokens."""
    file = tmp_path / "figures.json"
    assert main(["bench", "stops", "--model", str(TINY[family]), *flags, "--every", "6", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["stops"], found["hits_after_starts"], found["hits_from_ssd"]) == (10, 0, 10) and found["hits_from_ram"] >= 11
    assert found["computed_anew"] == 1


@pytest.mark.parametrize("part", ["3/2", "0/2", "2", "x/2"])
def test_a_part_that_there_is_not(part, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "stops", "--model", str(TINY["llama"]), "--part", part])
    assert "is not like 2/5" in capsys.readouterr().err


def test_a_wrong_token_or_a_lost_prefix_is_a_fault():
    good = {
        "stops": 13, "wrong_expected": 0, "wrong_tokens": 0, "wrong_next": 0, "wrong_next_from_ssd": 0, "wrong_lengths": 0, "faults": 0,
        "accepted": 1, "drafted": 2, "hits_from_ram": 15, "hits_after_starts": 2, "hits_from_ssd": 13,
    }  # fmt: skip
    assert stops.found(good) == []
    for name, value in (("wrong_expected", 1), ("wrong_tokens", 1), ("wrong_next_from_ssd", 1), ("accepted", 2), ("accepted", 0), ("hits_from_ram", 14), ("hits_from_ssd", 12)):
        assert len(stops.found(good | {name: value})) == 1


def test_a_draft_model_is_measured_the_same_way(tmp_path):
    file = tmp_path / "figures.json"
    options = ["--gammas", "2", "--prefix-tokens", "60", "--decode-tokens", "24", "--repeats", "1", "--source", "draft"]
    assert main(["bench", "speculative", "--model", str(TINY["lfm2"]), "--draft-model", str(TINY["llama"]), *options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["source"] == "draft" and all(row["tokens_equal"] and row["drafted"] > 0 for row in result["rows"])


def test_streams_are_measured_against_a_server_without_drafts(tmp_path):
    file = tmp_path / "figures.json"
    options = ["--streams", "3", "--prefix-tokens", "40", "--decode-tokens", "16", "--repeats", "1", "--json", str(file)]
    assert main(["bench", "streams", "--model", str(TINY["llama"]), "--draft-model", str(TINY["llama"]), *options]) == 0
    result = json.loads(file.read_text())
    assert result["text_equal"] and result["throughput_ratio"] > 0 and result["single_ratio"] > 0 and result["acceptance"] > 0.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--source", "draft"], "--source draft needs --draft-model"),
        (["--draft-model", "small"], "does nothing with --source ngram"),
        (["--source", "assistant", "--draft-model", str(TINY["llama"])], "is no assistant"),
    ],
)
def test_a_source_and_its_model_belong_together(options, says, capsys):
    assert main(["bench", "speculative", "--model", str(TINY["llama"]), *options]) == 2
    assert says in capsys.readouterr().err


def test_the_edited_text_is_another_and_the_copied_one_is_not():
    class Characters:
        encode = staticmethod(list)

    copied, edited = ("".join(speculative._prompt(task, Characters, 400)) for task in ("copy", "edit"))
    first, _, second = copied.partition(speculative.AGAIN)
    same, _, other = edited.partition(speculative.AGAIN)
    assert first == same and first.startswith(second) and not first.startswith(other) and len(second) > 100


@pytest.mark.parametrize("gammas", ["0", "65", "two"])
def test_impossible_numbers_of_drafts_are_refused(gammas, capsys):
    assert main(["bench", "speculative", "--model", str(TINY["llama"]), "--gammas", gammas]) == 2
    assert "--gammas" in capsys.readouterr().err
