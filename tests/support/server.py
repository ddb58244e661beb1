"""Real server processes for tests.

`Server` (see `mlx_lm_tiered.bench.server`) is the process and its HTTP client:

    with tiered(TINY["llama"], tmp_path / "cold", log=tmp_path / "log") as server:
        answer = server.chat(user("hello"), max_tokens=8)      # Answer: text, usage, ttft, cached_tokens, ...
        ids = server.complete("hello", tokens=True).tokens
        server.flush(); server.stats(); server.terminate(); server.log()
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from mlx_lm_tiered.bench.client import Answer, Client, RequestFailed
from mlx_lm_tiered.bench.server import STOCK, Server, ServerFailed, stock, tiered_flags

__all__ = [
    "STOCK",
    "Answer",
    "Client",
    "RequestFailed",
    "Server",
    "ServerFailed",
    "stock",
    "tiered",
    "tiered_flags",
    "user",
]


def tiered(
    model: str | PathLike[str],
    directory: str | PathLike[str] | None,
    *flags: str,
    log: str | PathLike[str],
    **options: Any,
) -> Server:
    """A server with the plugin; `directory` is its SSD tier (None: RAM only)."""
    return Server(model, log, tiered_flags(directory, *flags), **options)


def user(*texts: str) -> list[dict[str, str]]:
    """A conversation: user and assistant in turn, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
