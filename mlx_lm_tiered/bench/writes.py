"""What a conversation writes: bytes per byte of its new tokens' KV, over many turns with a flush after each.

Then the last turn's request is made three times more: of the server that has the
conversation in RAM, of a new server on the same directory, and of a server that has
nothing. A server counts as started when it has
answered a first short request, so no figure contains the loading of the model.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.cold import listing
from mlx_lm_tiered.progress import Progress

from .client import Answer
from .restart import ask, drop_page_cache, started
from .server import Server, ServerFailed, tiered_flags

FINGERPRINT_WAIT = 120.0  # seconds


def run(model: Path, turns: int, turn_tokens: int = 200, max_tokens: int = 32) -> dict[str, Any]:
    """Measure it; a user's turn has about `turn_tokens` tokens, an answer `max_tokens` at most. Times are seconds. Raises ServerFailed, RequestFailed."""
    text = long_document(model, turn_tokens * turns)
    size = len(text) // turns
    questions = [text[i * size : (i + 1) * size] + f"\n\nPart {i + 1}. What is it about?" for i in range(turns)]
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        directory, log = Path(scratch) / "talk", Path(scratch) / "server.log"
        chat: list[dict[str, str]] = []
        written = []
        with started(model, log, tiered_flags(directory)) as server:
            flush(server)
            before = written_bytes(server)
            for i, question in enumerate(questions, 1):
                chat.append({"role": "user", "content": question})
                answer = ask(server, f"turn {i} of {turns}", chat, max_tokens)
                flush(server)
                written.append(written_bytes(server))
                if i < turns:
                    chat.append({"role": "assistant", "content": answer.text})
            tokens, kv_bytes = stored(directory)
            ssd = server.stats()["ssd"]
            ram = ask(server, "from RAM", chat, max_tokens)
        dropped = drop_page_cache(directory)
        answers: dict[str, Answer] = {"ram": ram}
        for name, place in (("restart", directory), ("cold", Path(scratch) / "cold")):
            with started(model, log, tiered_flags(place)) as server:
                answers[name] = ask(server, name, chat, max_tokens)
    total = written[-1] - before
    return {
        "bench": "writes",
        "model": str(model),
        "turns": turns,
        "tokens": tokens,
        "kv_bytes_per_token": kv_bytes,
        "bytes_written": total,
        "bytes_written_per_kv_byte": total / (tokens * kv_bytes),
        "segments": ssd["segments"],
        "longest_chain": ssd["longest_chain"],
        "not_identical": ssd["not_identical"],
        "restart_ttft_s": answers["restart"].ttft,
        "cold_ttft_s": answers["cold"].ttft,
        "ram_ttft_s": ram.ttft,
        "restart_to_cold": answers["restart"].ttft / answers["cold"].ttft,
        "cached_tokens": answers["restart"].cached_tokens,
        "ram_cached_tokens": ram.cached_tokens,
        "prompt_tokens": ram.prompt_tokens,
        "ram_and_restart_equal": ram.text == answers["restart"].text,
        "text_equal": ram.text == answers["restart"].text == answers["cold"].text,
        "page_cache_dropped": dropped,
        "bytes_written_by_turn": [after - first for first, after in zip([before, *written], written, strict=False)],
        "ssd": ssd,
    }


def flush(server: Server) -> None:
    """Have everything on disk. Raises ServerFailed when that is refused."""
    with Progress("flush"):
        deadline = time.monotonic() + FINGERPRINT_WAIT
        status, report = server.flush()
        while status != 200 and report["failed"] == report["dropped"] == 0 and time.monotonic() < deadline:
            time.sleep(0.5)  # right after a start the weights' fingerprint is not known yet, and nothing can be written
            status, report = server.flush()
    if status != 200:
        raise ServerFailed(f"the flush was not complete: {report}")


def written_bytes(server: Server) -> int:
    return server.stats()["ssd"]["written_bytes"]


def stored(directory: Path) -> tuple[int, float]:
    """Tokens of the longest entry, and the bytes that one of its tokens takes in tensors along tokens. Raises ServerFailed when there are none."""
    metas = [found.meta for found in listing.entries(directory) if found.meta is not None]
    meta = max(metas, key=lambda m: m.length, default=None)
    size = meta.token_bytes if meta else 0
    if meta is None or size == 0:
        raise ServerFailed("nothing was stored that grows with the tokens")
    return meta.length, size / (meta.length - meta.start)
