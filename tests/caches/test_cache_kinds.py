"""The registry, and that upstream has no cache class without a kind."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx_lm.models
import pytest
from cache_states import STATES, arrays, fill, quantized
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, RotatingKVCache

from mlx_lm_tiered import caches as kinds

MODELS = Path(next(iter(mlx_lm.models.__path__)))


def cache_classes(folder: Path) -> set[str]:
    """Classes that hold KV: with `state` and `nbytes` or `is_trimmable`, or based on one of these. Read, not imported."""
    classes = {
        (path.stem, node.name): node
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"_BaseCache"}
    while True:
        more = {name for (_, name), node in classes.items() if _is_cache(node, found)} - found
        if not more:
            break
        found |= more
    return {f"{module}.{name}" for (module, name), node in classes.items() if name in found and name != "_BaseCache" and _is_cache(node, found)}


def _is_cache(node: ast.ClassDef, known: set[str]) -> bool:
    methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    bases = {b.id if isinstance(b, ast.Name) else getattr(b, "attr", "") for b in node.bases}
    return bool(bases & known) or ("state" in methods and bool(methods & {"nbytes", "is_trimmable"}))


def test_every_cache_class_of_upstream_has_a_kind():
    classes = cache_classes(MODELS)
    assert {"cache.KVCache", "cache.ArraysCache", "deepseek_v41.LayerCache"} <= classes
    known = {kind.class_name for kind in kinds.kinds() if kind.class_name.startswith("mlx_lm.")}
    assert {f"mlx_lm.models.{name}" for name in classes} == known


def test_a_new_class_would_be_noticed(tmp_path: Path):
    (tmp_path / "new.py").write_text(
        "class Own:\n def state(self): ...\n def nbytes(self): ...\n"
        "class Derived(cache.KVCache): pass\nclass Twice(Derived): pass\nclass Other: pass\n"
    )
    (tmp_path / "cache.py").write_text("class _BaseCache: pass\nclass KVCache(_BaseCache): pass\n")
    assert cache_classes(tmp_path) == {"new.Own", "new.Derived", "new.Twice", "cache.KVCache"}


def test_kinds_name_their_classes_and_every_one_is_tested():
    tested = {type(make()) for make in STATES.values()}
    # Those of paging are there when paging is, and tested with it (tests/paged).
    assert tested == {kind.cache_class() for kind in kinds.kinds() if ".paged." not in kind.class_name}
    for make in STATES.values():
        cache = make()
        assert kinds.kind_of(cache).cache_class() is type(cache)


class Derived(KVCache):
    pass


def test_a_subclass_is_unknown_at_any_depth():
    for caches in ([Derived()], [KVCache(), CacheList(KVCache(), CacheList(Derived()))], [object()]):
        with pytest.raises(kinds.UnknownCacheClass, match=r"Derived|object"):
            kinds.check(caches)
    kinds.check([make() for make in STATES.values()])


def test_registering_makes_a_class_known_once():
    class Kind(kinds.Kind):
        name = "made-up"
        class_name = "made.Up"

    kinds.register(Kind())
    try:
        with pytest.raises(ValueError, match="registered already"):
            kinds.register(Kind())
    finally:
        from mlx_lm_tiered.caches import kind

        del kind._by_class["made.Up"], kind._by_name["made-up"]


@pytest.mark.parametrize(
    ("cache", "signature"),
    [
        (KVCache(), "kv:plain"),
        (quantized(4, 1, group_size=64), "kv:quant:4:64"),
        (RotatingKVCache(8), "kv:rotating-plain"),
        (STATES["affine-empty"](), "kv:quant:4:32"),
        (STATES["affine-rotating-wrapped"](), "kv:rotating-quant:4:32"),
        (STATES["batch-affine-rotating"](), "batch:kv:rotating-quant:4:32"),
        (STATES["turbo-k4v3"](), "kv:turboquant:4:3"),
        (STATES["batch-turbo"](), "batch:kv:turboquant:8:3"),
        (STATES["chunked"](), "kv:chunked"),
        (STATES["concat"](), "kv:concat"),
        (ArraysCache(2), "ssm"),
        (BatchKVCache([0]), "batch:kv:plain"),
        (CacheList(ArraysCache(1), CacheList(KVCache(), KVCache())), "list(ssm,list(kv:plain,kv:plain))"),
    ],
)
def test_signatures(cache, signature: str):
    assert kinds.signatures([cache]) == [signature]


@pytest.mark.parametrize("name", STATES)
def test_bytes_are_those_of_the_arrays(name: str):
    cache = STATES[name]()
    held = kinds.nbytes([cache])
    dumped = sum(t.array.nbytes for t in kinds.dump([cache]).tensors.values())
    assert held >= dumped
    if not name.startswith(("quantized-empty", "arrays", "batch", "list")):
        assert held == cache.nbytes


def test_lengths():
    assert kinds.length([]) is None
    assert kinds.length([KVCache(), arrays(((1, 2), STATES["kv-one"]().keys.dtype)), fill(KVCache(), 7)]) == 7
    assert kinds.length([STATES["rotating-wrapped-5-keep-3"]()]) == 12
    assert kinds.length([STATES["chunked-front-trimmed-step"]()]) == 23
    assert kinds.length([STATES["kv-trimmed-to-nothing"]()]) is None
