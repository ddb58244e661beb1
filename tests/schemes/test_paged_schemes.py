"""A scheme's caches in blocks give the numbers of the same scheme without paging, bit for bit, share what they have in common, and are the same on disk."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base, cache
from scheme_families import WIDE, wide
from scheme_runs import prompt, scheme

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.kernels import check
from mlx_lm_tiered.memory.footprint import Footprint
from mlx_lm_tiered.paged import attention, plan
from mlx_lm_tiered.paged.cache import PagedKVCache
from mlx_lm_tiered.paged.kernel import OverBlocks
from mlx_lm_tiered.paged.moving import into_blocks, out_of_blocks
from mlx_lm_tiered.paged.scheme import Pages
from mlx_lm_tiered.paged.table import Table
from mlx_lm_tiered.plugin import current
from mlx_lm_tiered.schemes import attention as schemes_attention
from mlx_lm_tiered.schemes.convert import leaves
from mlx_lm_tiered.schemes.lockstep import Lockstep
from mlx_lm_tiered.schemes.scheme import Scheme
from mlx_lm_tiered.schemes.spec import parse
from mlx_lm_tiered.speculation.assistant.borrowed import borrowed
from mlx_lm_tiered.statistics import Statistics
from support.cache_bytes import through_bytes
from support.joining import prompts, together

BLOCKS = (1, 16, 256)
TOKENS = prompt(400, 3)
# (family, scheme, dimension of the heads): widths and groups, rings beside, layers that read others', sinks, recurrent state.
FORMS = [
    ("dense", "affine:2:32", 32), ("dense", "affine:3:64", 64), ("dense", "affine:4:32", 32), ("dense", "affine:8:128", 128), ("dense", "turbo", 64), ("dense", "turbo:k4v5", 256),
    ("sliding", "affine:5:32", 32), ("sliding", "turbo", 64), ("kv-shared", "affine:6:32", 32), ("kv-donors", "affine:4:32", 32), ("sinks", "affine:8:32", 32),
    ("hybrid", "affine:4:32", 32), ("moe", "affine:4:32", 32),
]  # fmt: skip
# Those of which blocks of every size are tried.
EACH = [("dense", "affine:4:32", 32), ("dense", "turbo", 64), ("sliding", "affine:5:32", 32)]


class World:
    """A model under a scheme, with paging and without."""

    def __init__(self, family: str, block: int, tokens: int = 1000):
        self.model = wide(family)
        self.pages = Pages(block, 1 << 24, Statistics(), "off", current().scheme())
        self.upstream = base.quantized_scaled_dot_product_attention
        self.plain()
        found = plan.make(self.model, self.unquantized(), self.pages.scheme.plan_of(self.model))
        assert found is not None
        self.plan, self.storage = found, found.storage(tokens // block + 4, block)

    def unquantized(self) -> list[Any]:
        return self.model.make_cache() if hasattr(self.model, "make_cache") else [cache.KVCache() for _ in self.model.layers]

    def plain(self) -> list[Any]:
        """Of the scheme, without paging."""
        return cache.make_prompt_cache(self.model)

    def paged(self) -> list[Any]:
        return self.plan.apply(self.plain(), self.storage)

    def forward(self, caches: list[Any], tokens: list[int]) -> bytes:
        logits = self.model(mx.array([tokens]), cache=caches)
        mx.eval(logits, [c.state for c in caches])
        return np.array(logits).tobytes()

    def scatter(self) -> None:
        """Take blocks in the way, so that nothing is one run."""
        pool = self.storage.pool
        self.held = pool.take(pool.total)
        pool.let_go(self.held[::2])


@contextlib.contextmanager
def world(family: str, text: str, block: int, dim: int = 32) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patched, scheme(text):
        if dim != 32:
            patched.setitem(WIDE, family, WIDE[family] | {"head_dim": dim})
        patched.setattr(base, "quantized_scaled_dot_product_attention", attention.build(base.quantized_scaled_dot_product_attention))
        yield World(family, block)
        assert current().report()["faults"] == {}  # the scheme is on


def keep_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA."""
    monkeypatch.setattr(schemes_attention, "caches_use", lambda kernels: None)
    monkeypatch.setattr(Lockstep, "keeps_records", True)


def paged_leaves(caches: list[Any]) -> list[PagedKVCache]:
    return [leaf for leaf in leaves(caches) if isinstance(leaf, PagedKVCache)]


@pytest.mark.parametrize("family, text, dim, block", [(*form, block) for form in FORMS for block in (BLOCKS if form in EACH else (16,))])
def test_logits_are_those_without_paging_around_every_border(family: str, text: str, dim: int, block: int):
    with world(family, text, block, dim) as it:
        plain, paged = it.plain(), it.paged()
        at = 0
        for chunk in (15, 1, 1, 15, 1, 223, 1, 1, 20):  # to 15, 16, 17, 32, 33, 256, 257, 258 and 278 tokens
            tokens = TOKENS[at : at + chunk]
            assert it.forward(plain, tokens) == it.forward(paged, tokens), (at, chunk)
            at += chunk
        own = paged_leaves(paged)
        assert it.storage.pool.used == -(-at // block) and len(own[0].table.slots(0, at)) == 1 and all(hasattr(leaf, "bits") for leaf in own)
        # A token in blocks takes what the scheme says, and no more.
        full = [layer for layers in it.pages.scheme.plan_of(it.model).layers for layer in layers if layer.type == "full"]
        assert it.plan.token_bytes == sum(layer.quantized for layer in full) == sum(kinds.nbytes([leaf]) for leaf in own) / (-(-at // block) * block)
        del paged, own
        assert it.storage.pool.used == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("family, text, dim", [("dense", "affine:4:32", 32), ("dense", "turbo", 64), ("sliding", "affine:8:32", 32)])
def test_logits_are_the_same_where_blocks_lie_apart(family: str, text: str, dim: int, block: int):
    with world(family, text, block, dim) as it:
        it.scatter()
        plain, paged = it.plain(), it.paged()
        for tokens in (TOKENS[:258], TOKENS[258:259], TOKENS[259:280], TOKENS[280:281]):
            assert it.forward(plain, tokens) == it.forward(paged, tokens)
        assert len(paged_leaves(paged)[0].table.slots(0, 281)) > 1


@pytest.mark.parametrize("text, dim", (("affine:4:32", 32), ("turbo", 64)))
@pytest.mark.parametrize("block", BLOCKS)
def test_trims_and_forks(block: int, text: str, dim: int):
    with world("dense", text, block, dim) as it:
        plain, paged = it.plain(), it.paged()
        for caches in (plain, paged):
            it.forward(caches, TOKENS[:257])
            assert {each.trim(33) for each in caches} == {33}
        assert it.storage.pool.used == -(-224 // block)
        for tokens in (TOKENS[300:320], TOKENS[320:321]):
            assert it.forward(plain, tokens) == it.forward(paged, tokens)
        before = it.storage.pool.used
        forks = [kinds.lend(paged, 230) for _ in range(2)]
        assert it.storage.pool.used == before and it.storage.pool.shared == -(-230 // block)
        for number, fork in enumerate(forks):
            own = kinds.lend(plain, 230)
            for tokens in (TOKENS[100 + number : 120 + number], TOKENS[200 + number : 201 + number]):
                assert it.forward(own, tokens) == it.forward(fork, tokens)
        assert it.forward(plain, TOKENS[50:60]) == it.forward(paged, TOKENS[50:60]), "the lender has what it had"


@pytest.mark.parametrize("text, dim", (("affine:4:32", 32), ("turbo:k8v4", 64)))
def test_on_disk_they_are_what_they_are_without_paging_and_either_goes_on_as_the_other(text: str, dim: int):
    with world("sliding", text, 16, dim) as it:
        plain, paged = it.plain(), it.paged()
        for caches in (plain, paged):
            it.forward(caches, TOKENS[:50])
        theirs, ours = kinds.dump(plain), kinds.dump(paged)
        assert ours.descriptors == theirs.descriptors and kinds.stored_signatures(paged) == kinds.signatures(plain)
        assert kinds.quantized(paged) and kinds.minimum_reusable(paged) == 0 and kinds.stay_cuttable(paged_leaves(paged))
        assert list(ours.tensors) == list(theirs.tensors)
        for name, tensor in ours.tensors.items():
            other = theirs.tensors[name]
            assert (tensor.array.shape, tensor.array.dtype, tensor.array.nbytes, tensor.grow_axis) == (other.array.shape, other.array.dtype, other.array.nbytes, other.grow_axis)
            assert mx.array_equal(kinds.made(tensor.array), other.array)
            if tensor.grow_axis is not None:  # as a checkpoint takes it, behind the last one
                assert mx.array_equal(kinds.since(tensor.array, tensor.grow_axis, 17), other.array[:, :, 17:])
        restored = through_bytes(paged), out_of_blocks(paged), into_blocks(through_bytes(plain, room=7), Table(it.storage))
        assert all(list(map(type, one)) == list(map(type, plain)) for one in restored[:2]) and len(paged_leaves(restored[2])) == len(paged_leaves(paged))
        empty = kinds.dump(it.paged()).descriptors, kinds.dump(it.plain()).descriptors
        assert empty[0] == empty[1]
        expected = it.forward(plain, TOKENS[60:70])
        assert all(it.forward(caches, TOKENS[60:70]) == expected for caches in restored)


def test_what_is_not_the_models_is_not_put_into_blocks():
    with world("dense", "affine:4:32", 16) as it, pytest.MonkeyPatch.context() as patched:
        it.pages.storages[None] = it.storage
        other = it.plain()
        it.forward(other, TOKENS[:20])
        patched.setitem(WIDE, "dense", WIDE["dense"] | {"num_key_value_heads": 1})
        strange = it.plain()
        wide("dense")(mx.array([TOKENS[:20]]), cache=strange)
        with pytest.raises(ValueError, match="keys_packed .* are not what the blocks were made for"):
            it.pages.adopted(None, strange)
        assert it.storage.pool.used == 0
        adopted = it.pages.adopted(None, other)
        assert it.storage.pool.used == 2 and len(paged_leaves(adopted)) == 3
        # As they are where they are in blocks; of a draft model's behind a model's own only the model's go there.
        assert it.pages.adopted(None, adopted) is adopted
        both = [*it.plain(), *it.plain()]
        it.forward(both[:3], TOKENS[:20])
        assert [isinstance(each, PagedKVCache) for each in it.pages.adopted(None, both)] == [True] * 3 + [False] * 3


PROMPTS = prompts(TOKENS)


@pytest.mark.parametrize("family, text, dim", [("dense", "affine:4:32", 32), ("dense", "turbo", 64), ("sliding", "affine:8:32", 32), ("kv-donors", "affine:8:32", 32), ("hybrid", "affine:4:32", 32)])
@pytest.mark.parametrize("padded", (False, True))
def test_rows_that_join_and_leave_are_what_they_are_alone(family: str, text: str, dim: int, padded: bool):
    with world(family, text, 16, dim) as it:
        it.storage.padded = padded
        found = together(it.model, PROMPTS, it.paged)
        for number, tokens in enumerate(PROMPTS):
            alone = [int(token) for token, _ in generate_step(mx.array(tokens), it.model, max_tokens=8 + number, prompt_cache=it.plain())]
            assert found[number] == alone[: len(found[number])] and (number == 0 or len(found[number]) == len(alone)), number
        assert it.storage.pool.used == 0


@pytest.mark.parametrize("text, dim", (("affine:4:32", 32), ("turbo", 64)))
def test_rows_are_written_in_place_and_copied_by_moving_their_tables(text: str, dim: int):
    with world("dense", text, 16, dim) as it:
        rows = [it.paged() for _ in range(2)]
        for number, row in enumerate(rows):
            it.forward(row, TOKENS[number : 20 + 7 * number])
        batch = [PagedKVCache.merge([row[layer] for row in rows]) for layer in range(3)]
        size = sum(arena.nbytes for arena in it.storage.arenas.planes[0])
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        for _ in range(3):
            mx.eval(it.model(mx.array([[5], [6]]), cache=batch), [each.state for each in batch])
        assert mx.get_peak_memory() - held < size
        used = it.storage.pool.used
        assert len(copy.deepcopy(batch)) == 3 and it.storage.pool.used == used and kinds.signatures(batch) == ["batch:kv:paged:16"] * 3


@pytest.mark.parametrize("text, dim", (("affine:8:32", 32), ("turbo", 64)))
def test_records_are_blocks_of_one_plane_where_kernels_read_them(text: str, dim: int, monkeypatch: pytest.MonkeyPatch):
    with world("dense", text, 16, dim) as it:
        planes = it.plain()
        it.forward(planes, TOKENS[:50])
    keep_records(monkeypatch)
    with world("dense", text, 16, dim) as it:
        assert [len(sides.planes) for sides in it.plan.paged] == [1] * 3
        it.scatter()
        paged = it.paged()
        it.forward(paged, TOKENS[:50])
        theirs, ours = kinds.dump(planes), kinds.dump(paged)
        assert ours.descriptors == theirs.descriptors and list(ours.tensors) == list(theirs.tensors)
        assert all(mx.array_equal(kinds.made(tensor.array), theirs.tensors[name].array) for name, tensor in ours.tensors.items())
        adopted = into_blocks(through_bytes(planes), Table(it.storage))
        rows = [PagedKVCache.merge(list(layer)) for layer in zip(paged, kinds.lend(paged), strict=True)]
        expected = it.forward(planes, TOKENS[60:61])
        assert it.forward(adopted, TOKENS[60:61]) == expected
        logits = it.model(mx.array([TOKENS[60:61], TOKENS[70:71]]), cache=rows)
        assert mx.allclose(logits[:1], mx.array(np.frombuffer(expected, np.float32)).reshape(1, 1, -1), atol=1e-3)


class Reference:
    """Stands for `Kernels` on a device that has the kernel over records in blocks: gathers by table and lengths."""

    def __init__(self) -> None:
        self.calls: list[int] = []  # rows

    def attend_listed(self, queries: mx.array, held: mx.array, record: Any, table: mx.array, lengths: mx.array, scale: float, block: int, longest: int) -> mx.array:
        rows = queries.shape[0]
        self.calls.append(rows)
        assert queries.shape[2] == 1 and longest == max(lengths.tolist()[:rows])
        out = []
        for row in range(rows):
            places = np.arange(lengths[row].item())
            slots = np.array(table)[row][places // block] * block + places % block
            keys, values = zip(*record.split(mx.take(held, mx.array(slots), axis=2)), strict=True)
            out.append(check.reference(queries[row : row + 1], keys, values, scale, None, record.layout))
        return mx.concatenate(out)


@pytest.mark.parametrize("text, dim", (("affine:8:32", 32), ("turbo", 64)))
def test_one_token_of_each_row_is_the_kernels_where_there_are_records(text: str, dim: int, monkeypatch: pytest.MonkeyPatch):
    keep_records(monkeypatch)
    with world("dense", text, 16, dim) as it:
        it.scatter()
        rows = [it.paged() for _ in range(2)]
        for number, row in enumerate(rows):
            it.forward(row, TOKENS[: 20 + 17 * number])
        steps = [mx.array([[5], [6]]), mx.array([TOKENS[:3], TOKENS[5:8]]), mx.array([[7], [8]])]
        runs, kernels = [], Reference()
        for attend in (None, OverBlocks(kernels)):
            it.storage.attend = attend
            batch = [PagedKVCache.merge([lent[layer] for lent in map(kinds.lend, rows)]) for layer in range(3)]
            runs.append([it.model(step, cache=batch) for step in steps])
            mx.eval(runs[-1])
        assert all(mx.allclose(a, b, atol=5e-3) for a, b in zip(*runs, strict=True)) and kernels.calls == [2] * 6, "drafts that are verified are gathered"
        alone = kinds.merge_row(kinds.lend(rows[1]))
        mx.eval(it.model(steps[0][:1], cache=alone))
        assert kernels.calls == [2] * 6 + [1] * 3, "a row in pieces, by itself"


@pytest.mark.parametrize("records", (False, True))
@pytest.mark.parametrize("text, dim", (("affine:8:32", 32), ("turbo", 64)))
def test_an_assistant_is_lent_what_it_is_without_paging(text: str, dim: int, records: bool, monkeypatch: pytest.MonkeyPatch):
    if records:
        keep_records(monkeypatch)
    with world("dense", text, 16, dim) as it:
        it.scatter()
        plain, paged = it.plain(), it.paged()
        for caches in (plain, paged):
            it.forward(caches, TOKENS[:50])
        rows = kinds.merge_row(kinds.lend(paged))
        for most in (None, 7):
            for mine in (paged, rows):
                ours, theirs = borrowed(mine[1], most), borrowed(plain[1], most)
                assert ours.tokens == theirs.tokens == (most or 50) and type(ours.keys) is type(theirs.keys)
                for side, other in zip(ours[:2], theirs[:2], strict=True):
                    assert (side.bits, side.group_size) == (other.bits, other.group_size)
                    assert all(mx.array_equal(a, b) for a, b in zip(side, other, strict=True))


@pytest.mark.parametrize("family", WIDE)
def test_every_family_is_planned_and_billed(family: str):
    with world(family, "affine:4:32", 16) as it:
        it.pages.caches(it.model, None, it.unquantized())
        layers = [layer for layers in it.pages.plan_of(it.model).layers for layer in layers]
        theirs = [layer for layers in it.pages.scheme.plan_of(it.model).layers for layer in layers]
        # The pool is there already: only what is not in it, and what is computed of keys and values, is a request's own.
        for side, mine, layer in zip(it.plan.sides, layers, theirs, strict=True):
            assert mine == layer if side is None else (mine.bytes_at(1000), mine.computed) == (0, side.computed_bytes)
            assert (side is None) == (layer.type != "full")
        footprint = Footprint(0, tuple(layers))
        assert footprint.computed_per_token == Footprint(0, tuple(theirs)).computed_per_token


def test_attention_to_the_wrong_tokens_of_a_row_is_seen(monkeypatch: pytest.MonkeyPatch):
    read = attention.read

    def last_only(table: Table, layer: int) -> Any:
        keys, values = read(table, layer)
        return (keys, values) if isinstance(keys, mx.array) else [type(side).of([mx.repeat(a[:, :, -1:], a.shape[2], axis=2) for a in side], 4, 32) for side in (keys, values)]

    with world("dense", "affine:4:32", 16) as it:
        monkeypatch.setattr(attention, "read", last_only)
        with pytest.raises(ValueError, match="cannot read rows of paged KV under a scheme .*logits differ"):
            plan.make(it.model, it.unquantized(), it.pages.scheme.plan_of(it.model))


def test_layers_of_a_configuration_have_each_their_own(tmp_path):
    path = tmp_path / "kv_config.json"
    path.write_text(json.dumps([{"layer_idx": 0, "bits": 8, "group_size": 32}, {"layer_idx": 2, "bits": 3, "group_size": 32}]))
    with world("dense", f"config:{path}", 16) as it:
        plain, paged = it.plain(), it.paged()
        for tokens in (TOKENS[:40], TOKENS[40:41]):
            assert it.forward(plain, tokens) == it.forward(paged, tokens)
        assert [getattr(leaf, "bits", None) for leaf in paged] == [8, None, 3]
        assert kinds.dump(paged).descriptors == kinds.dump(plain).descriptors


def test_a_model_that_cannot_have_the_scheme_is_paged_in_its_own_precision():
    statistics = Statistics()
    pages = Pages(16, 1 << 24, statistics, "off", Scheme(parse("affine:4:64"), statistics, "off"))
    model = wide("dense")  # heads of 32
    made = pages.caches(model, None, cache.make_prompt_cache(model))
    assert [type(each) for each in made] == [PagedKVCache] * 3 and not hasattr(made[0], "bits")
    assert statistics.report()["faults"] == {"kv_scheme": 1} and pages.name(None) == "plain"
