"""A process that saves entries until it is killed, or does one other thing to a directory; see `test_processes.py`."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cold_helpers import grown, job, plain, restore, save, scanned

from mlx_lm_tiered.cold import writer
from mlx_lm_tiered.cold.store import DirectoryFull


pipe: list[Connection] = []


def run(name: str, output: Connection, *args: Any) -> None:
    """Run one of the functions below; what it says goes to `output`."""
    pipe.append(output)
    TASKS[name](*args)


def say(what: Any) -> None:
    pipe[0].send(what)


def slowly() -> None:
    """Make every write take a moment, so that a kill finds each of them under way."""
    write_all = writer._write_all

    def slow(fd, data, at):
        for start in range(0, len(data), 1 << 15):
            time.sleep(0.0005)
            write_all(fd, data[start : start + (1 << 15)], at + start)

    writer._write_all = slow


def replace_for_ever(root: Path) -> None:
    """Save longer and longer versions of one conversation."""
    slowly()
    store = scanned(root)
    longest = store.stats()["longest_durable_prefix_tokens"]
    for tokens in range(max(400, longest + 50), 100_000, 50):
        save(store, job(range(tokens), plain(tokens, layers=4, seed=tokens)))
        say(tokens)


def grow_for_ever(root: Path) -> None:
    """Save a conversation that grows by 10 tokens a turn."""
    slowly()
    store = scanned(root)
    longest = store.stats()["longest_durable_prefix_tokens"]
    for tokens in range(longest + 10, 2000, 10):
        save(store, job(range(tokens), grown(tokens, layers=4)))
        say(tokens)


def hang_in_a_save(root: Path) -> None:
    store = scanned(root)
    writer._write_all = lambda fd, data, at: (say("writing"), time.sleep(1000))
    save(store, job(range(100)))


def hold_the_lock(root: Path) -> None:
    """Take the directory's lock and never let go."""
    with scanned(root)._directory.locked():
        say("locked")
        time.sleep(1000)


def share(root: Path, seed: int, cap: int, rounds: int) -> None:
    """Save, restore and forget entries in a directory that others use too."""
    draw = random.Random(seed)
    store = scanned(root, cap)
    counts = {"saved": 0, "restored": 0, "missed": 0}
    for _ in range(rounds):
        who, tokens = draw.randrange(6), draw.randrange(1, 30) * 16
        mine = [1000 * who + t for t in range(tokens)]
        if draw.random() < 0.6:
            try:
                save(store, job(mine, plain(tokens, seed=who)))
                counts["saved"] += 1
            except DirectoryFull:
                counts["missed"] += 1
        else:
            counts["restored" if restore(store, mine) is not None else "missed"] += 1
    stats = store.stats()
    say((counts["saved"], counts["restored"], stats["corrupt"], stats["write_errors"], stats["read_errors"]))
    store.close()


TASKS = {"replace": replace_for_ever, "grow": grow_for_ever, "hang": hang_in_a_save, "hold": hold_the_lock, "share": share}
