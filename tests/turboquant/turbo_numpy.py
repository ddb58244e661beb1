"""The TurboQuant format once more, in NumPy, from its description; nothing of the plugin but its constants is used."""

from __future__ import annotations

import numpy as np

F, H = np.float32, np.float16


def stream(indices: np.ndarray, bits: int) -> np.ndarray:
    """A flat little-endian stream of bits over the last axis, as bytes."""
    each = (indices[..., None].astype(np.int64) >> np.arange(bits)) & 1
    return np.packbits(each.reshape(*indices.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


def unstream(packed: np.ndarray, bits: int) -> np.ndarray:
    each = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    return (each.astype(np.int64) << np.arange(bits)).sum(-1)


def half(x: np.ndarray) -> np.ndarray:
    return np.clip(x, F(-65504), F(65504)).astype(H).astype(F)


def keys(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed bytes, scales and zero points."""
    with np.errstate(all="ignore"):
        groups = x.astype(F).reshape(*x.shape[:-1], -1, 32)
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        first, last = (-127, 127) if bits == 8 else (0, 2**bits - 1)
        origin = (high + low) / F(2) if bits == 8 else low
        furthest = np.maximum(abs(low), abs(high)) / F(32752 if bits == 8 else 2040)
        s = half(np.maximum(np.maximum((high - low) / F(last - first), furthest), F(2**-24)))
        z = half(np.round(origin / s))
        index = np.clip(np.round(groups / s - z), first, last)
        # Constant groups.
        c = half(low) + F(0)
        fine = half(low / F(last))
        fine = np.where(fine == 0, F(2**-24), fine)
        rest = half(low / fine - F(last))
        exact, constant = c == low, low == high
        s = np.where(constant, np.where(exact, c, fine), s)
        z = np.where(constant, np.where(exact, F(1), rest), z)
        index = np.where(constant, np.where(exact, F(0), F(last)), index)
    unsigned = index.astype(np.int64) + (128 if bits == 8 else 0)
    return stream(unsigned.reshape(x.shape), bits), s[..., 0].astype(H), z[..., 0].astype(H)


def keys_back(packed: np.ndarray, s: np.ndarray, z: np.ndarray, bits: int) -> np.ndarray:
    index = unstream(packed, bits) - (128 if bits == 8 else 0)
    groups = index.reshape(*s.shape, 32).astype(F)
    return ((groups + z.astype(F)[..., None]) * s.astype(F)[..., None]).reshape(index.shape)


def hadamard(x: np.ndarray) -> np.ndarray:
    dim, h = x.shape[-1], 1
    while h < dim:
        pairs = x.reshape(*x.shape[:-1], -1, 2, h)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(x.shape)
        h *= 2
    return x * F(1 / np.sqrt(dim))


def values(x: np.ndarray, bits: int, book: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and scales."""
    groups = hadamard(x.astype(F) * signs.astype(F)).reshape(*x.shape[:-1], -1, 32)
    squares = groups * groups
    while squares.shape[-1] > 1:
        squares = squares[..., : squares.shape[-1] // 2] + squares[..., squares.shape[-1] // 2 :]
    s = half(np.sqrt(squares / F(32)))
    normal = np.where(s > 0, groups / np.where(s > 0, s, F(1)), F(0))
    middles = ((book[1:] + book[:-1]) / 2).astype(F)
    return stream(np.searchsorted(middles, normal).reshape(x.shape), bits), s[..., 0].astype(H)


def values_back(packed: np.ndarray, s: np.ndarray, bits: int, book: np.ndarray, signs: np.ndarray) -> np.ndarray:
    found = book.astype(F)[unstream(packed, bits)]
    rotated = (found.reshape(*s.shape, 32) * s.astype(F)[..., None]).reshape(found.shape)
    return hadamard(rotated) * signs.astype(F)
