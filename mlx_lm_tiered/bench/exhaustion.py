"""Many requests on a pool of blocks for few, with everything that may come between: does each end as it must?

Several clients at once send `requests` chats with one of four system prompts to a server whose pool
has blocks for `room` of them: some asked for before, some with a reply bound that is far from what they say, some with long replies,
some whose clients go away in mid-prefill. Twice the server is told to drain, entries leave RAM while they are idle,
and in the middle it is stopped and started again on the same directory, so that prompts come from the SSD tier. Each request must end with the tokens
of mlx-lm's own server, or with a 503 that says how many blocks were missing; at the end the
pool must be empty.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm_tiered.progress import Progress

from . import small_model
from .client import RequestFailed, endless
from .server import Server, server_command, stock, tiered_flags
from .text import document

CLIENTS_PER_ROOM = 4  # clients at once, for each request that has room
GIVEN_UP = 9  # requests from one that is given up to the next
BLOCK = 16
STEP = 64  # tokens of a prefill's chunk: several a prompt, so that clients go away between them
LONG, STOPPED = 400, 300  # bounds of replies that are long, and of those that a space ends
SETTLING = 60.0  # seconds for the pool to be empty


class Ask(NamedTuple):
    """One request, and what mlx-lm's server answers."""

    messages: list[dict[str, str]]
    max_tokens: int
    options: dict[str, Any]  # what keeps its reply long, or ends it
    tokens: list[int]
    held: int  # tokens of its prompt and of the longest reply


def run(model: Path | None, requests: int = 200, room: int = 20, seed: int = 0) -> dict[str, Any]:
    """Do it; without `model` with one of random weights. ``faults`` says what went wrong. Raises ServerFailed, RequestFailed."""
    started = time.monotonic()
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home = Path(scratch)
        place = model or small_model.write(home / "model")
        with stock(place, home / "stock.log") as server, Progress("what mlx-lm's own server says") as progress:
            asks = _expected(server, place, draw, requests, progress)
        flags = _flags(place, asks, room)
        outcomes: Counter[str] = Counter()
        faults: list[str] = []
        restored, reports = 0, []
        for part in (asks[: len(asks) // 2], asks[len(asks) // 2 :]):
            with Server(place, home / "tiered.log", tiered_flags(home / "cold", *flags), command=server_command()) as server:
                server.timeout = 600.0
                with Progress("requests") as progress:
                    _serve(server, part, CLIENTS_PER_ROOM * room, outcomes, faults, progress)
                reports.append(_emptied(server))
                stats = server.stats()
                restored += stats["hits_by_tier"]["ssd"]
                if stats["faults"]:
                    faults.append(f"faults were counted: {stats['faults']}")
                if (code := server.terminate()) != 0:
                    faults.append(f"the server ended with {code}")
    left = {name: sum(report[name] for report in reports) for name in ("blocks_used", "blocks_reserved", "waiting")}
    faults += [f"{name}: {count} at the end" for name, count in left.items() if count]
    if outcomes["right"] + outcomes["refused"] + outcomes["given_up"] != requests:
        faults.append(f"{requests} requests, and {dict(outcomes)}")
    return {
        "bench": "exhaustion", "model": str(model) if model else "random weights", "seed": seed, "requests": requests,
        "room": room, "blocks": reports[0]["blocks"], "blocks_peak": max(report["blocks_peak"] for report in reports),
        **{name: outcomes[name] for name in ("right", "refused", "given_up", "wrong", "failed")},
        "waits": sum(report["waits"] for report in reports), "preempted": sum(report["preempted"] for report in reports),
        "restored": restored, **{f"{name}_left": count for name, count in left.items()},
        "seconds": time.monotonic() - started, "faults": faults,
    }  # fmt: skip


def _expected(server: Server, model: Path, draw: random.Random, requests: int, progress: Progress) -> list[Ask]:
    """The requests in their order; one in four was there before."""
    systems = [document(4000)[1000 * number :][: 60 + 40 * number] for number in range(4)]
    text = document(60_000)
    places: list[int] = []
    drawn: list[tuple[list[dict[str, str]], int, dict[str, Any]]] = []
    for number in range(requests):
        if number > 8 and draw.random() < 0.25:
            places.append(draw.choice(places))
            continue
        start = draw.randrange(len(text) - 200)
        question = f"{number}: {text[start : start + draw.randrange(40, 200)]}"
        # A bound far above what is said is promised as it is, or not.
        most = LONG if number % 3 == 1 else STOPPED if number % 8 == 0 else draw.choice((8, 16, 32, 48))
        unusual: dict[int, dict[str, Any]] = {LONG: {"logit_bias": endless(model)}, STOPPED: {"stop": [" "]}}
        options = unusual.get(most, {})
        places.append(len(drawn))
        drawn.append(([{"role": "system", "content": draw.choice(systems)}, {"role": "user", "content": question}], most, options))
    asks = []
    with ThreadPoolExecutor(4) as pool:  # fewer than upstream's queue of connections has
        answers = pool.map(lambda one: server.chat(one[0], max_tokens=one[1], tokens=True, **one[2]), drawn)
        for (messages, most, more), answer in zip(drawn, answers, strict=True):
            asks.append(Ask(messages, most, more, answer.tokens, answer.prompt_tokens + most))
            progress(len(asks), len(drawn))
    return [asks[place] for place in places]


def _flags(model: Path, asks: Sequence[Ask], room: int) -> list[str]:
    """A pool for `room` requests of the mean size, or for the largest one."""
    needs = [-(-ask.held // BLOCK) + 1 for ask in asks]
    blocks = max(max(needs), round(room * sum(needs) / len(needs)))
    pool = ["--paged-kv", "--paged-kv-block-size", str(BLOCK), "--paged-kv-pool", str(blocks * BLOCK * _token_bytes(model))]
    return [*pool, "--prefill-step-size", str(STEP), "--ssd-demote-idle", "2", "--ssd-restore", "always"]


def _token_bytes(model: Path) -> int:
    """Bytes of a token in the pool, of a model that is loaded for a moment."""
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_lm_tiered.paged import plan

    from .in_process import loaded

    found, _ = loaded(model, [])
    made = plan.make(found, make_prompt_cache(found))
    if made is None:
        raise RequestFailed("none of the model's caches is of full attention")
    return made.token_bytes


def _serve(server: Server, asks: Sequence[Ask], clients: int, outcomes: Counter[str], faults: list[str], progress: Progress) -> None:
    """All of them, so many at once, with a drain in the middle."""
    done = 0

    def one(numbered: tuple[int, Ask]) -> str:
        number, ask = numbered
        if number == len(asks) // 2:
            server.request("POST", "/admin/drain", b"")
        return _given_up(server, ask) if number % GIVEN_UP == GIVEN_UP - 1 else _answered(server, ask)

    with ThreadPoolExecutor(clients) as pool:
        for outcome in pool.map(one, enumerate(asks)):
            kind, _, detail = outcome.partition(": ")
            outcomes[kind] += 1
            if kind in ("wrong", "failed"):
                faults.append(outcome)
            progress(done := done + 1, len(asks))


def _answered(server: Server, ask: Ask) -> str:
    """``right``, ``refused``, or what is wrong. The system turns connections away where mlx-lm's short queue of them is full: asked again."""
    while True:
        try:
            answer = server.chat(ask.messages, max_tokens=ask.max_tokens, tokens=True, **ask.options)
            return "right" if answer.tokens == ask.tokens else f"wrong: {answer.tokens[:8]}, and {ask.tokens[:8]} were expected"
        except ConnectionError:
            time.sleep(0.05)
        except RequestFailed as error:
            return "refused" if error.status == 503 and "blocks" in str(error) else f"failed: {error}"


class _Gone(Exception):
    """The client hangs up."""


def _given_up(server: Server, ask: Ask) -> str:
    """Hang up at the first sign of the prefill."""

    def leave(done: int, total: int) -> None:
        raise _Gone

    body = {"messages": ask.messages, "temperature": 0.0, "max_tokens": ask.max_tokens}
    while True:
        try:
            for _ in server.stream("/v1/chat/completions", body, leave):
                raise _Gone
        except ConnectionError:
            time.sleep(0.05)
            continue
        except (_Gone, RequestFailed):
            pass
        return "given_up"


def _emptied(server: Server) -> dict[str, Any]:
    """What `/stats` says of the pool when all is done and drained, or after a while."""
    deadline = time.monotonic() + SETTLING
    while True:
        server.request("POST", "/admin/drain", b"")
        paged = server.stats()["paged"]
        if not any(paged[name] for name in ("blocks_used", "blocks_reserved", "waiting")) or time.monotonic() > deadline:
            return paged
        time.sleep(0.1)
