"""The cache directory under real servers: its cap, its start, what clearing it frees, what the flags about it do."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.directory import Directory, entry_name
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.settings import Settings
from support.models import document
from support.server import tiered, user

LONG = 3000
TESTS = Path(__file__).resolve().parent


def ask(server, *texts, **options):
    return server.chat(user(*texts), tokens=True, max_tokens=4, **options)


def allocated(root: Path) -> int:
    """Bytes on disk of all files below `root`, as ``du`` counts them, while nobody puts files in place or evicts."""
    with Directory(root, 0).locked():
        return sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names)


class Watch:
    """The most that `root` ever took, looked at all the time while the block runs."""

    def __init__(self, root: Path):
        self.root, self.highest, self.looks = root, 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self.highest = max(self.highest, allocated(self.root))
            self.looks += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._ended.set()
        self._thread.join()


def test_17_all_files_stay_below_the_cap(tiny_llama, tiny_lfm2, cache_dir, tmp_path):
    """Entries of two models, damaged ones, files of nobody: all count, at every moment, and after a start with less."""
    cap = 3 * 10**6
    cache_dir.mkdir()
    (cache_dir / "left-by-others.bin").write_bytes(b"x" * 400_000)
    with Watch(cache_dir) as watch, tiered(tiny_llama, cache_dir, "--ssd-cache-max", str(cap), log=tmp_path / "log") as server:
        for i in range(12):
            for model in (tiny_llama, tiny_lfm2):
                ask(server, f"{i} " + document(1000, start=100 * i), model=str(model))
            if i == 6:
                server.flush()  # answered 503: what is in memory alone is more than the cap
                assert server.stats()["ssd"]["entries"]
                newest = max(cache_dir.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
                newest.write_bytes(newest.read_bytes()[:-1])
            stats = server.stats()["ssd"]
            assert allocated(cache_dir) <= stats["max_bytes"] == cap
        deadline = time.monotonic() + 20
        # What is still being written is counted when it is done.
        while server.stats()["ssd"]["bytes"] < allocated(cache_dir) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert time.monotonic() < deadline, "files that the statistics do not count"
        stats = server.stats()["ssd"]
        assert stats["evictions"] > 0 and stats["entries"] >= 2, stats
        # Memory may hold more than the cap; the exit code says the same as a flush.
        durable = server.flush()[0] == 200
        assert server.terminate() == (0 if durable else 1)
    assert watch.looks > 100 and 0.6 * cap < watch.highest <= cap
    with tiered(tiny_llama, cache_dir, "--ssd-cache-max", str(cap // 2), log=tmp_path / "log2") as server:
        ask(server, "hi")
        assert server.flush()[0] == 200
        assert 0 < allocated(cache_dir) <= cap // 2
    assert (cache_dir / "left-by-others.bin").exists()


def multiply(entry: Path, count: int) -> None:
    """Lay `count` sound entries of other tokens beside this one."""
    content = entry.read_bytes()
    header = fmt.parse(content[: 8 + struct.unpack("<Q", content[:8])[0]], len(content))
    length = header.meta.length
    for i in range(count):
        tokens = [10**6 + i] * length
        raw = struct.pack(f"<{length}q", *tokens)
        head = fmt.layout(header.meta)
        fmt.seal(head, [fmt.digest(raw), *header.checksums[1:]])
        (entry.parent / entry_name("", token_key(tokens))).write_bytes(head + raw + content[len(head) + len(raw) :])


def test_24_a_full_directory_delays_neither_readiness_nor_the_log(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "fill") as server:
        cold = ask(server, "hi")
        assert server.terminate() == 0
    multiply(max(cache_dir.rglob("*.safetensors"), key=lambda path: path.stat().st_size), count := 5000)
    ready = {}
    for name, directory in (("empty", tmp_path / "empty"), ("full", cache_dir)):
        with tiered(tiny_llama, directory, log=tmp_path / f"{name}.log", wait=False) as server:
            ready[name] = server.wait_healthy()
            if name == "full":
                assert server.stats()["ssd"]["entries"] < count, "readiness waited for the scan, or it was over too soon to tell"
                deadline = time.monotonic() + 30
                while server.stats()["ssd"]["entries"] < count and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert time.monotonic() < deadline, "the scan waits for a request"
                assert ask(server, "hi").cached_tokens == cold.prompt_tokens - 1
                assert sum("GET /" not in line for line in server.log().splitlines()) < 20
            server.kill()
    # Reading this many headers takes a second and more.
    assert ready["full"] < ready["empty"] + 1, ready


def test_28_what_the_statistics_say_adds_up(tiny_llama, cache_dir, tmp_path):
    """Saved tokens are those that requests were told of; nothing is above 100 %."""
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        texts = [document(LONG), document(LONG) + " more", "other", document(LONG), "hi", "other"]
        answers = [ask(server, text) for text in texts]
        assert server.flush()[0] == 200
        stats = server.stats()
    assert stats["lookups"] == stats["hits"] + stats["misses"] == len(texts)
    assert stats["hits"] == sum(a.cached_tokens > 0 for a in answers) == sum(stats["hits_by_tier"].values())
    assert stats["tokens_saved"] == sum(a.cached_tokens for a in answers) == sum(stats["tokens_saved_by_tier"].values())
    assert 0 < stats["tokens_saved"] < stats["prompt_tokens"] == sum(a.prompt_tokens for a in answers)
    for tier in ("ram", "ssd"):
        assert 0 < stats[tier]["bytes"] <= stats[tier]["max_bytes"]


def test_28_clear_frees_what_it_says(tiny_llama, cache_dir, tmp_path):
    def command(*argv):
        done = subprocess.run(
            [sys.executable, "-m", "mlx_lm_tiered.cli", "cache", *argv, "--json"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with tiered(tiny_llama, cache_dir, log=tmp_path / "first") as server:
        ask(server, document(LONG))
        ask(server, "other " + document(LONG))
        assert server.flush()[0] == 200
        before = allocated(cache_dir)
        cleared = command("clear", str(cache_dir))
        freed = before - allocated(cache_dir)
        assert cleared["entries"] == 2 and freed == cleared["bytes"] > 0.9 * before
        assert command("list", str(cache_dir)) == []
        # The server goes on, and what it still has in memory comes back when it is asked to save.
        assert ask(server, document(LONG)).cached_tokens > 0
        server.kill()
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second") as server:
        assert ask(server, "other " + document(LONG)).cached_tokens == 0


def test_28_never_verifying_reads_what_verifying_refuses(tiny_llama, cache_dir, tmp_path):
    """--ssd-cache-verify: one flipped bit of a tensor, seen or not."""
    with tiered(tiny_llama, cache_dir, log=tmp_path / "fill") as server:
        cold = ask(server, document(LONG))
        assert server.terminate() == 0
    for file in cache_dir.rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-len(content) // 3] ^= 1
        file.write_bytes(content)
    for when, reused in (("never", cold.prompt_tokens - 1), ("always", 0)):
        shutil.copytree(cache_dir, tmp_path / when)
        with tiered(tiny_llama, tmp_path / when, "--ssd-cache-verify", when, log=tmp_path / f"{when}.log") as server:
            assert ask(server, document(LONG)).cached_tokens == reused


def test_28_the_queues_size_and_the_least_prefix_are_kept(tiny_llama, cache_dir, tmp_path):
    """--ssd-queue drops what does not fit, --prompt-cache-min-tokens reuses nothing shorter."""
    flags = ["--ssd-queue", "1KB", "--prompt-cache-bytes", "1MB", "--no-writebehind", "--prompt-cache-min-tokens", "1000"]
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "log") as server:
        threads = [threading.Thread(target=ask, args=(server, f"{i} " + document(LONG, start=200 * i))) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ask(server, "5 " + document(LONG, start=1000)).cached_tokens == 0
        status, report = server.flush()
    assert report["dropped"] > 0 and status == 503 and not report["durable"]


# Where each setting's effect on a real server is seen.
EFFECTS = {
    "prompt_cache_bytes": "test_faults.py::test_8_the_byte_cap_holds_on_every_path",
    "prompt_cache_size": "test_faults.py::test_7_hits_refresh_recency",
    "prompt_cache_min_tokens": "test_directory.py::test_28_the_queues_size_and_the_least_prefix_are_kept",
    "kv_scheme": "test_schemes.py::test_12_batches_and_tiers_answer_as_one_request_alone",
    "speculation": "test_speculation.py::test_turns_from_ram_and_disk_are_those_of_plain_decoding",
    "draft_model": "test_speculation.py::test_2_and_3_turns_with_a_draft_model_are_those_of_plain_decoding",
    "assistant_position": "test_assistant.py::test_where_drafts_stand_and_what_they_see_changes_acceptance_only",
    "assistant_window": "test_assistant.py::test_where_drafts_stand_and_what_they_see_changes_acceptance_only",
    "num_draft_tokens": "test_speculation.py::test_turns_from_ram_and_disk_are_those_of_plain_decoding",
    "spec_sampling": "test_speculation.py::test_who_decides_sampled_tokens",
    "spec_trace": "test_speculation.py::test_a_request_may_say_how_many_drafts_it_wants_and_the_trace_shows_them",
    "spec_strict": "test_speculation.py::test_strictly_nothing_is_taken_back",
    "paged_kv": "test_paged.py::test_more_requests_than_blocks",
    "paged_kv_block_size": "test_paged.py::test_more_requests_than_blocks",
    "paged_kv_pool": "test_paged.py::test_more_requests_than_blocks",
    "kernels": "test_schemes.py::test_4_quantized_caches_with_a_draft_model",
    "ssd_cache": "test_restart.py::test_the_same_prompt_is_cold_once",
    "ssd_cache_max": "test_directory.py::test_17_all_files_stay_below_the_cap",
    "ssd_cache_verify": "test_directory.py::test_28_never_verifying_reads_what_verifying_refuses",
    "ssd_restore": "test_paying.py::test_25_what_is_faster_is_done_and_the_tokens_are_the_same",
    "ssd_queue": "test_directory.py::test_28_the_queues_size_and_the_least_prefix_are_kept",
    "ssd_demote_idle": "test_demotion.py::test_an_idle_entry_leaves_ram_and_comes_back",
    "generation_checkpoint": "test_checkpoints.py::test_a_killed_generation_goes_on",
    "writebehind": "test_restart.py::test_without_writebehind_a_flush_still_saves",
    "shared_cache": "../shared/test_stores.py::test_a_second_machine_answers_with_what_the_first_has_computed",
    "shared_cache_team": "../shared/test_stores.py::test_a_second_machine_answers_with_what_the_first_has_computed",
    "shared_cache_write": "../shared/test_stores.py::test_a_second_machine_answers_with_what_the_first_has_computed",
    "shared_cache_bandwidth": "../shared/test_stores.py::test_a_servers_uploads_keep_to_its_bandwidth",
    "shared_cache_max": "../shared/test_commands.py::test_what_is_old_or_too_much_is_deleted",
    "shared_cache_ttl": "../shared/test_commands.py::test_what_is_old_or_too_much_is_deleted",
    "memory_budget": "test_memory_guard.py::test_a_prompt_that_can_never_fit_is_refused_for_good",
    "shutdown_timeout": "test_restart.py::test_the_shutdown_timeout_holds",
    "warm": "test_warm.py::test_a_warmed_prompt_hits_and_what_is_stored_is_left_alone",
    "metrics": "../web/test_page.py::test_there_is_no_page_and_no_metrics_where_they_are_off",
    "status_page": "../web/test_page.py::test_there_is_no_page_and_no_metrics_where_they_are_off",
    "cache_inspection": "../web/test_page.py::server",
    "admin_routes": "test_faults.py::test_routes_are_for_this_machine_and_this_origin",
}


@pytest.mark.parametrize("name", Settings.__dataclass_fields__)
def test_28_every_setting_has_an_effect_that_is_tested(name):
    file, _, test = EFFECTS[name].partition("::")
    body = re.search(rf"^def {test}\(.*?(?=^\S|\Z)", (TESTS / file).read_text(), re.MULTILINE | re.DOTALL)
    assert body is not None
    flag, env = name.replace("_", "-"), f"MLX_LM_TIERED_{name.upper()}"
    assert f"--{flag}" in body[0] or env in body[0] or (name == "ssd_cache" and "cache_dir" in body[0])


def test_a_flush_does_not_write_what_it_evicts_again(tiny_llama, cache_dir, tmp_path):
    """Fault 32's kind: RAM holds more than the SSD tier may, and is flushed again and again."""
    with tiered(tiny_llama, cache_dir, "--ssd-cache-max", "4MB", "--no-writebehind", log=tmp_path / "log") as server:
        for i in range(8):
            server.chat(user(f"{i} " + document(1500, start=200 * i)), max_tokens=2)
        reports = [server.flush() for _ in range(6)]
        stats = server.stats()
    assert {status for status, _ in reports} == {503} and reports[-1][1]["pending"] > 0
    assert stats["ssd"]["stored"] <= 8
    assert stats["ssd"]["entries"] >= 2
