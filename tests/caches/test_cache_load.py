"""Descriptors and arrays come from files that anyone may have written."""

from __future__ import annotations

import copy
import json
from typing import Any

import mlx.core as mx
import pytest
from cache_states import STATES, advance, fill
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache

from mlx_lm_tiered import caches as kinds

NAMES = [kind.name for kind in kinds.kinds()]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 9, 64, 255, 2**31 - 1, 2**31, 2**63, 10**30])
    | st.floats()
    | st.sampled_from(["", "kv", *NAMES, "kind", "keys"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "fields", "offset", "caches"]), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """Paths of everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(p for key, v in inner for p in places(v, (*at, key)))]


def replaced(value: Any, at: tuple, new: Any, how: str) -> Any:
    if not at:
        return new
    container = value
    for key in at[:-1]:
        container = container[key]
    if how == "delete":
        del container[at[-1]]
    elif how == "add" and isinstance(container, dict):
        container["more"] = new
    else:
        container[at[-1]] = new
    return value


def damaged(name: str, array: mx.array, arrays: dict[str, mx.array], how: str, other: str) -> dict[str, Any]:
    if how == "drop":
        del arrays[name]
    elif how == "rename":
        arrays[other + "x"] = arrays.pop(name)
    elif how == "swap":
        arrays[name], arrays[other] = arrays[other], arrays[name]
    elif how == "cast":
        arrays[name] = array.astype(mx.int32)
    elif how == "flatten":
        arrays[name] = array.reshape(-1)
    elif how == "shorten":
        arrays[name] = array[..., :-1, :] if array.ndim > 1 else array[:-1]
    elif how == "widen":
        arrays[name] = mx.concatenate([array, array], axis=-1)
    elif how == "rows":
        arrays[name] = mx.concatenate([array, array], axis=0)
    elif how == "scalar":
        arrays[name] = mx.array(1)
    elif how == "not-an-array":
        arrays[name] = [1, 2, 3]
    return arrays


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(sorted(STATES)), st.data())
def test_what_is_not_refused_works(name: str, data):
    descriptors, tensors = kinds.dump([STATES[name]()])
    descriptors, arrays = copy.deepcopy(descriptors), {k: t.array for k, t in tensors.items()}
    for _ in range(data.draw(st.integers(1, 2))):
        if arrays and data.draw(st.booleans()):
            which, other = data.draw(st.sampled_from(sorted(arrays))), data.draw(st.sampled_from(sorted(arrays)))
            how = data.draw(
                st.sampled_from(["drop", "rename", "swap", "cast", "flatten", "shorten", "widen", "rows", "scalar", "not-an-array"])
            )
            if isinstance(arrays[which], mx.array) and arrays[which].ndim:
                arrays = damaged(which, arrays[which], arrays, how, other)
        elif isinstance(descriptors, list):
            at = data.draw(st.sampled_from(places(descriptors)))
            descriptors = replaced(descriptors, at, data.draw(JSON), data.draw(st.sampled_from(["replace", "delete", "add"])))
    try:
        caches = kinds.load(descriptors, arrays)
    except ValueError as fault:
        assert str(fault) and "\n" not in str(fault)
        return
    kinds.check(caches)
    again = kinds.dump(kinds.lend(caches))
    json.dumps(again.descriptors)
    kinds.load(again.descriptors, {k: t.array for k, t in again.tensors.items()})
    for cache in caches:
        if "right-padded" in name:
            cache.finalize()
        advance(cache, 1, seed=1)
        advance(cache, 3, seed=2)
    mx.eval([t.array for t in kinds.dump(caches).tensors.values()])


def dumped(*caches: Any) -> tuple[list[dict[str, Any]], dict[str, mx.array]]:
    descriptors, tensors = kinds.dump(list(caches))
    return copy.deepcopy(descriptors), {name: t.array for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"offset": 11}, "10 slots cannot hold 11 tokens"),
        ({"offset": -1}, "offset is not an integer"),
        ({"offset": 10.0}, "offset is not an integer"),
        ({"offset": True}, "offset is not an integer"),
        ({"offset": 0}, "does not belong here"),
        ({}, "offset is missing"),
        ({"offset": 10, "more": 1}, "more does not belong here"),
        ([], "not an object"),
        (None, "not an object"),
    ],
)
def test_refused_in_one_sentence(fields: Any, text: str):
    descriptors, arrays = dumped(fill(KVCache(), 10))
    descriptors[0]["fields"] = fields
    with pytest.raises(ValueError, match=text):
        kinds.load(descriptors, arrays)


@pytest.mark.parametrize("descriptors", [None, {}, "kv", [None], [{"kind": "kv"}], [{"kind": ["kv"], "fields": {}}], [{"kind": "x", "fields": {}}]])
def test_refused_descriptors(descriptors: Any):
    with pytest.raises(ValueError):
        kinds.load(descriptors, {})


def test_refused_names():
    descriptors, arrays = dumped(fill(KVCache(), 10))
    for name in ("1.keys", "keys", "0", "00.keys", "0.keys.more", ""):
        with pytest.raises(ValueError):
            kinds.load(descriptors, {**arrays, name: mx.zeros((1,))})


def test_refused_when_layers_disagree():
    descriptors, arrays = dumped(fill(KVCache(), 10), fill(KVCache(), 10))
    descriptors[1]["fields"]["offset"] = 9
    with pytest.raises(kinds.InconsistentLength, match="9, 10 tokens"):
        kinds.load(descriptors, arrays)


def test_nesting_has_a_bound():
    def nested(depth: int) -> Any:
        return CacheList(nested(depth - 1)) if depth else KVCache()

    descriptors, arrays = dumped(nested(7))
    assert kinds.signatures(kinds.load(descriptors, arrays)) == ["list(" * 7 + "kv:plain" + ")" * 7]
    descriptors, arrays = dumped(nested(30))
    with pytest.raises(ValueError, match="nested too deeply"):
        kinds.load(descriptors, arrays)
    hostile: Any = []
    for _ in range(100_000):
        hostile = [hostile]
    with pytest.raises(ValueError, match="nested too deeply"):
        kinds.load(hostile, {})
