"""What the blocks contain: one array of keys and one of values for each layer, with room for every block of the pool.

An arena is (1, KV heads, blocks * block size, dim): block b has the slots from
b * block size on. With heads first, blocks side by side are a view such as a plain
cache hands out; with blocks first, each step would have to copy them.

mlx writes into an array in place only while it has one handle. Nobody may keep
another one across a write: the next write would copy the whole arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

# Runs up to which their slices are put together; more are gathered block by block.
FEW_RUNS = 16

Run = tuple[int, int]  # slots, first and behind the last


@dataclass(frozen=True)
class Sides:
    """Heads, dimensions and type of one layer's keys and values."""

    heads: int
    key_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in this layer."""
        return self.heads * (self.key_dim * self.key_dtype.size + self.value_dim * self.value_dtype.size)

    @staticmethod
    def of(keys: mx.array, values: mx.array) -> Sides:
        """Those of (rows, heads, tokens, dim). Raises ValueError where keys and values differ in heads."""
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {keys.shape} and values {values.shape} are not of the same tokens and heads")
        return Sides(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)


class Arenas:
    """`layers` say what each layer's tokens look like. A layer's arrays are made by its first write."""

    def __init__(self, layers: Sequence[Sides], blocks: int, block: int):
        self.layers = tuple(layers)
        self.blocks, self.block = blocks, block
        self.keys: list[mx.array | None] = [None] * len(self.layers)
        self.values: list[mx.array | None] = [None] * len(self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block * sum(sides.token_bytes for sides in self.layers)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one block in one layer."""
        return self.block * self.layers[layer].token_bytes

    def make(self, layer: int) -> None:
        """Make a layer's arrays, if they are not made yet."""
        if self.keys[layer] is None:
            sides, slots = self.layers[layer], self.blocks * self.block
            self.keys[layer] = mx.zeros((1, sides.heads, slots, sides.key_dim), sides.key_dtype)
            self.values[layer] = mx.zeros((1, sides.heads, slots, sides.value_dim), sides.value_dtype)

    def settle(self, layer: int) -> None:
        """Compute a layer's arrays, made if need be."""
        self.make(layer)
        mx.eval(self.keys[layer], self.values[layer])

    def write(self, layer: int, runs: Sequence[Run], keys: mx.array, values: mx.array) -> None:
        """Put tokens (1, heads, tokens, dim) into slots, in order. Raises ValueError when they are not the layer's."""
        self._check(layer, keys, values)
        at = 0
        for start, stop in runs:
            whole = at == 0 and stop - start == keys.shape[2]
            for arena, side in ((self.keys[layer], keys), (self.values[layer], values)):
                arena[:, :, start:stop] = side if whole else side[:, :, at : at + stop - start]  # type: ignore[index]
            at += stop - start

    def scatter(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Put one token of each row (rows, heads, 1, dim) into its slot."""
        self._check(layer, keys, values)
        for arena, side in ((self.keys[layer], keys), (self.values[layer], values)):
            arena[:, :, slots] = side[:, :, 0].swapaxes(0, 1)[None]  # type: ignore[index]

    def read(self, layer: int, runs: Sequence[Run]) -> tuple[mx.array, mx.array]:
        """Keys and values in slots, (1, heads, tokens, dim): a view of one run, a copy of several. Runs but the first begin with a block."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return self._read(keys, runs), self._read(values, runs)

    def copied(self, layer: int, side: str, runs: Sequence[Run]) -> mx.array:
        """`keys` or `values` in slots as an array of their own, of one layer."""
        arena = (self.keys if side == "keys" else self.values)[layer]
        assert arena is not None
        return mx.take(arena, mx.concatenate([mx.arange(start, stop) for start, stop in runs]), axis=2)

    def padded(self, layer: int, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values in `slots` (rows, tokens), as (rows, heads, tokens, dim), a copy."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return tuple(mx.take(side[0], slots, axis=1).swapaxes(0, 1) for side in (keys, values))  # type: ignore[return-value]

    def copy(self, source: int, target: int) -> None:
        """Copy a block's slots, in every layer that has any."""
        slots = mx.arange(source * self.block, (source + 1) * self.block)
        arenas = [arena for arena in (*self.keys, *self.values) if arena is not None]
        # Computed before anything is written: until then each is a second handle on its arena.
        copies = [mx.take(arena, slots, axis=2) for arena in arenas]
        mx.eval(copies)
        for arena, copied in zip(arenas, copies, strict=True):
            arena[:, :, target * self.block : (target + 1) * self.block] = copied

    def _check(self, layer: int, keys: mx.array, values: mx.array) -> None:
        if Sides.of(keys, values) != self.layers[layer]:
            raise ValueError(f"keys {keys.shape} of {keys.dtype} and values {values.shape} of {values.dtype} are not what the blocks were made for")
        self.make(layer)

    def _read(self, arena: mx.array, runs: Sequence[Run]) -> mx.array:
        if len(runs) == 1:
            return arena[:, :, runs[0][0] : runs[0][1]]
        if len(runs) <= FEW_RUNS or runs[0][0] % self.block:
            return mx.concatenate([arena[:, :, start:stop] for start, stop in runs], axis=2)
        blocks = [b for start, stop in runs for b in range(start // self.block, -(-stop // self.block))]
        shape = arena.shape
        gathered = mx.take(arena.reshape(*shape[:2], self.blocks, self.block, shape[3]), mx.array(blocks), axis=2)
        return gathered.reshape(*shape[:2], -1, shape[3])[:, :, : sum(stop - start for start, stop in runs)]
