"""``--spec-trace``: one line a round, in a file of its owner's; what becomes of one that cannot be written."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
from families import build
from speculative_runs import Known, generate, plain, speculation
from test_sequences import generated, prompt_of

from mlx_lm_hooks import UsageError
from mlx_lm_tiered.speculation.trace import Trace
from mlx_lm_tiered.statistics import Statistics


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("strict", [False, True])
def test_each_round_is_a_line_and_they_say_what_was_emitted(strict: bool, tmp_path: Path):
    model, _ = build("dense")
    prompt, file = prompt_of(45), tmp_path / "trace.jsonl"
    file.write_text('{"request": 0}\n')  # what is there stays
    os.chmod(file, 0o644)
    with plain():
        expected = generate(model, prompt, 24).tokens
    with speculation(3, lambda: Known(prompt, expected), spec_trace=str(file), spec_strict=strict) as run:
        generate(model, prompt, 24)
        tokens, _ = generated(model, prompt, 12)
        report = run.report()
    assert file.stat().st_mode & 0o777 == 0o600
    first, *rounds = lines(file)
    assert first == {"request": 0} and {line["request"] for line in rounds} == {1, 2}
    whole = prompt + expected
    for line in rounds:
        emitted, accepted = line["emitted"], line["accepted"]
        assert whole[line["position"] :][: len(emitted)] == emitted and len(emitted) == accepted + 1
        assert line["drafted"][:accepted] == emitted[1:] and accepted <= len(line["drafted"]) <= 3
        following = whole[line["position"] + accepted + 1 :]
        assert accepted == len(line["drafted"]) or len(whole) == line["position"] + len(emitted) or line["drafted"][accepted] != following[0]
    assert sum(line["accepted"] for line in rounds) == report["accepted"] > 0
    assert sum(len(line["drafted"]) for line in rounds) == report["drafted"] > report["accepted"]


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "pipe"])
def test_what_cannot_be_written_is_one_sentence(kind: str, tmp_path: Path):
    path = {"missing": tmp_path / "no" / "trace", "directory": tmp_path, "link": tmp_path / "link", "pipe": tmp_path / "pipe"}[kind]
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(UsageError, match="--spec-trace .* cannot be written") as caught:
        Trace(path, Statistics())
    assert "\n" not in str(caught.value) and not (tmp_path / "elsewhere").exists()


def test_a_failed_write_is_one_warning_and_the_end(tmp_path: Path, caplog):
    """A file that may grow no more, by the limit of the process."""
    statistics, path = Statistics(), tmp_path / "trace"
    trace = Trace(path, statistics)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        for number in range(9):
            trace.round(1, number, [1, 2], 1, [3, 1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert statistics.report()["faults"] == {"spec_trace": 1} and caplog.text.count("ends here") == 1
    assert 100 < path.stat().st_size <= 200
    trace.round(1, 1, [1], 1, [3, 1])
    trace.close()
