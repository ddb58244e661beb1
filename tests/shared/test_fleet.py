"""The simulation of many machines: what it counts is what the shared tier asks for, and formulas say the same."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_lm_tiered import cli
from mlx_lm_tiered.bench import fleet
from mlx_lm_tiered.bench.fleet import TRACES, Machine, asked, on_paper, rungs_between, simulate
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.shared.lookup import Lookup, written_rung
from mlx_lm_tiered.shared.names import RUNGS, Names, Team
from mlx_lm_tiered.shared.objects import Objects

MACHINE = Machine(fleet.token_bytes("affine:4"))
SMALL = {trace.name: replace(trace, machines=20, teams=1, sessions=8 if trace.name == "agents" else trace.sessions) for trace in TRACES}

FEW = replace(SMALL["agents"], machines=8, sessions=6)


def test_the_search_asks_as_often_as_the_shared_tier_does(tmp_path: Path):
    from obstore.store import LocalStore

    team, draw = Team("secret"), random.Random(1)
    with ThreadPoolExecutor(4) as executor:
        for number in range(12):
            objects = Objects(LocalStore(tmp_path / str(number), mkdir=True))
            names, length, above = Names(team, "f" * 32), draw.choice((300, 5000, 30_000)), draw.choice((0, 1000))
            there = draw.randrange(length)
            key = token_key([number] * length)
            for _, digest in names.rungs(key, 0, there):
                objects.put(names.place(RUNGS, digest), written_rung(team, "0" * 32))
            before = objects.counts()["get"]
            found = Lookup(objects, executor).reach(names, key, above, length - 1)
            assert asked(rungs_between(above, length - 1), there) == (objects.counts()["get"] - before, found.length)


@pytest.mark.parametrize("trace", SMALL)
def test_formulas_say_what_is_simulated(trace: str):
    """Sums over thousands of sessions: within 10 %, and what cleaning lists and reads of documents within 30."""
    simulated, paper = simulate(SMALL[trace], MACHINE, sample=1), on_paper(SMALL[trace], MACHINE)
    for name, value in paper.items():
        assert simulated[name] == pytest.approx(value, rel=0.3 if trace == "documents" and name in ("get", "list") else 0.1), name
    assert simulated["local_hit_rate"] > 0.75 and simulated["shared_hit_rate"] > 0


def test_a_small_local_tier_asks_the_store_more_often():
    trace = replace(SMALL["documents"], machines=8, sessions=30)
    usual, small = simulate(trace, MACHINE, sample=1), simulate(trace, replace(MACHINE, local_bytes=5e9), sample=1)
    assert small["local_hit_rate"] < usual["local_hit_rate"] and small["read_bytes"] > 1.5 * usual["read_bytes"]
    assert small["prefill_hours_left"] < 1.5 * usual["prefill_hours_left"]  # the store has what it lacks


def test_where_a_token_comes_slower_than_it_is_computed_nothing_is_fetched():
    slow = simulate(FEW, replace(MACHINE, network=5e6), sample=1)
    assert slow["fetches"] == slow["read_bytes"] == slow["shared_hit_rate"] == 0 and slow["written_bytes"] > 0


def test_a_store_has_its_cap_and_machines_that_only_read_write_nothing():
    capped = simulate(FEW, replace(MACHINE, store_bytes=20e9), sample=1)
    free = simulate(FEW, MACHINE, sample=1)
    assert capped["stored_bytes"] < free["stored_bytes"] and capped["delete"] > free["delete"]
    reading = simulate(FEW, replace(MACHINE, writes=0.0), sample=1)
    assert reading["written_bytes"] == 0 and reading["put"] == 30  # that it was cleaned


def test_the_command(tmp_path: Path, capsys):
    began = time.monotonic()
    assert cli.main(["bench", "fleet", "--machines", "20", "--teams", "1", "--json", str(tmp_path / "out.json")]) == 0
    shown, written = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert [row["trace"] for row in written["rows"]] == ["agents", "chat", "documents"]
    assert "get (millions)" in shown and "$ a month, Cloudflare R2" in shown and "agents, on paper" in shown
    assert time.monotonic() - began < 60
    assert cli.main(["bench", "fleet", "--writers", "2"]) == 2
    assert cli.main(["bench", "fleet", "--scheme", "nonsense"]) == 2
