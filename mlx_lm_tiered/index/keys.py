"""Token sequences as bytes: keys, of 8 bytes a token, and packed ones, of 4 where the tokens allow that, which all but images' do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WIDTH = 8  # bytes per token: image content is named by ids of up to 60 bits


def token_key(tokens: Sequence[int] | np.ndarray) -> bytes:
    """The tokens as big-endian int64s: equal prefixes of tokens are equal prefixes of bytes."""
    return np.asarray(tokens, dtype=">i8").tobytes()


def key_tokens(key: bytes) -> list[int]:
    """The tokens of a key."""
    return np.frombuffer(key, dtype=">i8").tolist()


def common_tokens(a: bytes, b: bytes, width: int = WIDTH) -> int:
    """How many leading tokens two keys share, of `width` bytes each."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // width
    x = np.frombuffer(a, dtype=np.uint8, count=n)
    y = np.frombuffer(b, dtype=np.uint8, count=n)
    return int((x != y).argmax()) // width


def pack(key: bytes) -> bytes:
    """A key's tokens as big-endian uint32s; the key itself when one of them does not fit."""
    words = np.frombuffer(key, ">u4").reshape(-1, 2)
    return key if words[:, 0].any() else words[:, 1].tobytes()


def unpack(packed: bytes, length: int) -> bytes:
    """The key of `length` tokens that was packed."""
    if len(packed) == 8 * length:
        return packed
    words = np.zeros((length, 2), ">u4")
    words[:, 1] = np.frombuffer(packed, ">u4")
    return words.tobytes()


def packed_part(key: bytes) -> bytes:
    """As many of the first tokens as can be packed, packed."""
    words = np.frombuffer(key, ">u4").reshape(-1, 2)
    high = words[:, 0] != 0
    return words[: int(high.argmax()) if high.any() else len(words), 1].tobytes()
