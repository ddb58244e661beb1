"""The three gates: version, signature, body; found in the source, without importing mlx."""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from witness import Witness

from mlx_lm_hooks import Invocation, PluginError
from mlx_lm_patches import host as host_module
from mlx_lm_patches.features import SEAMS
from mlx_lm_patches.host import host
from mlx_lm_patches.seam import check, supported
from mlx_lm_patches.source import Sources, body_hash, signature

FILES = ("_version.py", "server.py", "generate.py", "chat.py", "utils.py", "tokenizer_utils.py", "sample_utils.py", "models/cache.py", "models/base.py")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The installed mlx-lm's hooked files, to be changed."""
    root = Sources().root
    for name in FILES:
        target = tmp_path / "mlx_lm" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target)
    return tmp_path / "mlx_lm"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    path.write_text(text.replace(old, new))


def states(root: Path) -> dict[str, str]:
    sources = Sources(root)
    return {f"{s.feature}:{s.qualname}": check(s, sources).state for s in SEAMS}


@pytest.fixture
def activate(monkeypatch):
    """Activate the host against another source tree, for a command."""

    def run(root: Path, command: str = "server", strict: bool = False) -> list[str]:
        monkeypatch.setattr(host_module, "Sources", lambda: Sources(root))
        args = argparse.Namespace(plugin_strict=strict)
        host.activate(Witness().plugins(), Invocation(command, args))
        return sorted({seam.feature for seam in host._seams})

    yield run
    host.deactivate()


def test_every_seam_of_the_installed_version_is_ok():
    reports = host.seams()
    assert [(r.name, r.state, r.detail) for r in reports if r.state != "ok"] == []
    assert {r.feature for r in reports} >= {"prefix", "loads", "idle", "sequential", "scripts", "http", "rows"}


def test_seams_are_read_without_importing_mlx():
    code = (
        "import sys; from mlx_lm_hooks import find_host; reports = find_host().seams();"
        "print(len(reports), [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1)[1].strip() == "[]"


def test_every_gate_has_a_known_body_and_a_reason():
    for seam in SEAMS:
        assert seam.why and seam.until
        assert seam.bodies or seam.signature == "import", seam.name
        assert all(re.fullmatch("[0-9a-f]{16}", body) for body in seam.bodies), seam.name


def test_layout_and_docstrings_do_not_count(copy):
    path = copy / "server.py"
    edit(path, "    def _next_request(self, timeout=None):\n", '    def _next_request(self, timeout=None):\n        """New."""\n\n        # Why\n')
    assert set(states(copy).values()) == {"ok"}


def test_a_changed_body_is_unknown(copy):
    edit(copy / "server.py", "else 0.1\n                )", "else 0.2\n                )")
    relying = {f"{seam.feature}:{seam.qualname}" for seam in SEAMS if seam.qualname == "ResponseGenerator._generate"}
    assert {k for k, v in states(copy).items() if v != "ok"} == relying and len(relying) > 1
    assert states(copy)["idle:ResponseGenerator._generate"] == "unknown-body"


def test_a_changed_signature_is_a_mismatch(copy):
    edit(copy / "server.py", "def _next_request(self, timeout=None):", "def _next_request(self, deadline=None):")
    report = next(check(s, Sources(copy)) for s in SEAMS if s.qualname == "ResponseGenerator._next_request")
    assert report.state == "mismatch"
    assert report.detail == "its parameters are (self, deadline=), expected (self, timeout=)"


def test_a_removed_name_is_missing(copy):
    edit(copy / "generate.py", "def _merge_caches(caches):", "def _merge(caches):")
    assert states(copy)["rows:_merge_caches"] == "missing"


def test_another_version_is_unsupported_and_refused(copy, activate):
    (copy / "_version.py").write_text('__version__ = "0.31.3"\n')
    assert set(states(copy).values()) == {"unsupported"}
    with pytest.raises(PluginError, match=r"mlx-lm 0\.31\.3 is not supported; install a version with pip install 'mlx-lm>=0\.32,<0\.33'"):
        activate(copy)
    assert not host.active


@pytest.mark.parametrize(("version", "good"), [("0.32.0", True), ("0.32.9", True), ("0.32.3.dev1", True), ("0.33.0", False), ("unknown", False)])
def test_version_range(version, good):
    assert supported(version) is good


def test_a_blocked_feature_that_is_needed_refuses_the_start(copy, activate):
    edit(copy / "server.py", "def _next_request(self, timeout=None):", "def _next_request(self, deadline=None):")
    with pytest.raises(PluginError, match="cannot be hooked for idle"):
        activate(copy)
    assert not host.active


def test_a_blocked_optimisation_is_left_out_whole(copy, activate, caplog):
    edit(copy / "server.py", "def _tokenize(self, tokenizer, request, args):", "def _tokenize(self, tokenizer, request, args, more=1):")
    features = activate(copy)
    assert "sequential" not in features and "prefix" in features
    assert any("going on without sequential" in r.message for r in caplog.records)
    import mlx_lm.server

    assert not hasattr(mlx_lm.server.stream_generate, "__wrapped__")
    assert hasattr(mlx_lm.server.ResponseGenerator._next_request, "__wrapped__")


def test_an_unknown_body_warns_and_strict_refuses(copy, activate, caplog):
    edit(copy / "generate.py", "    batch_cache = []\n\n    if not caches:", "    batch_cache = list()\n\n    if not caches:")
    with caplog.at_level(logging.WARNING):
        assert "rows" in activate(copy)
    assert sum("mlx_lm.generate._merge_caches" in r.message for r in caplog.records) == 1
    with pytest.raises(PluginError, match="rows"):
        activate(copy, strict=True)


def test_an_unknown_body_that_fails_its_probe_changes_nothing(copy, activate, monkeypatch):
    import mlx_lm.generate
    import mlx_lm.server

    generate = sys.modules["mlx_lm.generate"]
    edit(copy / "generate.py", "    batch_cache = []\n\n    if not caches:", "    batch_cache = list()\n\n    if not caches:")
    before = {name: getattr(generate, name) for name in ("_merge_caches", "generate_step")}
    monkeypatch.setattr(generate, "_merge_caches", lambda caches: [None])
    with pytest.raises(PluginError, match="_merge_caches does not behave as expected"):
        activate(copy)
    assert generate.generate_step is before["generate_step"]
    assert mlx_lm.server.LRUPromptCache is sys.modules["mlx_lm.models.cache"].LRUPromptCache
    assert not host.active


def test_hash_is_the_same_for_every_python():
    """Two definitions whose trees differ between Python versions: the hashes were computed with 3.11."""
    import ast

    code = 'def f(a, /, b=1, *c, d, e=2, **g):\n    "Doc."\n    return f"{a!r:>{b}}x" f"y", u"k", {**g}, [*c], b"", ...\n'
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert signature(node) == "(a, /, b=, *c, d, e=, **g)"
    assert body_hash(node) == "009a1f5ec4261a84"


def test_fingerprint_command_prints_the_installed_hashes():
    done = subprocess.run([sys.executable, "-m", "mlx_lm_patches.fingerprint"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(SEAMS) and lines[0].startswith(f"mlx-lm {Sources().version()} in ")
    for seam in SEAMS:
        assert not seam.bodies or any(body in done.stdout for body in seam.bodies)
