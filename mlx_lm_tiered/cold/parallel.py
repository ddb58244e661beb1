"""Doing several things at once that wait for the disk or copy memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

# Enough to keep a disk's queue filled and to copy as fast as memory allows; more would take processors from the model.
THREADS = max(1, min(4, os.cpu_count() or 1))


def run_all(tasks: Sequence[Callable[[], None]], alone: bool = False) -> None:
    """Run all tasks on up to `THREADS` threads, or on the caller's. Raises what the first in order that failed raised; then those not begun are left out.

    Each thread has a stretch of the tasks and goes through it in order: what reads one
    file in order is read ahead by the system, where threads that take turns are not.
    One that is done takes the last task of the longest stretch.
    """
    threads = 1 if alone else min(THREADS, len(tasks))
    if threads == 0:
        return
    numbered = list(enumerate(tasks))
    stretches = [deque(numbered[len(tasks) * i // threads : len(tasks) * (i + 1) // threads]) for i in range(threads)]
    failed: dict[int, BaseException] = {}
    lock = threading.Lock()

    def work(own: deque[tuple[int, Callable[[], None]]]) -> None:
        while True:
            with lock:
                longest = max(stretches, key=len)
                if failed or not longest:
                    return
                number, task = own.popleft() if own else longest.pop()
            try:
                task()
            except BaseException as error:  # raised again below, on the caller's thread
                failed[number] = error

    helpers = [
        threading.Thread(target=work, args=(own,), name=f"mlx-lm-tiered-read-{i}", daemon=True) for i, own in enumerate(stretches[1:], 1)
    ]
    for helper in helpers:
        helper.start()
    work(stretches[0])
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[min(failed)]
