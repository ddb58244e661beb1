"""Asking the plugins whether a request may be prefilled, and whether decoding may go on."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm_hooks.types import Admission, Refused, Row

from . import checkpointing
from .mailbox import Mailbox
from .runtime import Fetch, Runtime

# Tokens of every row between two questions.
INTERVAL = 256


def admit_one(runtime: Runtime, fetch: Fetch | None, call: dict[str, Any]) -> Mailbox | None:
    """Admit a request that the server answers by itself; `call` is that of `stream_generate`. Raises Refused.

    None when this is no request of a server.
    """
    mailbox = _waiting(runtime)
    if mailbox is None or "prompt_cache" not in call:
        return None
    rest, cached = call["prompt"], fetch.cached if fetch is not None else 0
    request = Admission(
        source=fetch.source if fetch is not None else None,
        model=call["model"],
        draft=call.get("draft_model"),
        tokens=list(fetch.tokens[: fetch.count]) if fetch is not None else list(rest),
        cached=cached,
        caches=call["prompt_cache"],
        max_tokens=call.get("max_tokens", -1),
        step=call.get("prefill_step_size", 2048),
    )
    _admit(runtime, _going_on(runtime, request), mailbox)
    return mailbox


def watch_one(runtime: Runtime, fetch: Fetch | None, call: dict[str, Any], steps: Generator[Any, None, None]) -> Iterator[Any]:
    """The same generation, which ends with Refused when decoding must not go on; what it computed is put."""
    prompt = fetch.count if fetch is not None else len(call["prompt"])
    bound = call.get("max_tokens", -1)
    emitted: list[int] = []
    for step in steps:
        yield step
        emitted.append(step.token)
        if len(emitted) % INTERVAL != 1 or not runtime.active:
            continue
        row = Row(prompt + len(emitted), max(0, bound - len(emitted)) if bound >= 0 else -1)
        refused = _stopping(runtime, [row])
        if refused is not None:
            # Then the caches hold what was handed out, and no more.
            steps.close()
            # A draft model's caches are in the middle of a guess.
            if fetch is not None and call.get("draft_model") is None:
                _keep(runtime, fetch, [*fetch.tokens[: fetch.count], *emitted], call["prompt_cache"])
            raise refused


def admit_row(runtime: Runtime, generator: Any, call: dict[str, Any]) -> None:
    """Admit a request to a batch; `call` is that of `insert_segments`, of one sequence. Raises Refused."""
    mailbox = _waiting(runtime)
    if mailbox is None:
        return
    try:
        request = _going_on(runtime, _joining(generator, call, runtime.here.fetch))
    except Exception as error:
        runtime.fault("describing a request", error)
        return
    _admit(runtime, request, mailbox)


class Watch:
    """When to ask about the rows of one `BatchGenerator`."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._steps = 0

    def due(self, prompts: Sequence[Any], responses: Sequence[Any]) -> bool:
        """Count one step, in which a row that is alone may get several tokens; whether it is time to ask."""
        alone = bool(responses) and responses[0].uid == responses[-1].uid
        self._steps += len(responses) if alone else bool(responses)
        if self._steps < INTERVAL and not any(response.end_of_prompt for response in prompts):
            return False
        self._steps = 0
        return True

    def ask(self, generator: Any) -> tuple[int, Refused] | None:
        """The newest row, when it must end, and with what."""
        batch = generator._generation_batch
        rows = sorted(zip(batch.uids, batch.tokens, batch.max_tokens, batch._num_tokens, strict=True), key=lambda row: row[0])
        if not rows:
            return None
        refused = _stopping(self._runtime, [Row(len(tokens), max(0, most - done)) for _, tokens, most, done in rows])
        return None if refused is None else (rows[-1][0], refused)


def _waiting(runtime: Runtime) -> Mailbox | None:
    """Where the request that this thread is about to begin is answered, until it is admitted; None outside a server's requests."""
    engine = runtime.here.engine
    mailbox = engine.current if engine is not None and runtime.active else None
    return mailbox if mailbox is not None and mailbox.held else None


def _admit(runtime: Runtime, request: Admission, mailbox: Mailbox) -> None:
    """Ask, and let the request's first answer through. Raises Refused; a plugin's fault admits it."""
    refused = None
    try:
        refused = runtime.plugins.admit(request)
    except Exception as error:
        runtime.fault("admitting a request", error)
    if refused is not None:
        checkpointing.forget(runtime)  # what it would have gone on from is memory
        raise refused
    mailbox.open()


def _going_on(runtime: Runtime, request: Admission) -> Admission:
    """The same request, of which a checkpoint has computed all but one token, if it goes on from one."""
    following = checkpointing.resumed(runtime)
    if following is None or (state := following.state) is None:
        return request
    return replace(
        request,
        source=following.source,
        tokens=[*state.tokens, state.pending],
        cached=len(state.tokens),
        caches=state.caches,
        max_tokens=request.max_tokens - following.emitted if request.max_tokens >= 0 else -1,
    )


def _stopping(runtime: Runtime, rows: Sequence[Row]) -> Refused | None:
    """Why the last of the rows must end. A plugin's fault lets it go on."""
    try:
        return runtime.plugins.decoding(rows)
    except Exception as error:
        runtime.fault("watching what is decoded", error)
        return None


def _keep(runtime: Runtime, fetch: Fetch, tokens: list[int], caches: list[Any]) -> None:
    """Store what an ended request leaves."""
    try:
        if fetch.prefixes.owns(caches):
            fetch.prefixes.put(fetch.source, tokens, list(caches), role="assistant")
    except Exception as error:
        runtime.fault("storing a prefix", error)


def _joining(generator: Any, call: dict[str, Any], fetch: Fetch | None) -> Admission:
    """A sequence that is about to be inserted, beside what the generator has."""
    held = call["all_tokens"][0]
    tokens = [*held, *(token for segment in call["segments"][0] for token in segment)]
    decoding, waiting = beside(generator)
    return Admission(
        source=fetch.source if fetch is not None else None,
        model=generator.model,
        draft=None,
        tokens=tokens,
        cached=len(held),
        caches=call["caches"][0],
        max_tokens=call["max_tokens"][0],
        step=generator.prefill_step_size,
        decoding=decoding,
        waiting=waiting,
        preempted=0,
    )


def beside(generator: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """What a generator has: tokens that each decoding row holds; tokens of each other one's prompt, and those it holds."""
    waiting = [(len(at) + sum(len(part) for part in seq), len(at)) for _, seq, _, _, at, *_ in generator._unprocessed_sequences]
    prefilling = zip(generator._currently_processing, generator._prompt_batch.tokens, strict=True)
    waiting += [(len(at) + sum(len(part) for part in seq[0]), len(at)) for seq, at in prefilling]
    return [len(at) for at in generator._generation_batch.tokens], waiting
