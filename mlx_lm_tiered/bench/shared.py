"""A second machine's first reply, when another has computed the prompt, over the cold reply of the first.

Two servers with a directory each, one after the other, and one store between them. A
answers a prompt cold; once it has uploaded what it computed, B answers it. Each pair has a
prompt of its own that differs from the first word on. Both have answered a short request
before, so no figure contains the loading of the model. `faults` puts a proxy before the
store, which drops, cuts off or corrupts that share of the replies.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_lm_tiered.progress import Progress

from .client import Answer
from .faulty import Proxy, faulty
from .report import spread
from .restart import ask
from .server import Server, ServerFailed, server_command, tiered_flags
from .stores import NGINX, Store, webdav
from .text import long_document

UPLOADED_IN = 120.0  # seconds


def run(model: Path, prefix_tokens: int, repeats: int, max_tokens: int = 16, url: str | None = None, faults: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Measure it against the store at `url`; without one against nginx where it is installed, else a directory. Times are seconds. Raises ServerFailed, RequestFailed."""
    text = long_document(model, prefix_tokens)
    chats = [[{"role": "user", "content": f"Number {i}. {text}\n\nWhat is the text above about?"}] for i in range(repeats)]
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch, _store(Path(scratch), url, faults, seed) as (store, proxy):
        with _started(model, Path(scratch), "a", store) as a:
            cold = []
            for i, chat in enumerate(chats):
                cold.append(ask(a, f"cold, {i + 1} of {repeats}", chat, max_tokens))
            _uploaded(a)
            uploading = a.stats()["shared"]
        with _started(model, Path(scratch), "b", store) as b:
            second = [ask(b, f"on the second machine, {i + 1} of {repeats}", chat, max_tokens) for i, chat in enumerate(chats)]
            found = b.stats()
        replies = proxy.counts() if proxy is not None else None
    shared = found["shared"]
    return {
        "bench": "shared",
        "model": str(model),
        "store": "nginx with WebDAV" if url is None and NGINX is not None else (url or "directory").partition(":")[0],
        "prompt_tokens": min(one.prompt_tokens for one in cold),
        "cached_tokens": min(one.cached_tokens for one in second),
        **spread("second_to_cold", [two.ttft / one.ttft for one, two in zip(cold, second, strict=True)]),
        "cold_ttft_all_s": [one.ttft for one in cold],
        "second_ttft_all_s": [two.ttft for two in second],
        "text_equal": _texts(cold) == _texts(second),
        "hits": found["hits_by_tier"]["shared"],
        "fetched_bytes": shared["fetched_bytes"],
        "bytes_per_s": shared["rates"]["bytes_per_s"],
        "requests_of_a": uploading["requests"],
        "requests_of_b": shared["requests"],
        **{name: shared[name] for name in ("fetched", "misses", "not_worth", "late", "failed", "refused")},
        "repeats": repeats,
        "faults": faults,
        "proxy": replies,
        **({f"replies_{name}": count for name, count in replies.items()} if replies is not None else {}),
    }


def _texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


@contextmanager
def _store(scratch: Path, url: str | None, faults: float, seed: int) -> Iterator[tuple[Store, Proxy | None]]:
    if url is not None:
        yield Store(url, {}), None
    elif NGINX is None:
        yield Store((scratch / "store").as_uri(), {}), None
    else:
        with webdav(scratch / "nginx") as store:
            if not faults:
                yield store, None
                return
            with faulty(store.port, faults, seed) as proxy:
                yield store.at(proxy.port), proxy


def _started(model: Path, scratch: Path, name: str, store: Store) -> Server:
    """A server that has answered a first short chat."""
    with Progress(f"starting server {name}"):
        flags = tiered_flags(scratch / name, "--shared-cache", store.url)
        server = Server(model, scratch / f"{name}.log", flags, env=store.env, command=server_command())
        try:
            server.chat([{"role": "user", "content": "Hello"}], max_tokens=2)
        except BaseException:
            server.kill()
            raise
    return server


def _uploaded(server: Server) -> None:
    """Wait until all is on disk, and then in the store. Raises ServerFailed."""
    end = time.monotonic() + UPLOADED_IN
    with Progress("uploading"):
        while server.flush()[0] != 200 or server.stats()["shared"]["pending"]:
            if time.monotonic() > end:
                raise ServerFailed(f"entries were not uploaded in {UPLOADED_IN:g} s: {server.stats()['shared']}\n{server.log()[-2000:]}")
            time.sleep(0.05)
