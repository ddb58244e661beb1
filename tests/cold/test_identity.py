"""What changes a model's fingerprint, what does not, and how digests are remembered."""

from __future__ import annotations

import json
import os
import stat
import threading
import time

import pytest

from mlx_lm_hooks import ModelSource
from mlx_lm_tiered import digests, identity
from mlx_lm_tiered.digests import DigestMemo, file_digest
from mlx_lm_tiered.identity import IdentityResolver, compute, environment, source_files, stat_signature

FILES = [
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json",
    "modeling_own.py", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "own.tiktoken",
]  # fmt: skip
WHERE = {"mlx": "1", "mlx_lm": "2", "device": "gpu", "architecture": "M9", "machine": "arm64"}


def folder(path, names):
    path.mkdir()
    for name in names:
        (path / name).write_text(f"{name} of {path.name}")
    return path


@pytest.fixture
def source(tmp_path):
    model = folder(tmp_path / "model", FILES)
    adapter = folder(tmp_path / "adapter", ["adapters.safetensors", "adapter_config.json"])
    draft = folder(tmp_path / "draft", ["model.safetensors", "config.json"])
    (model / "README.md").write_text("not a matter of numbers")
    return ModelSource(path=model, adapter_path=adapter, draft=ModelSource(path=draft))


def fingerprint(source, where=WHERE):
    memo = DigestMemo(None)
    return compute(source, lambda path: file_digest(path, memo), where).fingerprint


def test_every_file_counts_and_only_those(source, tmp_path):
    first = fingerprint(source)
    assert fingerprint(source) == first and len(first) == 32
    files = source_files(source)
    assert len(files) == len(FILES) + 4
    for name, path in files.items():
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert fingerprint(source) != first, name
        path.write_bytes(content)
        path.rename(path.with_suffix(".away"))
        assert fingerprint(source) != first, name
        path.with_suffix(".away").rename(path)
    assert fingerprint(source) == first
    (tmp_path / "model" / "README.md").write_text("changed")
    assert fingerprint(source) == first


@pytest.mark.parametrize("name", sorted(WHERE))
def test_versions_and_device_count(source, name):
    assert fingerprint(source, {**WHERE, name: "other"}) != fingerprint(source)


def test_the_environment_names_all_of_them():
    assert set(environment()) == set(WHERE) and all(environment().values())


def test_scheme_format_adapter_and_draft_count(source, monkeypatch):
    from dataclasses import replace

    variants = [
        source,
        replace(source, kv_scheme="affine:8:64@0"),
        replace(source, adapter_path=None),
        replace(source, draft=None),
        replace(source, draft=replace(source.draft, kv_scheme="affine:8:64@0")),
    ]
    found = {fingerprint(variant) for variant in variants}
    monkeypatch.setattr(identity, "FORMAT_VERSION", 99)
    found.add(fingerprint(source))
    assert len(found) == len(variants) + 1


def test_place_and_load_do_not_count(source, tmp_path):
    from dataclasses import replace

    first = fingerprint(source)
    (tmp_path / "model").rename(tmp_path / "moved")
    assert fingerprint(replace(source, path=tmp_path / "moved", generation=7, key="name")) == first


def test_files_cannot_trade_their_contents_unnoticed(source, tmp_path):
    a, b = (tmp_path / "model" / name for name in FILES[:2])
    first = fingerprint(source)
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y)
    b.write_bytes(x)
    assert fingerprint(source) != first


def test_it_is_computed_in_the_background_once(source, tmp_path, monkeypatch):
    gate, hashed = threading.Event(), []
    real = digests._hash

    def slow(path, stopped):
        hashed.append(path)
        gate.wait(10)
        return real(path, stopped)

    monkeypatch.setattr(digests, "_hash", slow)
    resolver = IdentityResolver(tmp_path / "c")
    started = time.monotonic()
    resolver.request(source)
    resolver.request(source)
    assert resolver.get(source, 0.01) is None and resolver.pending(source)
    assert time.monotonic() - started < 1
    gate.set()
    found = resolver.get(source, 10)
    assert found is not None and not resolver.pending(source)
    assert len(hashed) == len(source_files(source))
    assert found.provenance["files"].keys() == source_files(source).keys()
    assert found.provenance["model"] == "model" and json.dumps(dict(found.provenance))


def test_a_source_without_a_path_or_with_unreadable_files_has_no_identity(source, tmp_path):
    resolver = IdentityResolver(tmp_path / "c")
    assert resolver.get(ModelSource(key="x"), 1) is None and not resolver.pending(ModelSource(key="x"))
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "nowhere")
    dangling = resolver.get(source, 10)
    assert dangling is not None and "config.json" not in dangling.provenance["files"]


@pytest.fixture
def counted(monkeypatch):
    hashed = []
    real = digests._hash
    monkeypatch.setattr(digests, "_hash", lambda path, stopped: hashed.append(path.name) or real(path, stopped))
    return hashed


def settle():
    """Files just written are not remembered; wait until they are old enough."""
    time.sleep(digests.FRESH_NS / 1e9 + 0.02)


def resolve(root, source):
    resolver = IdentityResolver(root)
    found = resolver.get(source, 10)
    for thread in threading.enumerate():
        if thread.name == "mlx-lm-tiered-identity":
            thread.join()
    return found


def test_a_second_start_reads_no_weights(source, tmp_path, counted):
    settle()
    first = resolve(tmp_path / "c", source)
    count = len(counted)
    assert resolve(tmp_path / "c", source) == first and len(counted) == count > 0
    path = tmp_path / "c" / "identities.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["identities.json"]


def test_a_change_that_hides_its_time_is_noticed(source, tmp_path, counted):
    settle()
    first = resolve(tmp_path / "c", source)
    weights = tmp_path / "model" / FILES[0]
    before = weights.stat()
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert resolve(tmp_path / "c", source) != first
    assert counted[-1] == FILES[0]


def test_a_link_that_points_elsewhere_is_noticed(source, tmp_path):
    weights = tmp_path / "model" / FILES[0]
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    weights.unlink()
    weights.symlink_to(tmp_path / "a")
    settle()
    first = resolve(tmp_path / "c", source)
    weights.unlink()
    weights.symlink_to(tmp_path / "b")
    assert resolve(tmp_path / "c", source) != first


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"digests": 5}', '{"digests": [[1]]}', '{"digests": [["a",1,1,1,1,1,"zz"]]}', "[" * 100_000]
)
def test_a_malformed_memo_is_made_anew(source, tmp_path, counted, content):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "identities.json").write_text(content)
    (tmp_path / "c" / "identities.json").chmod(0o600)
    settle()
    first = resolve(tmp_path / "c", source)
    assert first is not None
    count = len(counted)
    assert resolve(tmp_path / "c", source) == first and len(counted) == count


@pytest.mark.parametrize("how", ["file in the way", "link", "writable by others"])
def test_a_memo_that_cannot_be_trusted_or_written_does_not_matter(source, tmp_path, how):
    settle()
    root = tmp_path / "c"
    good = resolve(root, source)
    memo = root / "identities.json"
    forged = json.loads(memo.read_text())
    forged["digests"] = [[*key, "0" * 64] for *key, _ in forged["digests"]]
    memo.write_text(json.dumps(forged))
    if how == "file in the way":
        memo.unlink()
        root.rmdir()
        root.write_text("x")
    elif how == "link":
        memo.rename(tmp_path / "forged")
        memo.symlink_to(tmp_path / "forged")
    else:
        memo.chmod(0o622)
    assert resolve(root, source) == good


def test_a_forged_memo_of_our_own_would_be_believed(source, tmp_path):
    """Else the test above would prove nothing."""
    settle()
    good = resolve(tmp_path / "c", source)
    memo = tmp_path / "c" / "identities.json"
    memo.write_text(memo.read_text().replace(json.loads(memo.read_text())["digests"][0][-1], "0" * 64))
    assert resolve(tmp_path / "c", source) != good


def test_a_file_that_changes_while_it_is_read_is_read_again(source, tmp_path, monkeypatch):
    weights = tmp_path / "model" / FILES[0]
    real = digests._hash
    changes = []

    def changing(path, stopped):
        found = real(path, stopped)
        if path == weights.resolve() and len(changes) < 1:
            changes.append(1)
            weights.write_text("changed meanwhile")
        return found

    monkeypatch.setattr(digests, "_hash", changing)
    found = resolve(tmp_path / "c", source)
    monkeypatch.setattr(digests, "_hash", real)
    assert changes and found == resolve(None, source)


def test_a_file_that_keeps_changing_has_no_digest(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("x")
    real = digests._hash
    monkeypatch.setattr(digests, "_hash", lambda p, stopped: (real(p, stopped), path.write_text(str(time.time_ns())))[0])
    with pytest.raises(OSError):
        file_digest(path, DigestMemo(None))


def test_the_memo_stays_small_and_keeps_what_was_used_last(tmp_path):
    memo = DigestMemo(tmp_path / "m", 4096)
    for i in range(200):
        memo.put((f"/some/where/{i}", 1, 2, 3, 4, 5), "0" * 64)
    memo.get(("/some/where/0", 1, 2, 3, 4, 5))
    memo.save()
    assert (tmp_path / "m").stat().st_size <= 4096
    again = DigestMemo(tmp_path / "m", 4096)
    assert again.get(("/some/where/0", 1, 2, 3, 4, 5)) and again.get(("/some/where/199", 1, 2, 3, 4, 5))
    assert again.get(("/some/where/1", 1, 2, 3, 4, 5)) is None


def test_stat_signatures_follow_changes_without_reading(source, tmp_path, counted):
    first = stat_signature(source)
    assert stat_signature(source) == first and counted == []
    settle()
    (tmp_path / "adapter" / "adapters.safetensors").write_text("other")
    assert stat_signature(source) != first


def test_what_a_killed_process_left_of_a_memo_is_removed(source, tmp_path):
    (tmp_path / "c").mkdir()
    for name, age in (("old", 1000), ("new", 0)):
        (tmp_path / "c" / f"identities.json.{name}.tmp").write_text("x")
        os.utime(tmp_path / "c" / f"identities.json.{name}.tmp", (time.time() - age,) * 2)
    settle()
    assert resolve(tmp_path / "c", source) is not None
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["identities.json", "identities.json.new.tmp"]
