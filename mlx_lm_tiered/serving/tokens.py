"""The tokens of prompts, away from the engine."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..prompts import Prompt, Template, decode, tokenizer_of, tokens_of


class Tokens:
    """The tokens of prompts, by a tokenizer of its own: the server's belongs to its generation thread. Thread-safe."""

    def __init__(self, args: argparse.Namespace | None):
        self._template = template_of(args)
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._tokenizer: Any = None

    def of(self, path: Path, prompt: Prompt) -> list[int]:
        """The tokens that the model in `path` gets. The first call for a model takes seconds. Raises BadPrompt."""
        with self._lock:
            return tokens_of(self._for(path), prompt, self._template)

    def text(self, path: Path, tokens: Sequence[int]) -> str:
        """What tokens of the model in `path` stand for."""
        with self._lock:
            return decode(self._for(path), tokens)

    def forget(self) -> None:
        """Let go of the tokenizer."""
        with self._lock:
            self._path = self._tokenizer = None

    def _for(self, path: Path) -> Any:
        if self._path != path:
            self._tokenizer = tokenizer_of(path, self._template)
            self._path = path
        return self._tokenizer


def template_of(args: argparse.Namespace | None) -> Template:
    """The server's flags that decide what becomes of messages."""
    return Template(
        chat_template=getattr(args, "chat_template", None) or None,
        use_default=bool(getattr(args, "use_default_chat_template", False)),
        arguments=getattr(args, "chat_template_args", None) or {},
        trust_remote_code=bool(getattr(args, "trust_remote_code", False)),
    )
