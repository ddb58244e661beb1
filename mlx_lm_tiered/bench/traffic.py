"""Conversations as a busy server has them: several at a time, growing, started anew, asked again, given up half way."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from mlx_lm_tiered.bench.text import document

from .client import Answer, Client, RequestFailed

MAX_TOKENS = 12  # of an answer
TEXT = 60_000  # characters that questions are cut from


@dataclass(frozen=True)
class Reply:
    """A request that was answered: what was asked and what came. `sent` are the traffic's requests by then, and the new characters in them."""

    messages: tuple[dict[str, str], ...]
    answer: Answer
    sent: tuple[int, int]
    model: str | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer."""
        return self.answer.prompt_tokens + self.answer.completion_tokens


class Traffic:
    """What several clients ask of one server after another. `run` is one client; call it in as many threads as there are to be.

    `systems` are the beginnings that conversations share, `turns` the most that one
    has, `characters` the most in a question, `pause` the most seconds between an answer
    and the next request. `models` are named in requests now and then.
    """

    def __init__(
        self, seed: int, *, turns: int = 6, characters: int = 400, systems: int = 3, pause: float = 0.05, models: Sequence[str] = ()
    ):
        self.replies: list[Reply] = []  # in the order of their ends
        self.sent = 0, 0  # requests, those that were given up too, and the characters that were new in them
        self.given_up = 0
        self.conversations = 0
        self.failures: list[str] = []
        self.quiet = threading.Event()  # clients wait before their next request
        self.ended = threading.Event()  # nothing that goes wrong from now on is the server's fault
        self._seed = seed
        self._turns, self._characters, self._pause, self._models = turns, characters, pause, models
        self._text = document(TEXT)
        self._systems = [self._text[i * 200 : i * 200 + 150] for i in range(systems)]
        self._talks = itertools.count()
        self._lock = threading.Lock()

    def run(self, client: Client, who: int, until: Callable[[], bool] = lambda: False) -> None:
        """Ask and ask, until `until()` or `ended`, or the server is gone; that is a failure unless `ended` is set by then."""
        draw = random.Random(f"{self._seed} {who} {self.sent}")
        messages: list[dict[str, str]] = []
        while not self.ended.is_set() and not until():
            time.sleep(draw.random() * self._pause)
            while self.quiet.is_set() and not self.ended.is_set():
                time.sleep(0.002)
            messages = self._next(draw, messages)
            model = draw.choice(self._models) if self._models and draw.random() < 0.03 else None
            try:
                if draw.random() < 0.12:
                    self._give_up(client, draw, messages)
                    continue
                answer = self.ask(client, messages, model)
            except (OSError, HTTPException, RequestFailed, ValueError) as error:
                if not self.ended.is_set():
                    with self._lock:
                        self.failures.append(f"{type(error).__name__}: {error}"[:300])
                return
            messages = [*messages, {"role": "assistant", "content": answer.text}]

    def ask(self, client: Client, messages: list[dict[str, str]], model: str | None = None) -> Answer:
        """One request, answered whole, with its token ids; noted."""
        self._sent(messages)
        answer = client.chat(messages, tokens=True, max_tokens=MAX_TOKENS, **({"model": model} if model else {}))
        with self._lock:
            self.replies.append(Reply(tuple(messages), answer, self.sent, model))
        return answer

    def _sent(self, messages: list[dict[str, str]]) -> None:
        new = messages if len(messages) < 3 else messages[-1:]
        with self._lock:
            self.sent = self.sent[0] + 1, self.sent[1] + sum(len(m["content"]) for m in new)

    def _next(self, draw: random.Random, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The conversation goes on, or another answer to its last question is wanted, or another one begins."""
        if messages and messages[-1]["role"] == "user":
            messages = messages[:-1]  # given up: something else is asked instead
        if len(messages) >= 2 and draw.random() < 0.1:
            return messages[:-1]
        if not messages or len(messages) >= 2 * self._turns or draw.random() < 0.15:
            with self._lock:
                number = next(self._talks)
                self.conversations += 1
            messages = [{"role": "system", "content": draw.choice(self._systems)}]
            return [*messages, {"role": "user", "content": f"{number}: {self._question(draw)}"}]
        return [*messages, {"role": "user", "content": self._question(draw)}]

    def _question(self, draw: random.Random) -> str:
        start = draw.randrange(TEXT - self._characters)
        return self._text[start : start + draw.randrange(20, self._characters)]

    def _give_up(self, client: Client, draw: random.Random, messages: list[dict[str, str]]) -> None:
        """Hang up after the first pieces of an answer."""
        self._sent(messages)
        body: dict[str, Any] = {"messages": messages, "temperature": 0.0, "max_tokens": 200}
        stream = client.stream("/v1/chat/completions", body)
        for _, _ in zip(range(draw.randrange(1, 5)), stream, strict=False):
            continue
        stream.close()
        with self._lock:
            self.given_up += 1


def same_tokens(reference: Client, reply: Reply, margin: float = 1e-3) -> tuple[bool, bool]:
    """(whether a server without the plugin says the same, whether it was only a tie).

    Greedy answers computed in other pieces may differ where two tokens are as good as
    each other: `margin` is the difference of their log probabilities that counts as none.
    """
    messages = list(reply.messages)
    expected = reference.chat(messages, tokens=True, max_tokens=MAX_TOKENS)
    if expected.tokens == reply.answer.tokens:
        return True, False
    body = {"messages": messages, "temperature": 0.0, "max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": 2}
    status, raw = reference.request("POST", "/v1/chat/completions", body)
    if status != 200:
        raise RequestFailed(f"the reference answered {status}", status)
    places = json.loads(raw)["choices"][0]["logprobs"]["content"]
    pairs = zip(expected.tokens, reply.answer.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return False, False
    best = sorted((top["logprob"] for top in places[at]["top_logprobs"]), reverse=True)
    return False, len(best) > 1 and best[0] - best[1] < margin


def wrong_answers(reference: Client, replies: Iterable[Reply], counts: Counter[str]) -> Iterator[str]:
    """A sentence about each reply that a server without the plugin answers otherwise. Counts ``answers_compared`` and ``ties``."""
    for reply in replies:
        same, tie = same_tokens(reference, reply)
        counts["ties"] += tie
        if not same and not tie:
            yield f"an answer differs after {reply.answer.cached_tokens} of {reply.answer.prompt_tokens} tokens were reused"
        counts["answers_compared"] += 1
