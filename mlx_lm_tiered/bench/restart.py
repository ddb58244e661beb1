"""Time to first token: cold, from RAM, and after a restart of the server.

Every repeat has a prompt of its own that differs from the first word on, so that
each is cold once. One server answers each cold and again; then it is stopped with
SIGTERM, the directory's files leave the page cache where the system allows that,
and a new server answers each again. A server counts as started when it has answered
a first short request, so no figure contains the loading of the model. Upstream
streams no token ids; so the first prompt's are asked for without streaming, from RAM
and once more after another restart.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

from .client import Answer
from .server import Server, server_command, tiered_flags


def run(
    model: Path, prefix_tokens: int, repeats: int, max_tokens: int = 32, directory: Path | None = None, flags: list[str] | None = None
) -> dict[str, Any]:
    """Measure it. `directory` (default: a new temporary one) holds the SSD tier; `flags` go to both servers. Times are seconds. Raises ServerFailed, RequestFailed."""
    text = long_document(model, prefix_tokens)
    chats = [_chat(i, text) for i in range(repeats)]
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        cold_directory = directory or Path(scratch) / "cold"
        options = tiered_flags(cold_directory, *(flags or []))
        log = Path(scratch) / "server.log"
        with started(model, log, options) as server:
            cold = [ask(server, f"cold, {i + 1} of {repeats}", chat, max_tokens) for i, chat in enumerate(chats)]
            ram = [ask(server, f"from RAM, {i + 1} of {repeats}", chat, max_tokens) for i, chat in enumerate(chats)]
            ram_ids = _token_ids(server, chats[0], max_tokens)
            before = time.monotonic()
            server.terminate()
            stop_s = time.monotonic() - before
        dropped = drop_page_cache(cold_directory)
        with started(model, log, options) as server:
            restart = [ask(server, f"restarted, {i + 1} of {repeats}", chat, max_tokens) for i, chat in enumerate(chats)]
            ssd = server.stats()["ssd"]
        with started(model, log, options) as server:
            restart_ids = _token_ids(server, chats[0], max_tokens)
            last = server.stats()
            ids_restored = last["hits_by_tier"]["ssd"] > 0 or last["ssd"]["decisions"]["recomputed"] > 0
    cold_s, ram_s, restart_s = (median(a.ttft for a in answers) for answers in (cold, ram, restart))
    return {
        "bench": "restart",
        "model": str(model),
        "cold_ttft_s": cold_s,
        "ram_ttft_s": ram_s,
        "restart_ttft_s": restart_s,
        "restart_to_cold": restart_s / cold_s,
        "prompt_tokens": min(a.prompt_tokens for a in cold),
        "cached_tokens": min(a.cached_tokens for a in restart),
        "ram_cached_tokens": min(a.cached_tokens for a in ram),
        "text_equal": [a.text for a in cold] == [a.text for a in ram] == [a.text for a in restart],
        "ram_and_restart_equal": [a.text for a in ram] == [a.text for a in restart],
        "ram_and_restart_tokens_equal": ids_restored and ram_ids == restart_ids and len(ram_ids) > 0,
        "stop_s": stop_s,
        "page_cache_dropped": dropped,
        "ssd_restore": ssd["restore"],
        "restored": ssd["decisions"]["restored"] + ssd["decisions"]["partly"],
        "recomputed": ssd["decisions"]["recomputed"],
        "repeats": repeats,
        "cold_ttft_all_s": [a.ttft for a in cold],
        "ram_ttft_all_s": [a.ttft for a in ram],
        "restart_ttft_all_s": [a.ttft for a in restart],
        "cached_tokens_all": [a.cached_tokens for a in restart],
        "ssd": ssd,
    }


def _chat(number: int, text: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"Number {number}: you answer questions about a text."},
        {"role": "user", "content": text + "\n\nIn one sentence: what is the text above about?"},
    ]


def started(model: Path, log: Path, flags: list[str]) -> Server:
    """A server that has answered a first short request."""
    with Progress("starting a server"):
        server = Server(model, log, flags, command=server_command())
        try:
            server.complete("Hello", max_tokens=2)
        except BaseException:
            server.kill()
            raise
    return server


def ask(server: Server, name: str, chat: list[dict[str, str]], max_tokens: int) -> Answer:
    """The answer to a chat, with progress under `name`."""
    with Progress(name) as progress:
        return server.chat(chat, max_tokens=max_tokens, progress=progress)


def _token_ids(server: Server, chat: list[dict[str, str]], max_tokens: int) -> list[int]:
    with Progress("token ids"):
        return server.chat(chat, max_tokens=max_tokens, tokens=True).tokens


def drop_page_cache(directory: Path) -> bool:
    """Have the files under `directory` read from the disk next time. False where the system has no way to ask for that."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return False
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
