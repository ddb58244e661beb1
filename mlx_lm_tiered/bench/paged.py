"""Paged KV beside the same caches without paging, in this process, with mlx-lm's batches as its server has them. Under a KV scheme both hold what the scheme makes of KV.

``token_bytes_ratio`` is the bytes of a token in blocks over those of its keys and values as the model makes them.
``decode_ratio_b1`` is a decode step without paging over one over blocks, of one row
after `context` tokens; pairs in turns. With `steps` of a model of random weights, whose
caches are filled with random numbers, ``pieces_ratio`` is the same where no two blocks lie side by side, which a
kernel reads where the device has one, and mlx gathers otherwise; ``rows_ratio`` a step of 8 rows of mixed
lengths in a padded batch over one over such blocks, and ``rows_furthest_logit`` how far their logits are from each other, of the largest.

``mixed_lengths_kv_ratio`` is the most bytes that blocks take while 8 requests of
different lengths are served at once, over what their tokens take, the end of each
reply included; ``mixed_lengths_padded_ratio`` the same of mlx-lm's padded batch,
``mixed_lengths_speed_ratio`` its time over that of blocks.

``shared_prefix_kv_ratio`` is the most bytes that blocks take while 16 requests with one
system prompt of `shared` tokens are served, over those of the prompt and of each one's own
tokens; ``shared_prefix_ttft_ratio`` the longest time to the first token of those that
found the prompt stored, each alone, over that of the first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.paged.kernel import OverBlocks
from mlx_lm_tiered.paged.table import Storage
from mlx_lm_tiered.schemes.spec import parse

from .in_process import loaded
from .paging import Paging, paging
from .report import spread

logger = logging.getLogger("mlx_lm_tiered")

CHUNK = 2048
MIXED, SHARING = 8, 16
STEPS = 16


def run(
    model_path: Path | None, context: int = 4096, longest: int = 8192, shared: int = 8192, own: int = 64, decode: int = 64, block: int = 64, repeats: int = 5, model: Any = None, scheme: str = "bf16"
) -> dict[str, Any]:  # fmt: skip
    """Measure it, of a model on disk or of `model`. Raises ValueError for a model that paging cannot serve, or that cannot have the KV scheme."""
    spec = parse(scheme)
    if model is None:
        assert model_path is not None
        model, _ = loaded(model_path, [spec])
    with paging(model, spec, logger.warning) as under:
        bench = _Bench(under, block)
        return {
            "bench": "paged", "scheme": str(spec), "context": context, "block": block, "device": str(mx.default_device()), "token_bytes_ratio": under.token_bytes_ratio,
            **bench.alone(context, repeats), **bench.mixed(longest, decode), **bench.shared(shared, own, decode),
        }  # fmt: skip


def steps(
    contexts: Sequence[int] = (16384, 65536), layers: int = 32, hidden: int = 4096, block: int = 256, repeats: int = 5, scheme: str = "bf16", longest: int = 8192
) -> dict[str, Any]:  # fmt: skip
    """Decode steps of an 8B Llama's shape (or another) with random weights in bf16: one row a context, and several of up to `longest` tokens."""
    from .decode_model import random_llama

    faults: list[str] = []
    spec, model = parse(scheme), random_llama(layers, hidden)
    with paging(model, spec, faults.append) as under:
        bench, rows = _Bench(under, block), []
        for context in contexts:
            whole = bench.alone(context, repeats, filled=True)
            pieces = bench.alone(context, repeats, filled=True, apart=True)
            rows.append({"tokens": context, **whole, "pieces_ratio": pieces["decode_ratio_b1"], "pieces_step_ms": pieces["paged_step_ms"]})
            mx.clear_cache()
        together, kernels = bench.together(longest, repeats), under.kernels
        return {
            "bench": "paged", "scheme": str(spec), "block": block, "layers": layers, "hidden": hidden, "token_bytes_ratio": under.token_bytes_ratio,
            "kernels": kernels.state, "failed": kernels.failed, "faults": faults, **together, "rows": rows,
        }  # fmt: skip


class _Bench:
    def __init__(self, under: Paging, block: int):
        self._model, self._plan, self._block, self._caches = under.model, under.plan, block, under.caches
        self._attend = OverBlocks(under.kernels) if under.kernels.state == "on" else None

    def alone(self, context: int, repeats: int, filled: bool = False, apart: bool = False) -> dict[str, float]:
        """Steps of one row, in pairs that take turns; after a prefill, or over caches `filled` with random numbers. `apart`: no two blocks lie side by side."""
        tokens = context + (repeats + 1) * 2 * STEPS + self._block
        storage = self._storage(tokens, apart)
        rows = []
        for caches in (self._caches(), self._plan.apply(self._caches(), storage)):
            if filled:
                self._fill(caches, context)
            else:
                self._prefill(caches, _text(context, 0))
            row = kinds.merge_row(caches)
            assert row is not None
            rows.append(row)
        plain, blocks = self._in_turns(rows, repeats)
        return {**spread("decode_ratio_b1", [a / b for a, b in zip(plain, blocks, strict=True)]), "plain_step_ms": median(plain) * 1e3, "paged_step_ms": median(blocks) * 1e3}

    def together(self, longest: int, repeats: int) -> dict[str, float]:
        """The same of rows of mixed lengths, over blocks that lie apart and in a padded batch; and how far logits are from each other."""
        lengths = _mixed(longest)
        storage = self._storage(sum(lengths) + MIXED * ((repeats + 1) * 2 * STEPS + 2 * self._block), apart=True)
        batches = []
        for made in (self._caches, lambda: self._plan.apply(self._caches(), storage)):
            rows = [made() for _ in lengths]
            for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                self._fill(row, length, number)
            batches.append([type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)])
            del rows
        logits = [self._model(mx.arange(1, 1 + MIXED)[:, None], cache=batch)[:, -1].astype(mx.float32) for batch in batches]
        furthest: Any = (mx.abs(logits[0] - logits[1]).max(axis=-1) / mx.abs(logits[0]).max(axis=-1)).max().item()
        padded, blocks = self._in_turns(batches, repeats, MIXED)
        return {
            **spread("rows_ratio", [a / b for a, b in zip(padded, blocks, strict=True)]), "rows_padded_step_ms": median(padded) * 1e3, "rows_paged_step_ms": median(blocks) * 1e3,
            "rows_furthest_logit": furthest,
        }  # fmt: skip

    def mixed(self, longest: int, decode: int) -> dict[str, float]:
        """Requests of lengths from an eighth of an eighth of the longest on."""
        lengths = _mixed(longest)
        prompts = [_text(length, 1000 * i) for i, length in enumerate(lengths)]
        need = sum(length + decode for length in lengths) * self._plan.token_bytes
        storage = self._storage(sum(lengths) + MIXED * (decode + 2 * self._block))
        plain, plain_seconds = self._serve(prompts, [self._caches() for _ in prompts], decode, lambda batch: sum(c.nbytes for c in batch))
        caches = [self._plan.apply(self._caches(), storage) for _ in prompts]
        blocks, seconds = self._serve(prompts, caches, decode, lambda batch: storage.pool.used * storage.arenas.block_bytes)
        del caches
        return {"mixed_lengths_kv_ratio": blocks / need, "mixed_lengths_padded_ratio": plain / need, "mixed_lengths_speed_ratio": plain_seconds / seconds}

    def shared(self, shared: int, own: int, decode: int) -> dict[str, float]:
        """A system prompt that is computed once and then found, as the RAM tier lends it."""
        storage = self._storage(shared + self._block + SHARING * (own + decode + 2 * self._block))
        system = _text(shared, 7)
        first = self._plan.apply(self._caches(), storage)
        started = time.perf_counter()
        self._prefill(first, system)
        stored = kinds.lend(first)
        self._prefill(first, _text(own, 50_000))
        cold = time.perf_counter() - started
        rows, waits = [first], []
        for number in range(1, SHARING):
            started = time.perf_counter()
            caches = kinds.lend(stored)
            self._prefill(caches, _text(own, 50_000 + 500 * number))
            waits.append(time.perf_counter() - started)
            rows.append(caches)
        del stored, caches, first
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]
        del rows
        token = mx.ones((SHARING, 1), mx.int32)
        for _ in range(decode):
            token = mx.argmax(self._model(token, cache=batch)[:, -1:], axis=-1)
            mx.eval(token, [c.state for c in batch])
        peak = storage.pool.peak * storage.arenas.block_bytes
        need = (shared + SHARING * (own + decode)) * self._plan.token_bytes
        return {"shared_prefix_kv_ratio": peak / need, "shared_prefix_ttft_ratio": max(waits) / cold, "shared_prefix_cold_ms": cold * 1e3, "shared_prefix_found_ms": max(waits) * 1e3}

    def _storage(self, tokens: int, apart: bool = False) -> Storage:
        """With room for so many; `apart`: of no two free blocks that lie side by side."""
        storage = self._plan.storage((2 if apart else 1) * (-(-tokens // self._block) + 1), self._block)
        storage.attend = self._attend
        if apart:
            storage.pool.let_go(storage.pool.take(storage.pool.total)[::2])
        return storage

    def _in_turns(self, batches: Sequence[list[Any]], repeats: int, rows: int = 1) -> list[list[float]]:
        """Seconds of steps of each, after a round that warms up."""
        times: list[list[float]] = [[] for _ in batches]
        for number in range(repeats + 1):
            for place in (0, 1) if number % 2 else (1, 0):
                times[place].append(self._steps(batches[place], rows))
        return [one[1:] for one in times]

    def _prefill(self, caches: list[Any], tokens: list[int]) -> None:
        logits = None
        for at in range(0, len(tokens), CHUNK):
            logits = self._model(mx.array([tokens[at : at + CHUNK]]), cache=caches)[:, -1]
            mx.eval([c.state for c in caches])
            mx.clear_cache()
        mx.eval(logits)

    def _fill(self, caches: list[Any], tokens: int, seed: int = 0) -> None:
        """Put random keys and values, the same for a seed, into caches of full attention."""
        keys_of = iter(mx.random.split(mx.random.key(seed), 2 * len(caches) * -(-tokens // CHUNK)))
        for cache, sides in zip(caches, self._plan.sides, strict=True):
            assert sides is not None
            for at in range(0, tokens, CHUNK):
                shape = (1, sides.heads, min(CHUNK, tokens - at))
                keys = mx.random.normal((*shape, sides.key_dim), key=next(keys_of)).astype(sides.key_dtype)
                values = mx.random.normal((*shape, sides.value_dim), key=next(keys_of)).astype(sides.value_dtype)
                cache.update_and_fetch(keys, values)
                mx.eval(cache.state)

    def _steps(self, batch: list[Any], rows: int = 1) -> float:
        """Seconds a step, the next one queued before the last one's token is read."""
        token = mx.ones((rows, 1), mx.int32)
        started = time.perf_counter()
        for _ in range(STEPS):
            following = mx.argmax(self._model(token, cache=batch)[:, -1:], axis=-1)
            mx.async_eval(following)
            mx.eval(token)
            token = following
        mx.eval(token)
        return (time.perf_counter() - started) / STEPS

    def _serve(self, prompts: Sequence[list[int]], caches: list[list[Any]], decode: int, nbytes: Any) -> tuple[int, float]:
        """The most bytes of a batch's caches, and seconds until all replies are done."""
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(self._model, max_tokens=decode, prefill_step_size=CHUNK, prefill_batch_size=len(prompts), completion_batch_size=len(prompts))
        started = time.perf_counter()
        generator.insert([list(prompt) for prompt in prompts], [decode] * len(prompts), caches=caches)
        caches.clear()
        most = 0
        while True:
            seen, responses = generator.next()
            if not seen and not responses:
                break
            held = [c for batch in (generator._prompt_batch, generator._generation_batch) for c in batch.prompt_cache]
            most = max(most, nbytes(held))
        seconds = time.perf_counter() - started
        generator.close()
        return most, seconds


def _mixed(longest: int) -> list[int]:
    """Tokens of each request."""
    return [max(1, round(longest ** (i / (MIXED - 1)) * 64 ** (1 - i / (MIXED - 1)))) for i in range(MIXED)]


def _text(tokens: int, seed: int) -> list[int]:
    """Token ids that are all different prompts' own; what they say does not matter."""
    text: Any = mx.random.randint(1, 1000, (tokens,), key=mx.random.key(seed)).tolist()
    return text

