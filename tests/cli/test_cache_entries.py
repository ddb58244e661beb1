"""`cache ls`, `show`, `verify` and `prune` over what the real store wrote: chains of two models."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from cold.cold_helpers import LARGE, grown, job, save, wrapped
from mlx_lm.utils import load_tokenizer
from mlx_lm_hooks import Companion, ModelSource

from mlx_lm_tiered.cli import main
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.digests import DigestMemo, file_digest
from mlx_lm_tiered.identity import Identity, compute, environment, source_files

OTHER = Identity("cd" * 16, {"model": "other", "mlx": "0.1", "mlx_lm": "0.2"})


def identity_of(model: Path) -> Identity:
    """What a server would store entries of this model under; the files' digests are those of their content."""
    memo = DigestMemo(None)
    return compute(ModelSource(model), lambda path: file_digest(path, memo), environment())


@pytest.fixture
def stored(cache_dir: Path, tmp_path: Path, tiny_llama: Path) -> Iterator[SimpleNamespace]:
    """A conversation of three turns, a ring, and an entry of another model, one second and more between their last uses."""
    model = shutil.copytree(tiny_llama, tmp_path / "tiny")
    ours = identity_of(model)
    store = ColdStore(cache_dir, LARGE)
    turns = [save(store, job(list(range(n)), grown(n), ours)) for n in (100, 200, 300)]
    # A shorter entry that a longer one serves is superseded unless the longer continues it.
    ring = save(store, job(list(range(500, 540)), wrapped(40), ours))
    other = save(store, job(list(range(900, 950)), grown(50), OTHER, role="system"))
    for i, path in enumerate([*turns, ring, other]):
        os.utime(path, (time.time() - 86400 * (10 - i),) * 2)
    store.close()
    yield SimpleNamespace(root=cache_dir, turns=turns, ring=ring, other=other, model=model, fingerprint=ours.fingerprint)


def run(capsys, *argv: object) -> tuple[int, str]:
    code = main(["cache", *map(str, argv)])
    return code, capsys.readouterr().out


def listed(capsys, *argv: object) -> list[dict]:
    return json.loads(run(capsys, *argv, "--json")[1])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_ls_filters_sorts_and_adds_up(stored, capsys):
    rows = listed(capsys, "ls", stored.root)
    assert [row["tokens"] for row in rows] == [50, 40, 300, 200, 100]
    assert [row["tokens"] for row in listed(capsys, "ls", stored.root, "--sort", "tokens", "--reverse")] == [40, 50, 100, 200, 300]
    assert [row["bytes"] for row in listed(capsys, "ls", stored.root, "--sort", "size")] == sorted((row["bytes"] for row in rows), reverse=True)
    for name in ("other", "cdcdcd"):
        assert [row["tokens"] for row in listed(capsys, "ls", stored.root, "--model", name)] == [50]
    assert [(row["tokens"], row["new_tokens"]) for row in listed(capsys, "ls", stored.root, "--model", "tiny")][1:] == [(300, 100), (200, 100), (100, 100)]
    code, out = run(capsys, "ls", stored.root, "--columns", "tokens,role,parent,entry")
    assert code == 0 and "5 entries" in out and "tiny" in out and "other (cdcdcdcdcdcd): 1 entry" in out
    assert stored.turns[1].name[33:45] in out and "last used" not in out


def test_ls_knows_the_cap_of_the_environment(stored, capsys, monkeypatch):
    monkeypatch.setenv("MLX_LM_TIERED_SSD_CACHE_MAX", "7GB")
    assert " of 7 GB" in run(capsys, "ls", stored.root)[1]


def test_show_tells_the_chain_and_the_text(stored, capsys):
    name = stored.turns[2].name
    code, out = run(capsys, "show", name[:6], stored.root, "--text", "--json")
    told = json.loads(out)
    assert code == 0
    assert [(link["from"], link["to"]) for link in told["chain"]] == [(0, 100), (100, 200), (200, 300)]
    assert [link["file"].split("/")[1] for link in told["chain"]] == [path.name for path in stored.turns]
    assert told["provenance"]["mlx"] == mx.__version__ and told["signatures"] == ["kv:plain"] * 2 and told["continued_by"] == []
    tokenizer = load_tokenizer(stored.model)
    assert told["text"] == {"first": tokenizer.decode(list(range(40))), "last": tokenizer.decode(list(range(260, 300)))}
    middle = json.loads(run(capsys, "show", stored.turns[1].name[:8], stored.root, "--json")[1])
    assert middle["continued_by"] == [f"{stored.fingerprint}/{name}"]
    code, out = run(capsys, "show", name[:6], stored.root)
    assert code == 0 and "3 files" in out and "2 × kv:plain" in out and "at every token" in out


def test_show_says_why_there_is_no_text(stored, capsys):
    code, out = run(capsys, "show", stored.other.name[:6], stored.root, "--text")
    assert code == 0 and "the model's directory is not known" in out


def test_companion_state_is_told(cache_dir, capsys):
    store = ColdStore(cache_dir, LARGE)
    companion = Companion("draft-hidden", 2, {"pending": 7}, {"row": mx.zeros((1, 8))})
    save(store, replace(job(list(range(30)), grown(30)), companion=companion))
    store.close()
    (row,) = listed(capsys, "ls", cache_dir)
    assert row["companion"] == "draft-hidden/2"
    code, out = run(capsys, "show", row["file"][:5], cache_dir)
    assert code == 0 and "draft-hidden/2: 1 tensor; scalars: pending" in out
    told = json.loads(run(capsys, "show", row["file"][:5], cache_dir, "--json")[1])
    assert told["companion"] == {"schema": "draft-hidden", "version": 2, "scalars": {"pending": 7}, "tensors": ["row"]}
    assert run(capsys, "verify", cache_dir)[0] == 0


def test_an_entry_is_named_by_a_beginning_that_is_its_own(stored, capsys):
    def refused(text: str) -> str:
        assert main(["cache", "show", text, str(stored.root)]) == 2
        return capsys.readouterr().err

    assert "is the beginning of 4 entries" in refused(stored.fingerprint)
    assert "there is no entry" in refused("zz") and "there is no entry" in refused("")
    assert run(capsys, "show", f"{'cd' * 16}/{stored.other.name}", stored.root)[0] == 0


def test_verify_sets_aside_what_is_damaged(stored, capsys):
    flip(stored.turns[1], -5)
    before = stored.turns[1].read_bytes()
    code, out = run(capsys, "verify", stored.root, "--quarantine", "--dry-run")
    assert code == 1 and "1 entry would be set aside" in out and stored.turns[1].exists()
    code, out = run(capsys, "verify", stored.root, "--quarantine", "--json")
    assert code == 1 and [row["file"] for row in json.loads(out) if row["removed"]] == [stored.turns[1].name]
    (bad,) = (stored.root / "quarantine").iterdir()
    assert bad.read_bytes() == before and not stored.turns[1].exists()
    # What continued it is whole, but of no use any more.
    rows = listed(capsys, "verify", stored.root)
    assert [(row["file"], row["state"]) for row in rows if row["fault"]] == [(stored.turns[2].name, "orphan")]
    assert "0 entries set aside" in run(capsys, "verify", stored.root, "--quarantine")[1] and stored.turns[2].exists()


def test_verify_deletes_what_is_damaged_and_what_continues_it(stored, capsys):
    flip(stored.turns[1], -5)
    code, out = run(capsys, "verify", stored.root, "--delete", "--dry-run")
    assert code == 1 and "2 entries would be deleted" in out and all(path.exists() for path in stored.turns)
    code, out = run(capsys, "verify", stored.root, "--delete")
    assert code == 1 and "2 entries deleted" in out
    assert [path.exists() for path in stored.turns] == [True, False, False]
    assert run(capsys, "verify", stored.root)[0] == 0


def test_verify_leaves_other_formats_alone(stored, capsys):
    raw = stored.other.read_bytes()
    header = bytearray(raw[: fmt.header_length(raw[:8], len(raw))])
    at = header.index(b'"version":"') + 11
    header[at : at + 1] = b"9"
    parsed = fmt.parse(raw[: len(header)], len(raw))
    header[fmt._HASH_AT : fmt._HASH_AT + 32] = b"0" * 32
    fmt.seal(header, parsed.checksums)
    stored.other.write_bytes(bytes(header) + raw[len(header) :])
    code, out = run(capsys, "verify", stored.root, "--delete")
    assert code == 1 and "another format version" in out and "0 entries deleted" in out
    assert stored.other.exists()


def pruned(capsys, stored, *argv: object) -> set[int]:
    """Which of the entries `prune` deletes, as numbers in the order of their last use; a dry run says the same and deletes nothing."""
    paths = [*stored.turns, stored.ring, stored.other]
    there = [path.exists() for path in paths]
    would = json.loads(run(capsys, "prune", stored.root, *argv, "--dry-run", "--json")[1])
    assert [path.exists() for path in paths] == there
    did = json.loads(run(capsys, "prune", stored.root, *argv, "--json")[1])
    assert did["files"] == would["files"] and (would["dry_run"], did["dry_run"]) == (True, False)
    assert did["entries"] == sum(there) - sum(path.exists() for path in paths)
    return {i for i, path in enumerate(paths) if not path.exists()}


def test_prune_by_age_keeps_what_younger_entries_need(stored, capsys):
    assert pruned(capsys, stored, "--older-than", "8.5d") == set()  # the last turn is younger and needs both
    assert pruned(capsys, stored, "--older-than", "7.5d") == {0, 1, 2}


def test_prune_by_model(stored, capsys):
    assert pruned(capsys, stored, "--model", "other", "--older-than", "1w") == set()
    assert pruned(capsys, stored, "--model", "other") == {4}


def test_prune_to_a_size_takes_the_oldest_first_and_leaves_before_parents(stored, capsys):
    used = sum(path.stat().st_size for path in [*stored.turns, stored.ring, stored.other])
    directories = 64 << 10
    assert pruned(capsys, stored, "--to", used + directories) == set()
    everything = json.loads(run(capsys, "prune", stored.root, "--to", "0", "--dry-run", "--json")[1])["files"]
    # The ring is younger than the first turn, but the last turn must go before that.
    assert [f["file"] for f in everything] == [path.name for path in (stored.turns[2], stored.turns[1], stored.turns[0], stored.ring, stored.other)]


def test_prune_stale_by_version_and_by_files(stored, capsys):
    assert pruned(capsys, stored, "--stale") == {4}
    config = stored.model / "config.json"
    config.write_text(config.read_text() + " ")
    assert pruned(capsys, stored, "--stale") == {0, 1, 2, 3, 4}


def test_a_model_that_moved_is_not_stale_once_a_server_knows_it(stored, capsys):
    moved = stored.model.rename(stored.model.with_name("moved"))
    out = run(capsys, "prune", stored.root, "--stale", "--dry-run")[1]
    assert "is gone" in out and "5 entries" in out
    time.sleep(0.06)  # digests of files that changed just now are not kept
    memo = DigestMemo(stored.root / "identities.json")
    for path in source_files(ModelSource(moved)).values():
        file_digest(path, memo)
    memo.save()
    assert pruned(capsys, stored, "--stale") == {4}


def test_damaged_files_set_aside_go_first(stored, capsys):
    flip(stored.other, -5)
    run(capsys, "verify", stored.root, "--quarantine")
    would = json.loads(run(capsys, "prune", stored.root, "--to", "0", "--dry-run", "--json")[1])
    assert would["files"][0]["file"].endswith(".bad") and would["entries"] == 5
