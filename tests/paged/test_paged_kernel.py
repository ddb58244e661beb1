"""Where a device has a kernel over blocks, rows are given to it, and what it does not do is computed as without it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from paged_models import TOKENS, forward, model_of, new_caches, storage_for

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.paged import attention
from mlx_lm_tiered.paged.kernel import OverBlocks


class Reference:
    """Stands for `Kernels` on a device that has the kernel: gathers by table and lengths, in NumPy."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # rows and tokens

    def attend_blocks(self, queries: Any, keys: Any, values: Any, table: Any, lengths: Any, scale: float, block: int, longest: int) -> mx.array:
        q, k, v, listed = (np.array(array) for array in (queries, keys, values, table))
        rows, heads, tokens, dim = q.shape
        self.calls.append((rows, tokens))
        out = np.zeros((rows, heads, tokens, v.shape[3]), np.float32)
        assert longest == max(lengths.tolist()[:rows])
        for row in range(rows):
            held = lengths.tolist()[row]
            slots = [listed[row, at // block] * block + at % block for at in range(held)]
            for head in range(heads):
                kv = head * k.shape[1] // heads
                for token in range(tokens):
                    seen = held - tokens + token + 1
                    scores = k[0, kv, slots[:seen]] @ q[row, head, token] * scale
                    weights = np.exp(scores - scores.max())
                    out[row, head, token] = weights / weights.sum() @ v[0, kv, slots[:seen]]
        return mx.array(out)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", attention.build(base.quantized_scaled_dot_product_attention))
    return storage_for("dense", 16)


def batch_of(storage: Any, lengths: list[int]) -> list[Any]:
    rows = [new_caches("dense", storage) for _ in lengths]
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        forward("dense", row, TOKENS[50 * number : 50 * number + length])
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


@pytest.mark.parametrize("tokens", (1, 3))
def test_rows_of_few_tokens_are_the_kernels(storage, tokens: int):
    steps = [mx.array([TOKENS[100:103], TOKENS[200:203]])[:, :tokens], mx.array([[5], [6]])]
    plain = batch_of(storage, [40, 21])
    expected = [model_of("dense")(step, cache=plain) for step in steps]
    mx.eval(expected)
    kernels = Reference()
    storage.attend = OverBlocks(kernels)
    batch = batch_of(storage, [40, 21])
    for step, logits in zip(steps, expected, strict=True):
        assert mx.allclose(model_of("dense")(step, cache=batch), logits, atol=2e-3)
    assert kernels.calls == [(2, tokens)] * 3 + [(2, 1)] * 3


def test_one_row_is_a_view_where_it_is_one_run_and_the_kernels_where_it_is_not(storage):
    kernels = Reference()
    storage.attend = OverBlocks(kernels)
    batch = batch_of(storage, [40])
    forward("dense", batch, [7])
    assert kernels.calls == [] and not hasattr(batch[0], "bits")
    fork = [cache.extract(0) for cache in batch]
    held = storage.pool.take(4, after=batch[0].tables[0].blocks[-1])
    row = kinds.merge_row(fork)
    assert row is not None
    # The batch writes first, and so copies its last block, to behind those in the way.
    found = forward("dense", batch, [9])
    storage.pool.let_go(held)
    assert mx.allclose(found, forward("dense", row, [9]), atol=2e-3)
    assert kernels.calls == [(1, 1)] * 3 and hasattr(batch[0], "bits") and not hasattr(row[0], "bits")


def test_prefills_of_rows_and_padded_rows_are_not(storage):
    kernels = Reference()
    storage.attend = OverBlocks(kernels)
    batch = batch_of(storage, [40, 21])
    for cache in batch:
        cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    forward_rows = model_of("dense")(mx.array([TOKENS[:3], TOKENS[:3]]), cache=batch)
    mx.eval(forward_rows)
    for cache in batch:
        cache.finalize()
    mx.eval(model_of("dense")(mx.array([TOKENS[:12], TOKENS[:12]]), cache=batch))
    assert kernels.calls == [] and batch[0].lengths == [55, 34]
