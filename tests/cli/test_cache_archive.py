"""`cache export` and `import`: what comes out goes in elsewhere, and nothing else does."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cold.cold_helpers import FINGERPRINT, LARGE, grown, job, restore, same, save, scanned, wrapped

from mlx_lm_tiered.cli import main
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.cold.locks import FileLock
from mlx_lm_tiered.cold.reader import open_entry
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.commands.cache import archive


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with a conversation of three turns and a ring, and the same exported."""
    place = tmp_path_factory.mktemp("made")
    store = ColdStore(place / "cold", LARGE)
    for n in (100, 200, 300):
        save(store, job(list(range(n)), grown(n)))
    save(store, job(list(range(500, 540)), wrapped(40)))
    store.close()
    assert main(["cache", "export", "--all", str(place / "cold"), "-o", str(place / "moved.tar")]) == 0
    return place


@pytest.fixture
def stored(made: Path, tmp_path: Path) -> SimpleNamespace:
    """A copy of it for each test."""
    root, file = tmp_path / "cold", tmp_path / "moved.tar"
    shutil.copytree(made / "cold", root)
    shutil.copy(made / "moved.tar", file)
    order = [tmp_path / "cold" / "v1" / name for name in names_in(file)]
    turns = [path for path in order if path.exists() and length_of(path) in (100, 200, 300)]
    (ring,) = set(order[:-1]) - set(turns)
    return SimpleNamespace(root=root, turns=sorted(turns, key=length_of), ring=ring, file=file, target=tmp_path / "target")


def names_in(file: Path) -> list[str]:
    with tarfile.open(file) as tar:
        return tar.getnames()


def length_of(path: Path) -> int:
    with open_entry(path) as reader:
        return reader.header.meta.length


def imported(capsys, stored, *argv: object, root: Path | None = None) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["cache", "import", str(stored.file), str(root or stored.target), *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys, stored, because: str) -> None:
    """The import says why in one sentence with exit code 2, and has written nothing."""
    capsys.readouterr()
    assert main(["cache", "import", str(stored.file), str(stored.target)]) == 2
    out, error = capsys.readouterr()
    assert because in error and error.strip().splitlines()[-1].startswith("mlx_lm.tiered:") and out == ""
    assert not stored.target.exists()


def test_a_cache_moves(stored, capsys):
    code, would = imported(capsys, stored, "--dry-run")
    assert code == 0 and would["entries"] == 4 and not stored.target.exists()
    code, did = imported(capsys, stored)
    assert code == 0 and did == would | {"dry_run": False}
    for path in [*stored.turns, stored.ring]:
        there = stored.target / path.relative_to(stored.root)
        assert there.read_bytes() == path.read_bytes()
        assert stat.S_IMODE(there.stat().st_mode) == 0o600 and stat.S_IMODE(there.parent.stat().st_mode) == 0o700
        assert abs(there.stat().st_mtime - path.stat().st_mtime) < 1, "recency moves, too"
    store = scanned(stored.target)
    assert same(restore(store, list(range(300))), grown(300)) and len(store.stats()["scans"]) == 1
    store.close()
    assert not list((stored.target / "tmp").iterdir()) and not list((stored.target / "writers").iterdir())
    code, again = imported(capsys, stored)
    assert code == 0 and again["entries"] == 0 and again["already_there"] == 4


def test_one_entry_takes_its_chain_along(stored, capsys, tmp_path):
    file = tmp_path / "one.tar"
    assert main(["cache", "export", stored.turns[1].name[:10], str(stored.root), "-o", str(file)]) == 0
    names = [f"{path.parent.name}/{path.name}" for path in stored.turns[:2]]
    with tarfile.open(file) as tar:  # any tar program reads it
        assert tar.getnames() == [*names, "manifest.json"]
        assert tar.extractfile(names[1]).read() == stored.turns[1].read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert main(["cache", "export", stored.turns[1].name[:10], str(stored.root), "-o", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(stored, capsys, tmp_path):
    capsys.readouterr()
    assert main(["cache", "export", "--all", str(stored.root), "-o", str(tmp_path / "no.tar"), "--dry-run"]) == 0
    assert "4 entries" in capsys.readouterr().out and not (tmp_path / "no.tar").exists()


def test_damaged_entries_and_what_continues_them_stay_out(stored, capsys, tmp_path):
    content = bytearray(stored.turns[1].read_bytes())
    content[-3] ^= 1
    stored.turns[1].write_bytes(content)
    capsys.readouterr()
    assert main(["cache", "export", "--all", str(stored.root), "-o", str(tmp_path / "rest.tar"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {entry["file"].split("/")[1] for entry in told["left_out"]} == {path.name for path in stored.turns[1:]}
    stored.file = tmp_path / "rest.tar"
    assert imported(capsys, stored)[1]["entries"] == 2


def test_a_chain_whose_beginning_is_there_goes_on(stored, capsys):
    (stored.target / "v1" / FINGERPRINT).mkdir(parents=True)
    shutil.copy(stored.turns[0], stored.target / "v1" / FINGERPRINT)
    # This one waits for what it continues.
    shutil.copy(stored.turns[2], stored.target / "v1" / FINGERPRINT)
    code, told = imported(capsys, stored)
    assert code == 0 and told["entries"] == 2 and told["already_there"] == 2
    store = scanned(stored.target)
    assert same(restore(store, list(range(300))), grown(300))
    store.close()


def test_other_content_under_the_same_name_stays(stored, capsys):
    store = ColdStore(stored.target, LARGE)
    other = save(store, job(list(range(100)), grown(100, seed=7)))
    store.close()
    before = other.read_bytes()
    code, told = imported(capsys, stored)
    assert code == 1 and told["entries"] == 1 and len(told["refused"]) == 3
    assert other.read_bytes() == before


def test_the_cap_holds(stored, capsys):
    assert main(["cache", "import", str(stored.file), str(stored.target), "--ssd-cache-max", "60kB"]) in (1, 2)
    assert "may" in capsys.readouterr().err and not stored.target.exists()


def test_an_import_waits_for_whoever_holds_the_directory(stored, capsys):
    (stored.target / "writers").mkdir(parents=True)
    other = FileLock(stored.target / "lock")
    assert other.try_acquire()
    seen = []

    def let_go() -> None:
        seen.append(list(stored.target.rglob("*.safetensors")))
        other.release()

    timer = threading.Timer(0.5, let_go)
    timer.start()
    assert imported(capsys, stored)[1]["entries"] == 4 and seen == [[]]


def test_entries_are_put_in_place_under_the_lock(stored, capsys, monkeypatch):
    free = []

    def publish(directory: Directory, partial: Path, path: Path) -> None:
        other = FileLock(stored.target / "lock")
        free.append(other.try_acquire())
        other.release()
        original(directory, partial, path)

    original = Directory.publish
    monkeypatch.setattr(Directory, "publish", publish)
    assert imported(capsys, stored)[1]["entries"] == 4 and free == [False] * 4


def test_a_time_in_the_future_is_now(stored, capsys):
    def change(members):
        return [(m, data) for m, data in members if setattr(m, "mtime", 7 * 10**9) is None]

    rewrite(stored.file, change)
    assert imported(capsys, stored)[1]["entries"] == 4
    newest = max(path.stat().st_mtime for path in stored.target.rglob("*.safetensors"))
    assert newest <= stored.target.stat().st_mtime + 60


Members = list[tuple[tarfile.TarInfo, bytes]]


def rewrite(file: Path, change: Callable[[Members], Members], manifest: bool = False, format: int = tarfile.USTAR_FORMAT) -> None:
    """Write the archive anew, with Python's tar, as a forger would; with `manifest` one that names what is there now."""
    with tarfile.open(file) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]
    for member, _ in members:
        member.mode, member.uname, member.gname = 0o600, "", ""
    members = change(members)
    if manifest:
        entries = [(m.name, len(data), checksum_of(data)) for m, data in members if m.name != "manifest.json"]
        text = archive.manifest(entries, "now")
        info = tarfile.TarInfo("manifest.json")
        info.mode = 0o600
        members = [(m, data) for m, data in members if m.name != "manifest.json"] + [(info, text)]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
    size = sum(512 + len(data) + -len(data) % 512 for m, data in members if m.isreg()) + 512 * sum(not m.isreg() for m, _ in members)
    file.write_bytes(out.getvalue()[: size + 1024] if format == tarfile.USTAR_FORMAT else out.getvalue())


def checksum_of(data: bytes) -> str:
    found = data[fmt._HASH_AT : fmt._HASH_AT + 32]
    return found.decode() if any(found) else "0" * 32


def test_what_is_rewritten_unchanged_is_taken(stored, capsys):
    """Else the refusals below might be for the rewriting's sake."""
    rewrite(stored.file, lambda members: members, manifest=True)
    assert imported(capsys, stored)[1]["entries"] == 4


def extra(name: str, **fields) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        info = tarfile.TarInfo(name)
        info.mode = 0o600
        for field, value in fields.items():
            setattr(info, field, value)
        return [(info, members[0][1] if info.isreg() else b""), *members]

    return change


def renamed(name: str) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        members[0][0].name = name
        return members

    return change


NAME = f"{FINGERPRINT}/{'0' * 32}.safetensors"


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (extra(NAME, type=tarfile.SYMTYPE, linkname="/etc/passwd"), "member 1 is no regular file"),
        (extra(NAME, type=tarfile.LNKTYPE, linkname="/etc/passwd"), "member 1 is no regular file"),
        (extra(FINGERPRINT, type=tarfile.DIRTYPE), "member 1 is no regular file"),
        (extra(NAME, type=tarfile.FIFOTYPE), "member 1 is no regular file"),
        (extra("../" + NAME), "which is no entry's name"),
        (extra(f"{FINGERPRINT}/../{NAME}"), "which is no entry's name"),
        (extra("/etc/cron.d/x"), "which is no entry's name"),
        (extra("v1/" + NAME), "which is no entry's name"),
        (extra(NAME + "\n"), "which is no entry's name"),
        (extra(NAME.upper()), "which is no entry's name"),
        (extra(NAME, mode=0o4755), "has a header that `export` does not write"),
        (extra(NAME, uname="root"), "has a header that `export` does not write"),
        (lambda members: [members[0], *members], "twice"),
        (lambda members: [*members[:-1]], "no manifest"),
        (lambda members: [members[-1], *members[:-1]], "behind its manifest"),
        (lambda members: [*members[1:]], "names other files or sizes"),
        (extra(NAME), "names other files or sizes"),
    ],
    ids=range(17),
)
def test_hostile_members_are_refused(stored, capsys, change, because):
    rewrite(stored.file, change)
    refused(capsys, stored, because)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (renamed(NAME), "not what its name says"),
        (renamed(f"{'ef' * 16}/{'0' * 32}.safetensors"), "of another model"),
        (extra(NAME), "not what its name says"),
        (lambda members: [m for i, m in enumerate(members) if i != 1], "what it continues is missing"),
        (lambda members: [(m, b"\0" * len(data)) for m, data in members], ".safetensors: "),
    ],
    ids=["renamed", "other model", "twice under two names", "without its parent", "zeros"],
)
def test_a_manifest_that_fits_does_not_help(stored, capsys, change, because):
    rewrite(stored.file, change, manifest=True)
    refused(capsys, stored, because)


@pytest.mark.parametrize("part", ["header", "tokens", "last tensor", "manifest", "padding of the header block"])
def test_one_flipped_bit_is_noticed(stored, capsys, part):
    content = bytearray(stored.file.read_bytes())
    size = stored.turns[0].stat().st_size
    at = {"header": 512 + 300, "tokens": 512 + 4096, "last tensor": 512 + size - 1, "padding of the header block": 505}.get(part)
    at = content.index(b'"bytes"') + 10 if at is None else at
    content[at] ^= 1
    stored.file.write_bytes(content)
    refused(capsys, stored, "is not taken")


def test_an_entry_is_the_one_that_the_manifest_means(stored, capsys):
    """A sound entry in place of another, under its name and of its size."""
    content = stored.file.read_bytes()
    at = content.rindex(b'"checksum": "') + 13
    assert content[at : at + 32].decode() in {checksum_of(path.read_bytes()) for path in [*stored.turns, stored.ring]}
    stored.file.write_bytes(content[:at] + content[at : at + 32][::-1] + content[at + 32 :])
    refused(capsys, stored, "It is not what the manifest says")


@pytest.mark.parametrize("cut", [0, 100, 512, 5000, -1, -1024, -1025])
def test_a_truncated_archive_is_refused(stored, capsys, cut):
    content = stored.file.read_bytes()
    stored.file.write_bytes(content[:cut] if cut else b"")
    refused(capsys, stored, "is not taken")


def test_a_size_beyond_the_end_is_refused_before_anything_is_read(stored, capsys):
    for size in (10**9, 8**11 - 1, 2**80):
        content = bytearray(stored.file.read_bytes())
        with tarfile.open(stored.file) as tar:
            first = tar.getmembers()[0]
        content[:512] = archive.header(first.name, size, int(first.mtime))
        copy = stored.file.with_name("large.tar")
        copy.write_bytes(content)
        refused(capsys, SimpleNamespace(file=copy, target=stored.target), "more than there are")


def test_what_is_no_archive_is_refused(stored, capsys, tmp_path):
    stored.file = tmp_path / "fifo"
    os.mkfifo(stored.file)
    refused(capsys, stored, "not a regular file")
    stored.file = stored.ring
    refused(capsys, stored, "is not taken")
    stored.file = tmp_path / "nowhere"
    refused(capsys, stored, "No such file")


def test_extensions_of_the_format_are_refused(stored, capsys):
    """A pax or GNU header may claim any size and any name."""
    original = stored.file.read_bytes()
    for format, fields in ((tarfile.PAX_FORMAT, {"pax_headers": {"path": "../x"}}), (tarfile.GNU_FORMAT, {})):
        stored.file.write_bytes(original)
        rewrite(stored.file, extra(NAME, **fields), format=format)
        refused(capsys, stored, "member 1 ")


def test_sizes_above_8_gib_are_written_so_that_others_read_them():
    block = archive.header(NAME, 9 * 2**33 + 5, 7)
    info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    assert (info.name, info.size, info.mtime) == (NAME, 9 * 2**33 + 5, 7)
