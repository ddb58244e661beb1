"""Thousands of requests of several clients to one server that is never restarted: does anything grow that should not?

The traffic is that of ``bench kills`` (growing conversations, requests given up half way,
another model now and then), with flushes and drains between. Both tiers are small, so
that they are full long before the half. The same traffic then goes to a server without
the plugin: mlx-lm itself takes some more memory with each model that it loads. In the
second half memory must not grow faster than that server's. Descriptors, threads and files
are compared, too. Both servers have an allocator that gives large pieces back at once
(glibc's; elsewhere the settings do nothing): by itself it keeps what the largest moment
took, and larger moments come by chance.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.progress import Progress

from . import small_model
from .client import RequestFailed
from .server import Server, server_command, stock, tiered_flags
from .traffic import Traffic, same_tokens

CLIENTS = 4
SAMPLES = 60
FLOORS = 5  # parts of the second half, each of which counts with its lowest memory
RAM, DISK = "8MB", 16 * 10**6
RSS_LIMIT = 4.0  # MB per 1000 requests more than mlx-lm's: a leak of 4 KB a request
GIVING_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "65536"}
PATIENCE = 120.0  # seconds without a byte after which a request counts as failed
COMPARED = 40  # answers at most


def run(model: Path | None, requests: int, seed: int = 0) -> dict[str, Any]:
    """Do it; without `model` with one of random weights. ``faults`` says what grew. Raises ServerFailed, RequestFailed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        place = model or small_model.write(Path(scratch) / "model")
        other = Path(scratch) / "other"
        if place.is_dir():
            shutil.copytree(place, other)
        models = [str(other), str(place)] if other.exists() else []
        traffic, same_traffic = (Traffic(seed, turns=5, characters=200, models=models) for _ in range(2))
        directory = Path(scratch) / "cold"
        flags = ["--ssd-cache-max", str(DISK), "--prompt-cache-bytes", RAM, "--ssd-demote-idle", "5", "--ssd-restore", "always"]
        with Server(place, Path(scratch) / "server.log", tiered_flags(directory, *flags), command=server_command(), env=GIVING_BACK) as server:
            server.timeout = PATIENCE
            with Progress("requests") as progress:
                samples = _soak(server, traffic, requests, progress, directory)
            stats = server.stats()
            warnings = server.log().count(" - WARNING - ")
        with stock(place, Path(scratch) / "control.log", "--prompt-cache-bytes", RAM, env=GIVING_BACK) as control:
            control.timeout = PATIENCE
            with Progress("the same requests without the plugin") as progress:
                theirs = _soak(control, same_traffic, requests, progress)
        with stock(place, Path(scratch) / "stock.log", "--prompt-cache-size", "0") as reference:
            chosen = random.Random(seed).sample(traffic.replies, min(COMPARED, len(traffic.replies)))
            outcomes = [same_tokens(reference, reply) for reply in chosen]
    wrong = sum(not same and not tie for same, tie in outcomes)
    found = flatness(samples, theirs, requests)
    faults = [*found.pop("faults"), *traffic.failures, *same_traffic.failures]
    if wrong:
        faults.append(f"{wrong} of {len(outcomes)} answers differ from those of a server without the plugin")
    if stats["faults"]:
        faults.append(f"faults were counted: {stats['faults']}")
    return {
        "bench": "soak",
        "model": str(model) if model else "random weights",
        "seed": seed,
        "requests": traffic.sent[0],
        "given_up": traffic.given_up,
        "flat": not faults,
        **found,
        "answers_compared": len(outcomes),
        "wrong_answers": wrong,
        "warnings": warnings,
        "hits_ram": stats["hits_by_tier"]["ram"],
        "hits_ssd": stats["hits_by_tier"]["ssd"],
        "evictions": stats["ssd"]["evictions"],
        "seconds": time.monotonic() - started,
        "faults": faults,
        "samples": samples,
        "samples_without": theirs,
        "stats": stats,
    }


def _soak(server: Server, traffic: Traffic, requests: int, progress: Progress, directory: Path | None = None) -> list[dict[str, Any]]:
    """The traffic, sampled as it goes on; without a directory nothing is flushed."""

    def enough() -> bool:
        return traffic.sent[0] >= requests

    clients = [threading.Thread(target=traffic.run, args=(server, i, enough)) for i in range(CLIENTS)]
    threads = clients + ([threading.Thread(target=_flush_now_and_then, args=(server, traffic))] if directory is not None else [])
    for thread in threads:
        thread.start()
    samples: list[dict[str, Any]] = []
    try:
        while any(thread.is_alive() for thread in clients):
            if traffic.sent[0] >= requests * len(samples) / SAMPLES:
                samples.append({"requests": traffic.sent[0], **sample(server.pid, directory)})
                progress(traffic.sent[0], requests)
            time.sleep(0.02)
    finally:
        traffic.ended.set()
        for thread in threads:
            thread.join()
    return samples


def _flush_now_and_then(server: Server, traffic: Traffic) -> None:
    draw = random.Random(1)
    while not traffic.ended.wait(0.5 + draw.random()):
        traffic.quiet.set()
        try:
            server.request("POST", draw.choice(["/admin/cache/flush", "/admin/cache/flush", "/admin/drain"]) + "?timeout=5", b"")
        except (OSError, HTTPException, RequestFailed):
            return  # the clients say why
        finally:
            traffic.quiet.clear()


def sample(pid: int, directory: Path | None) -> dict[str, Any]:
    """What a process and its directory take now: `rss_mb` (MB), `fds`, `threads` (None where the system does not tell), `files`, `disk_mb`."""
    files = Directory(directory, 0).files() if directory is not None else []
    rss_mb, fds, threads = _process(pid)
    return {"rss_mb": rss_mb, "fds": fds, "threads": threads, "files": len(files), "disk_mb": sum(file.charge for file in files) / 1e6}


def _process(pid: int) -> tuple[float, int | None, int | None]:
    place = Path("/proc") / str(pid)
    if place.is_dir():
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        return int(status["VmRSS"].split()[0]) / 1e3, len(os.listdir(place / "fd")), int(status["Threads"])
    lines = subprocess.run(["ps", "-M", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout.splitlines()
    rss = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    open_files = shutil.which("lsof") and subprocess.run(["lsof", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return int(rss) / 1e3, open_files.count("\n") if open_files else None, max(1, len(lines) - 1)


def flatness(samples: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]], requests: int) -> dict[str, Any]:
    """What grew, and in `faults` what grew too much; `without` are samples of the server without the plugin.

    ``rss_slope_mb_per_1000`` is the slope of the line of least squares through the lowest
    memory of each fifth of the second half, in MB per 1000 requests: what it falls back
    to. ``..._without`` is that server's.
    The other ``..._growth`` are differences of the medians of the last quarter and of the second.
    """
    slope, theirs = (_slope_of_second_half(of) * 1000 for of in (samples, without))
    quarter = max(1, len(samples) // 4)
    before, after = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]

    def growth(name: str) -> float | None:
        values = [[s[name] for s in part if s[name] is not None] for part in (before, after)]
        return median(values[1]) - median(values[0]) if all(values) else None

    found: dict[str, Any] = {
        "rss_slope_mb_per_1000": slope,
        "rss_slope_without_mb_per_1000": theirs,
        "rss_mb": after[-1]["rss_mb"],
        "rss_without_mb": without[-1]["rss_mb"],
        "fds_growth": growth("fds"),
        "threads_growth": growth("threads"),
        "files_growth": growth("files"),
        "disk_mb_highest": max(s["disk_mb"] for s in samples),
    }
    faults = []
    # Over few requests the memory still warms up and the directory fills.
    if requests >= 1000 and slope - max(0.0, theirs) > RSS_LIMIT:
        faults.append(f"memory grew by {slope:.2f} MB per 1000 requests, without the plugin by {theirs:.2f}")
    # A client's connection is a descriptor and a thread while it lasts, and so is each file of a chain while it is read.
    for name, allowed in (("fds_growth", 2 * CLIENTS), ("threads_growth", 2 * CLIENTS), ("files_growth", 40 if requests >= 1000 else None)):
        if allowed is not None and found[name] is not None and found[name] > allowed:
            faults.append(f"{name.removesuffix('_growth')} grew by {found[name]}")
    if found["disk_mb_highest"] * 1e6 > DISK:
        faults.append(f"{found['disk_mb_highest']:.1f} MB on disk are over the cap")
    return {**found, "faults": faults}


def _slope_of_second_half(samples: Sequence[dict[str, Any]]) -> float:
    half = samples[len(samples) // 2 :]
    fifths = [half[len(half) * i // FLOORS : len(half) * (i + 1) // FLOORS] for i in range(FLOORS)]
    lowest = [min(part, key=lambda s: s["rss_mb"]) for part in fifths if part]
    return _slope([s["requests"] for s in lowest], [s["rss_mb"] for s in lowest])


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line of least squares; 0 through fewer than two points."""
    if len(set(xs)) < 2:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
