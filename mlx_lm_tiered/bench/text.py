"""A long English text that every Python installation has: its own reference topics."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _whole() -> str:
    try:
        from pydoc_data.topics import topics as found

        topics: dict[str, str] = dict(found)
    except ImportError:  # Some distributions leave it out; the built-in functions' help is always there.
        import builtins

        topics = {name: getattr(builtins, name).__doc__ or "" for name in sorted(vars(builtins))}
    texts = (topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))
    plain = (re.sub(r"[*`^~=#-]{2,}|[*`]", "", text) for text in texts)
    return re.sub(r"\s+", " ", " ".join(plain))


def document(characters: int) -> str:
    """The first `characters` characters of it, white space collapsed; repeated when that is more than there is."""
    text = _whole()
    return (text * (characters // len(text) + 1))[:characters]


def long_document(model: Path, tokens: int) -> str:
    """About that many tokens of English, counted with the model's tokenizer when it is a directory here."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return document(4 * tokens)
    from tokenizers import Tokenizer

    text = document(8 * tokens)
    offsets = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).offsets
    return text[: offsets[min(tokens, len(offsets)) - 1][1]]


def first_tokens(tokenizer: Any, count: int) -> list[int]:
    """The first `count` tokens of it."""
    tokens: list[int] = []
    characters = 4 * count
    while len(tokens) < count:
        tokens = tokenizer.encode(document(characters))
        characters *= 2
    return tokens[:count]
