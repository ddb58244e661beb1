"""Reading a header that anybody may have written: every value is what it should be, or the entry is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_NESTING = 48


class BadEntry(Exception):
    """A file is not a sound entry; its text is one sentence saying why."""


class ForeignEntry(BadEntry):
    """A sound file of another format version: to be ignored, not quarantined."""


def counts(value: Any, limit: int) -> bool:
    """Whether this is a list of whole numbers, none negative, all below `limit`."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < limit for n in value)


def text_of(texts: dict[str, Any], key: str) -> str:
    value = texts.get(key)
    if not isinstance(value, str):
        raise BadEntry(f"The metadata lacks {key!r}.")
    return value


def number_of(texts: dict[str, Any], key: str) -> int:
    value = text_of(texts, key)
    if not value.isascii() or not value.isdigit() or len(value) > 20:
        raise BadEntry(f"The metadata's {key!r} is not a number.")
    return int(value)


def strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadEntry("The metadata holds something that is not a list of strings.")
    return tuple(value)


def json_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadEntry(f"The {what} is not a JSON object.")
    return value


def parse_json(source: str | bytes) -> Any:
    """JSON without duplicate keys, NaN, text that no encoding has, or nesting beyond `MAX_NESTING`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("duplicate keys")
        return found

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        value = json.loads(source, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadEntry("The header is not sound JSON.") from error
    if not encodable(value):
        raise BadEntry("The header holds half a character.")
    level = [value]
    for _ in range(MAX_NESTING):
        level = [x for item in level for x in _children(item)]
        if not all(map(encodable, level)):
            raise BadEntry("The header holds half a character.")
        if not level:
            return value
    raise BadEntry("The header is nested too deeply.")


def encodable(value: Any) -> bool:
    """Whether a string, or the keys of an object, can be printed, hashed and stored: JSON may hold surrogates alone, which cannot."""
    texts = value if isinstance(value, dict) else (value,)
    try:
        return all(text.isascii() or text.encode() is not None for text in texts if isinstance(text, str))
    except UnicodeEncodeError:
        return False


def _children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else []
