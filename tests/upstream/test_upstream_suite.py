"""Nothing of upstream's own tests that passes without the plugin fails with it."""

from __future__ import annotations

import os
from pathlib import Path

from upstream.suite import Run, prepare

# Both runs at once need about 3 GB each.
_MEMORY_FOR_TWO = 8e9


def test_upstreams_tests_pass_with_the_plugin_as_without(real_model: Path, tmp_path: Path):
    tests = tmp_path / "tests"
    tests.mkdir()
    prepare(tests, real_model)
    directory = tmp_path / "cold"
    switched_on = {"MLX_LM_PLUGINS": "tiered", "MLX_LM_TIERED_SSD_CACHE": str(directory)}

    stock = Run.start(tests, _made(tmp_path / "stock"), {})
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < _MEMORY_FOR_TWO:
        stock.outcomes()
    tiered = Run.start(tests, _made(tmp_path / "tiered"), switched_on)
    try:
        before, after = stock.outcomes(), tiered.outcomes()
    finally:
        for run in (stock, tiered):
            run.process.kill()

    passed = {name for name, outcome in before.items() if outcome == "passed"}
    assert len(passed) >= 90, stock.log.read_text()[-3000:]
    broken = sorted(name for name in passed if after.get(name) != "passed")
    assert not broken, f"{broken}\n{tiered.log.read_text()[-6000:]}"
    assert any(directory.glob("v1/*/*.safetensors")), "the plugin was on, but stored nothing"


def _made(path: Path) -> Path:
    path.mkdir()
    return path
