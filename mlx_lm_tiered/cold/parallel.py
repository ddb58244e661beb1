"""Doing several things at once that wait for the disk or copy memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

# Enough to keep a disk's queue filled and to copy as fast as memory allows; more would take processors from the model.
THREADS = max(1, min(4, os.cpu_count() or 1))


def run_all(tasks: Sequence[Callable[[], None]], alone: bool = False) -> None:
    """Run all tasks, begun in order, on up to `THREADS` threads, or on the caller's. Raises what the first that failed raised; then those not begun are left out."""
    threads = 1 if alone else min(THREADS, len(tasks))
    waiting = iter(enumerate(tasks))
    failed: dict[int, BaseException] = {}
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number, task = next(waiting, (-1, None))
                if task is None or failed:
                    return
            try:
                task()
            except BaseException as error:  # raised again below, on the caller's thread
                failed[number] = error

    helpers = [threading.Thread(target=work, name=f"mlx-lm-tiered-read-{i}", daemon=True) for i in range(1, threads)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[min(failed)]
