"""Patches: applied once, undone, and never at the cost of someone else's."""

from __future__ import annotations

import argparse
import sys

from witness import Witness

from mlx_lm_hooks import Invocation
from mlx_lm_patches.features import SEAMS
from mlx_lm_patches.host import host


def current() -> dict[str, object]:
    """What every hooked name is now."""
    import mlx_lm.chat
    import mlx_lm.server  # noqa: F401

    result = {}
    for seam in SEAMS:
        if seam.build is not None:
            owner = sys.modules[seam.module]
            *path, name = seam.qualname.split(".")
            for part in path:
                owner = getattr(owner, part)
            result[seam.name] = vars(owner)[name]
    return result


class Scheme:
    """A KV scheme of which nothing is asked but its start and its attention."""

    start = 5

    def attention(self, upstream):
        return lambda *args, **kwargs: upstream(*args, **kwargs)


def activate(scheme: Scheme | None = None, speculation: object = None) -> Witness:
    plugin = Witness()
    plugin.scheme, plugin.speculation = scheme, speculation
    host.activate(plugin.plugins(), Invocation("script", argparse.Namespace()))
    return plugin


def test_all_names_are_replaced_and_restored():
    before = current()
    activate(Scheme(), speculation=object())
    during = current()
    host.deactivate()
    assert all(during[name] is not before[name] for name in before)
    assert current() == before


def test_without_a_scheme_and_speculation_their_names_stay_upstreams():
    before = current()
    activate()
    during = current()
    host.deactivate()
    unchanged = {name for name in before if during[name] is before[name]}
    assert unchanged == {seam.name for seam in SEAMS if seam.feature in ("schemes", "speculation") and seam.build is not None}


def test_activating_twice_wraps_once():
    before = current()
    activate()
    activate()
    assert all(getattr(now, "__wrapped__", before[name]) is before[name] for name, now in current().items())
    host.deactivate()
    assert current() == before


def test_a_module_that_reports_again_is_not_wrapped_again():
    activate()
    during = current()
    host.module_loaded(sys.modules["mlx_lm.server"])
    assert current() == during
    host.deactivate()


def test_a_later_patch_of_someone_else_stays(monkeypatch):
    generate = sys.modules["mlx_lm.generate"]
    original = generate._merge_caches
    activate()
    ours = generate._merge_caches
    monkeypatch.setattr(generate, "_merge_caches", lambda caches: ours(caches))
    theirs = generate._merge_caches
    host.deactivate()
    assert generate._merge_caches is theirs
    assert theirs([]) == []  # ours beneath it passes through
    monkeypatch.undo()
    generate._merge_caches = original


def test_a_wrapper_that_is_still_held_passes_through(llama):
    from mlx_lm import generate

    plugin = activate()
    held = sys.modules["mlx_lm.generate"].generate_step
    host.deactivate()
    import mlx.core as mx

    model, _ = llama
    tokens = [token for token, _ in held(mx.array([1, 2, 3, 4]), model, max_tokens=2)]
    assert len(tokens) == 2 and callable(generate)
    assert plugin.named("take") == []
