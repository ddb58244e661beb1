"""Nothing of upstream's own tests that passes without the plugin fails with it."""

from __future__ import annotations

import os
from pathlib import Path

from upstream.suite import HALVES, Run, prepare

# Both halves at once need about 3 GB each.
_MEMORY_FOR_TWO = 8e9


def test_upstreams_tests_pass_with_the_plugin_as_without(real_model: Path, tmp_path: Path):
    """All run with the plugin. What fails or is skipped with it must do so without it, too; what passes needs no comparison."""
    tests = tmp_path / "tests"
    tests.mkdir()
    prepare(tests, real_model)
    directory = tmp_path / "cold"
    switched_on = {"MLX_LM_PLUGINS": "tiered", "MLX_LM_TIERED_SSD_CACHE": str(directory)}
    together = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= _MEMORY_FOR_TWO

    runs: list[Run] = []
    try:
        for number, half in enumerate(HALVES):
            runs.append(Run.start(tests, half, tmp_path / f"tiered-{number}", switched_on))
            if not together:
                runs[-1].outcomes()
        outcomes = {name: outcome for run in runs for name, outcome in run.outcomes().items()}
        logs = "\n".join(run.log() for run in runs)
        others = sorted(name for name, outcome in outcomes.items() if outcome != "passed")
        assert len(outcomes) - len(others) >= 90, logs
        stock = {}
        if others:
            runs.append(Run.start(tests, others, tmp_path / "stock", {}))
            stock = runs[-1].outcomes()
    finally:
        for run in runs:
            run.process.kill()
            run.process.wait()

    assert {name: stock.get(name) for name in others} == {name: outcomes[name] for name in others}, logs
    # The plugin was on where it should, and only there. Upstream's tests hand over models that no files stand for: they stay in RAM.
    for run in runs[: len(HALVES)]:
        statistics = run.statistics()
        assert statistics["lookups"] > 0 < statistics["puts"] and statistics["ssd"]["directory"] == str(directory)
        assert set(statistics["faults"]) <= {"unknown_cache_class"}  # stand-ins, which upstream's own prompt cache keeps
    assert [run.statistics() for run in runs[len(HALVES) :]] == [None] * bool(others)
