"""``--warm FILE``: prompts that are prefilled when the server is ready and has nothing else to do.

Each goes the ordinary way, as a request of this process to its own server for one
token, so what is stored is what a client's request would have stored. Before each the
engine has to be idle; when a client comes meanwhile, the request is given up and sent
again later. Nothing of it counts as a client's lookup.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Protocol

from mlx_lm_hooks import Engine, ModelSource, UsageError

from ..index.keys import token_key
from ..prefix.probing import Look
from ..prompts import BadPrompt, Prompt, parse
from .tokens import Tokens

logger = logging.getLogger("mlx_lm_tiered")

LARGEST_FILE = 256 << 20
POLL = 0.02  # seconds
QUIET = 0.2  # seconds without a request before one of ours
PATIENCE = 600.0  # for the fingerprint and the scan, without which nobody knows what is stored
TRIES = 20  # of a prompt whose prefill gave way
TIMEOUT = 3600.0


class Tiers(Protocol):
    """What is asked of the run."""

    engine: Engine | None
    source: ModelSource | None

    def wait_indexed(self, source: ModelSource, timeout: float) -> None: ...

    def probe(self, source: ModelSource, tokens: Sequence[int]) -> dict[str, Look]: ...


def read(file: Path) -> list[Prompt]:
    """The prompts of a file: a JSON list, or one JSON object a line (see `prompts.parse`). Raises UsageError with the place."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise UsageError(f"--warm: {file} has more than {LARGEST_FILE} bytes")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--warm: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--warm: {file} is not UTF-8") from None
    if text.lstrip().startswith("["):
        values = [(f"item {number}", value) for number, value in enumerate(_json(text, str(file)), 1)]
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        values = [(f"line {number}", _json(line, f"{file}, line {number}")) for number, line in lines]
    prompts = []
    for place, value in values:
        try:
            prompts.append(parse(value))
        except BadPrompt as error:
            raise UsageError(f"--warm: {file}, {place}: {error}") from None
    if not prompts:
        raise UsageError(f"--warm: there is no prompt in {file}")
    return prompts


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) and ", line" not in place else ""
        raise UsageError(f"--warm: {place}{line}: it is not JSON ({getattr(error, 'msg', error)})") from None
    except RecursionError:
        raise UsageError(f"--warm: {place}: it is nested too deeply") from None


def prepare(file: Path, args: argparse.Namespace, tiers: Tiers) -> Warmer:
    """What `--warm` needs, checked. Raises UsageError."""
    if not getattr(args, "model", None):
        raise UsageError("--warm needs --model: its prompts are for the model that the server starts with")
    if not getattr(args, "port", None):
        raise UsageError("--warm needs a --port that is known beforehand, not 0")
    return Warmer(read(file), args, tiers)


class Warmer:
    """Sends the prompts, on a thread of its own."""

    def __init__(self, prompts: Sequence[Prompt], args: argparse.Namespace, tiers: Tiers):
        self._prompts = prompts
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
        self._address = host, args.port
        self._tiers = tiers
        self._tokens = Tokens(args)
        self._counts: Counter[str] = Counter()
        self._done = False
        self._closed = threading.Event()
        self._ours: bytes | None = None  # the key of the request that is under way, until it is looked up
        self._others = 0  # lookups of clients
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mlx-lm-tiered-warm", daemon=True)

    def start(self) -> None:
        """Begin as soon as a model is loaded and the server answers."""
        self._thread.start()

    def close(self) -> None:
        """End soon."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def is_clients(self, tokens: Sequence[int]) -> bool:
        """Whether a lookup is for a client and not for one of these prompts. On the generation thread."""
        with self._lock:
            if self._ours is not None and len(self._ours) == 8 * len(tokens) and token_key(tokens) == self._ours:
                self._ours = None
                return False
            self._others += 1
            return True

    def report(self) -> dict[str, Any]:
        """What `/stats` shows."""
        names = ("prefilled", "already_stored", "gave_way", "failed")
        return {"prompts": len(self._prompts), **{name: self._counts[name] for name in names}, "done": self._done}

    def _run(self) -> None:
        started = time.monotonic()
        try:
            source = self._until(lambda: self._tiers.source)
            if source is not None and source.path is not None:
                self._tiers.wait_indexed(source, PATIENCE)
                for number, prompt in enumerate(self._prompts, 1):
                    if not self._stopping:
                        self._warm(number, prompt, source)
        except Exception as error:  # a thread that nobody asks must say itself why it ended
            self._counts["failed"] += 1
            logger.warning("--warm ended early: %s: %s", type(error).__name__, error)
        self._tokens.forget()
        self._done = True
        found = self.report()
        level = logging.WARNING if found["failed"] else logging.INFO
        logger.log(level, "warmed %d of %d prompts in %.1f s; %d were stored already, %d failed",
                   found["prefilled"], found["prompts"], time.monotonic() - started, found["already_stored"], found["failed"])  # fmt: skip

    def _warm(self, number: int, prompt: Prompt, source: ModelSource) -> None:
        assert source.path is not None
        try:
            tokens = self._tokens.of(source.path, prompt)
            for _ in range(TRIES):
                if not self._until(lambda: self._idle(source)):
                    return
                if max(look.hit for look in self._tiers.probe(source, tokens).values()) >= len(tokens) - 1:
                    self._counts["already_stored"] += 1
                    return
                if self._send(prompt, tokens):
                    self._counts["prefilled"] += 1
                    return
                self._counts["gave_way"] += 1
            raise HTTPException(f"it gave way to clients {TRIES} times")
        except (BadPrompt, HTTPException, OSError, ValueError) as error:
            if not self._stopping:
                self._counts["failed"] += 1
                logger.warning("--warm: prompt %d was not prefilled: %s", number, error)

    def _send(self, prompt: Prompt, tokens: Sequence[int]) -> bool:
        """Have the server prefill it. False when a client came, and it was given up. Raises HTTPException or OSError."""
        with self._lock:
            self._ours = token_key(tokens)
        others = self._others
        sending = _Sending(self._address, prompt)
        try:
            while not sending.ended.wait(POLL):
                if self._stopping or (self._ours is None and (self._others != others or self._waiting)):
                    sending.give_up()
                    return False
            return sending.result()
        finally:
            with self._lock:
                self._ours = None

    def _idle(self, source: ModelSource) -> bool:
        """Whether nobody has asked for anything in a while, and the model is still the one that the prompts are for."""
        until = time.monotonic() + QUIET
        while time.monotonic() < until:
            engine = self._tiers.engine
            if self._stopping or engine is None or engine.busy or self._waiting or self._tiers.source != source:
                return False
            time.sleep(POLL)
        return True

    @property
    def _waiting(self) -> bool:
        engine = self._tiers.engine
        return engine is not None and engine.waiting > 0

    @property
    def _stopping(self) -> bool:
        engine = self._tiers.engine
        return self._closed.is_set() or (engine is not None and engine.stopping)

    def _until(self, ready: Callable[[], Any]) -> Any:
        """What `ready` answers once that is true; None when the server stops first."""
        while not (answer := ready()):
            if self._stopping or self._closed.wait(POLL):
                return None
        return answer


class _Sending:
    """One request under way, streamed, so that the server notices when it is given up."""

    def __init__(self, address: tuple[str, int], prompt: Prompt):
        self.ended = threading.Event()
        self._error: Exception | None = None
        self._connection = HTTPConnection(*address, timeout=TIMEOUT)
        self._prompt = prompt
        self._given_up = False
        self._socket: socket.socket | None = None  # the connection lets go of its own when the answer begins
        threading.Thread(target=self._run, name="mlx-lm-tiered-warm-request", daemon=True).start()

    def _run(self) -> None:
        path, body = self._prompt.request()
        try:
            self._connect()
            data = json.dumps({**body, "max_tokens": 1, "temperature": 0.0, "stream": True})
            self._connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            if response.status != 200:
                raise HTTPException(f"the server answers {response.status}: {response.read(300).decode('utf-8', 'replace')}")
            if b"data: [DONE]" not in [line.strip() for line in response]:
                raise HTTPException("the server's answer ends before its end mark")
        except Exception as error:
            self._error = error
        finally:
            self._connection.close()
            self.ended.set()

    def _connect(self) -> None:
        """Connect, which the server lets wait while it starts."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                self._connection.connect()
                self._socket = self._connection.sock
                return
            except ConnectionRefusedError:
                if self._given_up or time.monotonic() > deadline:
                    raise
                time.sleep(POLL)

    def give_up(self) -> None:
        """Hang up, and wait until that is done."""
        self._given_up = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("the request had ended: %s", error)
        self.ended.wait(1.0)

    def result(self) -> bool:
        """True; raises what went wrong."""
        if self._error is not None:
            raise self._error if isinstance(self._error, (HTTPException, OSError)) else HTTPException(str(self._error))
        return True
