"""What the blocks contain: one array for each plane of each layer, with room for every block of the pool.

An arena is (1, KV heads, blocks * block size, width): block b has the slots from
b * block size on. With heads first, blocks side by side are a view such as a plain
cache hands out; with blocks first, each step would have to copy them.

mlx writes into an array in place only while it has one handle. Nobody may keep
another one across a write: the next write would copy the whole arena.

Slots are read by indexing: on a processor `mx.take` along an axis takes twice as long (in bf16 20 times).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .sides import Sides

# Runs up to which their slices are put together; more are gathered block by block.
FEW_RUNS = 16

Run = tuple[int, int]  # slots, first and behind the last


class Arenas:
    """`layers` say what each layer's tokens look like. A layer's arrays, which are in `planes`, are made by its first write."""

    def __init__(self, layers: Sequence[Sides], blocks: int, block: int):
        self.layers = tuple(layers)
        self.blocks, self.block = blocks, block
        self.planes: list[tuple[mx.array, ...]] = [()] * len(self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block * sum(sides.token_bytes for sides in self.layers)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one block in one layer."""
        return self.block * self.layers[layer].token_bytes

    def make(self, layer: int) -> None:
        """Make a layer's arrays, if they are not made yet."""
        if not self.planes[layer]:
            slots = self.blocks * self.block
            self.planes[layer] = tuple(mx.zeros((1, plane.heads, slots, plane.width), plane.dtype) for plane in self.layers[layer].planes)

    def settle(self, layer: int) -> None:
        """Compute a layer's arrays, made if need be."""
        self.make(layer)
        mx.eval(self.planes[layer])

    def write(self, layer: int, runs: Sequence[Run], arrays: Sequence[mx.array]) -> None:
        """Put tokens, (1, heads, tokens, width) of each plane, into slots, in order. Raises ValueError when they are not the layer's."""
        self._check(layer, arrays)
        at, tokens = 0, arrays[0].shape[2]
        for start, stop in runs:
            whole = at == 0 and stop - start == tokens
            for arena, array in zip(self.planes[layer], arrays, strict=True):
                arena[:, :, start:stop] = array if whole else array[:, :, at : at + stop - start]
            at += stop - start

    def scatter(self, layer: int, slots: mx.array, arrays: Sequence[mx.array]) -> None:
        """Put one token of each row, (rows, heads, 1, width) of each plane, into its slot."""
        self._check(layer, arrays)
        for arena, array in zip(self.planes[layer], arrays, strict=True):
            arena[:, :, slots] = array[:, :, 0].swapaxes(0, 1)[None]

    def read(self, layer: int, runs: Sequence[Run]) -> list[mx.array]:
        """What is in slots, (1, heads, tokens, width) of each plane: views of one run, copies of several. Runs but the first begin with a block."""
        assert self.planes[layer]
        return [self._read(arena, runs) for arena in self.planes[layer]]

    def copied(self, layer: int, tensor: int, runs: Sequence[Run]) -> mx.array:
        """One of the layer's `tensors` in slots as an array of its own."""
        assert self.planes[layer]
        slots = mx.concatenate([mx.arange(start, stop) for start, stop in runs])
        return self.layers[layer].stored([arena[:, :, slots] for arena in self.planes[layer]])[tensor]

    def padded(self, layer: int, slots: mx.array) -> list[mx.array]:
        """What is in `slots` (rows, tokens), as (rows, heads, tokens, width) of each plane, copies."""
        assert self.planes[layer]
        rows, flat = len(slots), slots.reshape(-1)
        return [arena[:, :, flat].reshape(arena.shape[1], rows, -1, arena.shape[3]).swapaxes(0, 1) for arena in self.planes[layer]]

    def copy(self, source: int, target: int) -> None:
        """Copy a block's slots, in every layer that has any."""
        slots = mx.arange(source * self.block, (source + 1) * self.block)
        arenas = [arena for planes in self.planes for arena in planes]
        # Computed before anything is written: until then each is a second handle on its arena.
        copies = [arena[:, :, slots] for arena in arenas]
        mx.eval(copies)
        for arena, copied in zip(arenas, copies, strict=True):
            arena[:, :, target * self.block : (target + 1) * self.block] = copied

    def _check(self, layer: int, arrays: Sequence[mx.array]) -> None:
        planes = self.layers[layer].planes
        tokens = arrays[0].shape[2:3]
        for plane, array in zip(planes, arrays, strict=True):
            shape = array.shape
            if len(shape) != 4 or shape[2:3] != tokens or shape[1] != plane.heads or shape[3] != plane.width or array.dtype != plane.dtype:
                raise ValueError(f"{plane.name} {shape} of {array.dtype} are not what the blocks were made for")
        self.make(layer)

    def _read(self, arena: mx.array, runs: Sequence[Run]) -> mx.array:
        if len(runs) == 1:
            return arena[:, :, runs[0][0] : runs[0][1]]
        if len(runs) <= FEW_RUNS or runs[0][0] % self.block:
            return mx.concatenate([arena[:, :, start:stop] for start, stop in runs], axis=2)
        blocks = [b for start, stop in runs for b in range(start // self.block, -(-stop // self.block))]
        shape = arena.shape
        gathered = arena.reshape(*shape[:2], self.blocks, self.block, shape[3])[:, :, mx.array(blocks)]
        return gathered.reshape(*shape[:2], -1, shape[3])[:, :, : sum(stop - start for start, stop in runs)]
