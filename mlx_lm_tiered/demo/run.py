"""A long chat with a real server: cold, again, and after a restart of the server."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_lm_tiered import openblas, versions
from mlx_lm_tiered.bench.client import Answer
from mlx_lm_tiered.bench.server import Server, server_command, tiered_flags
from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

# Small chunks, so that the bar moves.
_PREFILL_STEP = 512
_ANSWER_TOKENS = 32
_QUESTION = "\n\nIn one sentence: what is the text above about?"


@dataclass(frozen=True)
class Step:
    """One sending of the chat: seconds to the first token, tokens reused and given, the answer."""

    name: str
    ttft_s: float
    cached_tokens: int
    prompt_tokens: int
    text: str


@dataclass(frozen=True)
class Outcome:
    """The three steps, and how long stopping and starting took in seconds."""

    model: str
    steps: tuple[Step, ...]
    stop_s: float
    start_s: float

    @property
    def text_equal(self) -> bool:
        return len({step.text for step in self.steps}) == 1

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, one sentence each; empty when all is well."""
        found = [] if self.text_equal else ["the answers differ"]
        # A model that cannot be cut anywhere may reuse less than all; less than half is no reuse of this chat.
        found += [
            f"{step.name}: only {step.cached_tokens} of {step.prompt_tokens} tokens were reused"
            for step in self.steps[1:]
            if 2 * step.cached_tokens < step.prompt_tokens
        ]
        return found

    def as_json(self) -> dict[str, Any]:
        cold, ram, restart = self.steps
        return {
            "model": self.model,
            "prompt_tokens": cold.prompt_tokens,
            "cached_tokens": restart.cached_tokens,
            "cold_ttft_s": cold.ttft_s,
            "ram_ttft_s": ram.ttft_s,
            "restart_ttft_s": restart.ttft_s,
            "text_equal": self.text_equal,
            "stop_s": self.stop_s,
            "start_s": self.start_s,
            "steps": [asdict(step) for step in self.steps],
            "versions": versions.versions(),
            "machine": versions.machine(),
        }


def default_prompt_tokens() -> int:
    """A length whose cold prefill with the demo's model takes well under two minutes on this machine."""
    if not versions.on_cpu():
        return 6000
    # macOS has Accelerate; only Linux may lack a quick BLAS.
    return 4000 if openblas.find() or sys.platform == "darwin" else 600


def run(model: Path, directory: Path, prompt_tokens: int, say: Callable[[str], None]) -> Outcome:
    """Do it, with the SSD tier in `directory`. Raises ServerFailed, RequestFailed."""
    messages = [
        {"role": "system", "content": "You answer questions about a text."},
        {"role": "user", "content": long_document(model, prompt_tokens) + _QUESTION},
    ]
    flags = tiered_flags(directory, "--prefill-step-size", str(_PREFILL_STEP))
    command = server_command()
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-demo-") as scratch:
        log = Path(scratch) / "server.log"
        with _started(model, log, flags, command) as server:
            say(" ".join(server.argv))
            cold = _step(server, "cold", messages)
            ram = _step(server, "again, from RAM", messages)
            stopping = time.monotonic()
            with Progress("stopping the server with SIGTERM"):
                server.terminate()
            stop_s = time.monotonic() - stopping
        with _started(model, log, flags, command) as server:
            start_s = time.monotonic() - server.started
            restart = _step(server, "after a restart, from SSD", messages)
    return Outcome(str(model), (cold, ram, restart), stop_s, start_s)


def _started(model: Path, log: Path, flags: list[str], command: list[str]) -> Server:
    """A server that has loaded its model: upstream says that it is healthy before that."""
    with Progress("starting the server"):
        server = Server(model, log, flags, command=command)
        try:
            server.complete("Hello", max_tokens=1)
        except BaseException:
            server.kill()
            raise
    return server


def _step(server: Server, name: str, messages: list[dict[str, str]]) -> Step:
    with Progress(f"the chat, {name}") as progress:
        answer: Answer = server.chat(messages, max_tokens=_ANSWER_TOKENS, progress=progress)
    return Step(name, answer.ttft, answer.cached_tokens, answer.prompt_tokens, answer.text)


def table(outcome: Outcome) -> str:
    """The outcome for people."""
    cold = outcome.steps[0]
    rows = [("the same chat", "first token after", "of cold", "tokens reused", "answer")]
    for step in outcome.steps:
        same = "" if step is cold else "the same" if step.text == cold.text else "DIFFERS"
        share = step.ttft_s / cold.ttft_s
        reused = f"{step.cached_tokens:,} of {step.prompt_tokens:,}"
        rows.append((step.name, f"{step.ttft_s:.3f} s", f"{share:.1%}", reused, same))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_json(outcome: Outcome, file: Path) -> None:
    file.write_text(json.dumps(outcome.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
