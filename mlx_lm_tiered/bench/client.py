"""An HTTP client of an mlx-lm server that measures what it receives. Standard library only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]


class RequestFailed(Exception):
    """The server answered with an error, or stopped in the middle of an answer."""

    def __init__(self, text: str, status: int | None = None):
        super().__init__(text)
        self.status = status


def endless(model: Path) -> dict[str, float]:
    """A logit bias under which the model in this directory never ends by itself."""
    ends = json.loads((model / "config.json").read_text()).get("eos_token_id") or []
    return {str(end): -1000.0 for end in (ends if isinstance(ends, list) else [ends])}


@dataclass
class Answer:
    """One answer. Times are seconds since the request was sent.

    `ttft` is the time to the first piece of text (for an answer that is not
    streamed: to its end). `tokens` are the generated token ids, when asked for.
    `arrivals` has the time of every streamed piece of text.
    """

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    ttft: float = 0.0
    elapsed: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return self.usage["prompt_tokens"]

    @property
    def completion_tokens(self) -> int:
        return self.usage["completion_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


class Client:
    """Requests to one server. Every request has a connection of its own, so threads may share a client."""

    def __init__(self, host: str, port: int, *, timeout: float = 600.0):
        self.host, self.port, self.timeout = host, port, timeout

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """(status, body) of one request. `body` is sent as JSON unless it is bytes. Raises OSError without a server."""
        connection, response = self._send(method, path, body, headers)
        try:
            return response.status, response.read()
        finally:
            connection.close()

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200. Raises OSError when nothing listens."""
        return self.request("GET", "/health")[0] == 200

    def stats(self) -> dict[str, Any]:
        """The plugin's ``GET /stats``."""
        status, body = self.request("GET", "/stats")
        if status != 200:
            raise RequestFailed(f"GET /stats answered {status}: {_excerpt(body)}", status)
        return json.loads(body)

    def flush(self) -> tuple[int, dict[str, Any]]:
        """``POST /admin/cache/flush``: (status, report). 200 says that everything put so far is on disk."""
        status, body = self.request("POST", "/admin/cache/flush", b"")
        try:
            return status, json.loads(body)
        except ValueError:
            raise RequestFailed(f"POST /admin/cache/flush answered {status}: {_excerpt(body)}", status) from None

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """A chat completion; `options` as in `complete`."""
        return self._answer("/v1/chat/completions", {"messages": list(messages)}, options)

    def complete(self, prompt: str, **options: Any) -> Answer:
        """A text completion, greedy unless told otherwise.

        `options` are fields of the request (``max_tokens``, ``seed``, ``tools``, …)
        and three of our own: ``stream`` (default True), ``tokens=True`` (collect the
        token ids; upstream gives them only without streaming), ``progress(done, total)``
        (called while a streamed prompt is processed).
        """
        return self._answer("/v1/completions", {"prompt": prompt}, options)

    def stream(self, path: str, body: Mapping[str, Any], progress: Progress | None = None) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed completion, parsed. Closing the iterator closes the connection."""
        connection, response = self._send("POST", path, dict(body) | {"stream": True})
        try:
            if response.status != 200:
                raise RequestFailed(f"POST {path} answered {response.status}: {_excerpt(response.read())}", response.status)
            for line in response:
                if line.startswith(b": keepalive ") and progress:
                    done, _, total = line.split()[2].partition(b"/")
                    progress(int(done), int(total))
                elif line.startswith(b"data: [DONE]"):
                    return
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestFailed(f"POST {path} ended with an error: {event['error']}", event["error"].get("code"))
                    yield event
            raise RequestFailed("the stream ended before its end mark")
        finally:
            response.close()  # which has the socket by now, when the server ends the connection
            connection.close()

    def _answer(self, path: str, body: dict[str, Any], options: dict[str, Any]) -> Answer:
        options = dict(options)
        tokens, progress = options.pop("tokens", False), options.pop("progress", None)
        streamed = options.pop("stream", not tokens)
        body |= {"temperature": 0.0, "max_tokens": 16} | options
        if streamed:
            return self._streamed(path, body, progress)
        if tokens:
            body["logprobs"] = True
        return self._whole(path, body)

    def _streamed(self, path: str, body: dict[str, Any], progress: Progress | None) -> Answer:
        answer, first = Answer(), None
        start = time.monotonic()
        for event in self.stream(path, body | {"stream_options": {"include_usage": True}}, progress):
            now = time.monotonic() - start
            first = now if first is None else first
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if piece:
                    answer.text += piece
                    answer.arrivals.append(now)
                answer.message |= {k: v for k, v in choice.get("delta", {}).items() if v}
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.message["content"] = answer.text
        answer.elapsed = time.monotonic() - start
        answer.ttft = answer.arrivals[0] if answer.arrivals else first or answer.elapsed
        return answer

    def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        start = time.monotonic()
        status, raw = self.request("POST", path, body)
        elapsed = time.monotonic() - start
        if status != 200:
            raise RequestFailed(f"POST {path} answered {status}: {_excerpt(raw)}", status)
        event = json.loads(raw)
        choice = event["choices"][0]
        message = choice.get("message", {})
        return Answer(
            text=choice.get("text") or message.get("content") or "",
            usage=event["usage"],
            ttft=elapsed,
            elapsed=elapsed,
            tokens=[t["id"] for t in (choice.get("logprobs") or {}).get("content", [])],
            finish_reason=choice.get("finish_reason"),
            message=message,
        )

    def _send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def _excerpt(body: bytes) -> str:
    return body[:500].decode("utf-8", "replace")
