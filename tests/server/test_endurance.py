"""`bench kills` and `bench soak` at a small count; run them long with ``mlx_lm.tiered bench kills`` and ``bench soak``."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_lm_tiered.bench import kills, soak


def test_kills_at_random_moments_cost_nothing_that_was_durable(tiny_lfm2: Path):
    """Two of the two hundred; a model with recurrent layers, whose entries can only be used whole."""
    found = kills.run(tiny_lfm2, 2, seed=3)
    assert found["faults"] == []
    assert found["kills"] == 2 and found["starts"] == 3
    assert found["answers_compared"] > 0 and found["entries_verified"] > 0
    assert 0 < found["highest_bytes"] <= found["cap_bytes"]


def test_a_short_soak():
    found = soak.run(None, 24)
    assert found["faults"] == [] and found["flat"] is True
    assert found["requests"] >= 24 and found["answers_compared"] > 5 and found["wrong_answers"] == 0
    assert found["rss_mb"] > 10


def samples(**slopes: float) -> list[dict[str, float]]:
    """Of 4000 requests: what grows does so by that much a request."""
    flat = {"rss_mb": 200.0, "fds": 20, "threads": 12, "files": 100, "disk_mb": 10.0}
    return [{"requests": n, **{k: v + slopes.get(k, 0) * n for k, v in flat.items()}} for n in range(0, 4000, 50)]


def test_what_grows_is_told():
    assert soak.flatness(samples(), samples(), 4000)["faults"] == []
    # In the beginning everything grows.
    warm = [{**s, "rss_mb": min(s["rss_mb"], 200.0)} for s in samples()]
    assert soak.flatness(warm, samples(), 4000)["faults"] == []
    for name, slope, says in (
        ("rss_mb", 0.005, "memory grew by 5.00 MB"), ("fds", 0.01, "fds grew"), ("threads", 0.01, "threads grew"),
        ("files", 0.05, "files grew"), ("disk_mb", 0.01, "over the cap"),
    ):  # fmt: skip
        (fault,) = soak.flatness(samples(**{name: slope}), samples(), 4000)["faults"]
        assert says in fault
    # What mlx-lm itself adds is not the plugin's; what it gives back excuses nothing.
    for theirs, faults in ((0.004, 0), (0.0005, 1), (-0.01, 1)):
        assert len(soak.flatness(samples(rss_mb=0.005), samples(rss_mb=theirs), 4000)["faults"]) == faults
    assert soak.flatness(samples(rss_mb=0.005), samples(), 500)["faults"] == []  # too few to tell


def test_a_process_is_sampled(tmp_path: Path):
    before = soak.sample(os.getpid(), tmp_path)
    with open(tmp_path / "file", "w") as file:
        file.write("x" * 5000)
        file.flush()
        after = soak.sample(os.getpid(), tmp_path)
    assert after["files"] == before["files"] + 1 and after["disk_mb"] >= before["disk_mb"] + 0.005
    assert before["rss_mb"] > 10 and before["threads"] >= 1
    assert before["fds"] is None or after["fds"] == before["fds"] + 1
