"""Each structural family of models: greedy tokens after a RAM hit, after a restore in a new process and after a
partial-prefix hit are those of a cold run of stock mlx-lm, and both tiers agree bit for bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, VOCABULARY, write_model_dir

CHILD = Path(__file__).with_name("child.py")
RANDOM = np.random.default_rng(11)
PROMPT = RANDOM.integers(3, VOCABULARY, 150).tolist()  # past every window, chunk and compressed group
SHORT = RANDOM.integers(3, VOCABULARY, 24).tolist()  # within them
SHARED = 13
OTHER = SHORT[:SHARED] + RANDOM.integers(3, VOCABULARY, 9).tolist()
LONGER = PROMPT + RANDOM.integers(3, VOCABULARY, 20).tolist()
MORE = 12
ROUNDING = 2e-4  # of log-probabilities, where a prefix was computed in other chunks; the best token leads by more


def run(families, prompts, settings, folder):
    folder.mkdir()
    job = {"families": families, "prompts": prompts, "settings": settings, "more": MORE, "out": str(folder / "out.npz")}
    (folder / "run.json").write_text(json.dumps(job))
    done = subprocess.run([sys.executable, str(CHILD), str(folder / "run.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(folder / "out.npz"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every process gave, by the way its prefixes came."""
    root = tmp_path_factory.mktemp("families")
    families = {name: str(write_model_dir(name, root / name)) for name in FAMILIES}
    again, other, longer = [["prompt", PROMPT]], [["other", OTHER]], [["longer", LONGER]]
    fill = [["fill", PROMPT], ["short", SHORT]]
    every = {"prompt_cache_min_tokens": 1}
    cold = root / "cold"
    results = {"stock": run(families, [*again, *other, *longer], None, root / "stock")}
    results["ram"] = run(families, [*fill, *again, *longer, *other], every, root / "ram")
    results["fill"] = run(families, fill, {"ssd_cache": str(cold), **every}, root / "fill")
    for name, prompts in (("prompt", again), ("longer", longer), ("other", other)):
        shutil.copytree(cold, root / f"cold-{name}")
        results[f"ssd-{name}"] = run(families, prompts, {"ssd_cache": str(root / f"cold-{name}"), **every}, root / f"ssd-{name}")
    return results


@pytest.mark.parametrize("name", ["prompt", "longer", "other"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_gives_the_cold_tokens(runs, family, name):
    stock, ram, ssd = runs["stock"], runs["ram"], runs[f"ssd-{name}"]
    expected = stock[f"{family}/{name}/tokens"]
    assert np.array_equal(ram[f"{family}/{name}/tokens"], expected)
    assert np.array_equal(ssd[f"{family}/{name}/tokens"], expected)
    lead = np.sort(stock[f"{family}/{name}/logprobs"], axis=-1)
    assert (lead[:, -1] - lead[:, -2]).min() > 2 * ROUNDING, "a knife-edge tie: choose another prompt"
    for hit in (ram, ssd):
        assert np.abs(hit[f"{family}/{name}/logprobs"] - stock[f"{family}/{name}/logprobs"]).max() < ROUNDING


@pytest.mark.parametrize("name", ["prompt", "longer", "other"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiers_agree_bit_for_bit(runs, family, name):
    ram, ssd = runs["ram"], runs[f"ssd-{name}"]
    assert ram[f"{family}/{name}/ram"] == ssd[f"{family}/{name}/ssd"]
    assert ram[f"{family}/{name}/logprobs"].tobytes() == ssd[f"{family}/{name}/logprobs"].tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_was_reused_that_can_be(runs, family):
    ram = runs["ram"]
    assert ram[f"{family}/prompt/ram"] == len(PROMPT) - 1
    # The longer prompt goes on where the boundary, not the reply, was.
    assert ram[f"{family}/longer/ram"] >= len(PROMPT) - 1
    # Recurrent and compressed state cannot be cut; everything else was within its window.
    recurrent = family in ("hybrid", "recurrent", "parallel-hybrid", "compressed")
    assert ram[f"{family}/other/ram"] == (0 if recurrent else SHARED)


def test_nothing_failed_on_the_way(runs):
    assert {name: str(result["faults"]) for name, result in runs.items() if name != "stock"} == {
        name: "{}" for name in runs if name != "stock"
    }
