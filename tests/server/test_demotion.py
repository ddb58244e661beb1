"""Entries leave RAM for the SSD tier: when idle, when drained, when another model is loaded."""

import time

from support.models import document
from support.server import tiered, user
from support.waiting import until

QUESTION = document(3000)


def ask(server, text=QUESTION, **options):
    return server.chat(user(text), tokens=True, max_tokens=8, **options)


def test_an_idle_entry_leaves_ram_and_comes_back(tiny_model, cache_dir, tmp_path):
    with tiered(tiny_model, cache_dir, "--ssd-demote-idle", "1", log=tmp_path / "log") as server:
        first = ask(server)
        until(lambda: server.stats()["ram"]["entries"] == 0)
        stats = server.stats()
        assert stats["demotions"] >= 1 and stats["ram"]["bytes"] == 0
        again = ask(server)
        assert again.tokens == first.tokens and again.cached_tokens == first.prompt_tokens - 1
        assert server.stats()["hits_by_tier"]["ssd"] == 1


def test_use_keeps_an_entry_in_ram(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, "--ssd-demote-idle", "3", log=tmp_path / "log") as server:
        ask(server)
        for _ in range(8):
            time.sleep(0.7)
            ask(server)
        stats = server.stats()
        assert stats["demotions"] == 0 and stats["hits_by_tier"] == {"ram": 8, "queue": 0, "ssd": 0, "shared": 0}


def test_zero_never_demotes(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, "--ssd-demote-idle", "0", log=tmp_path / "log") as server:
        ask(server)
        assert server.flush()[0] == 200
        time.sleep(1.5)
        assert server.stats()["ram"]["entries"] == 1


def test_a_drain_frees_what_is_on_disk(tiny_lfm2, cache_dir, tmp_path):
    with tiered(tiny_lfm2, cache_dir, log=tmp_path / "log") as server:
        first = ask(server)
        ask(server, "another " + QUESTION)
        status, _ = server.request("POST", "/admin/drain", b"")
        stats = server.stats()
        assert status == 200
        assert stats["ram"]["entries"] == stats["ram"]["bytes"] == 0 and stats["demotions"] >= 2
        again = ask(server)
        assert again.tokens == first.tokens and again.cached_tokens == first.prompt_tokens - 1


def test_what_cannot_be_saved_stays_in_ram(tiny_llama, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with tiered(tiny_llama, blocker / "cold", "--ssd-demote-idle", "1", log=tmp_path / "log") as server:
        first = ask(server)
        assert server.request("POST", "/admin/drain", b"")[0] == 503
        time.sleep(2)
        stats = server.stats()
        assert stats["ram"]["entries"] >= 1 and stats["demotions"] == 0
        assert ask(server).cached_tokens == first.prompt_tokens - 1


def test_a_model_swap_saves_and_frees_and_swapping_back_restores(tiny_llama, tiny_lfm2, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, "--no-writebehind", log=tmp_path / "log") as server:
        first = ask(server)
        other = ask(server, model=str(tiny_lfm2))
        assert other.cached_tokens == 0
        assert server.stats()["demotions"] >= 1
        again = ask(server)
        stats = server.stats()
    assert again.tokens == first.tokens and again.cached_tokens == first.prompt_tokens - 1
    assert stats["hits_by_tier"]["ssd"] == 1


def test_without_an_ssd_tier_nothing_is_demoted(tiny_llama, tiny_lfm2, tmp_path):
    with tiered(tiny_llama, None, log=tmp_path / "log") as server:
        first = ask(server)
        ask(server, model=str(tiny_lfm2))
        assert server.request("POST", "/admin/drain", b"")[0] == 503
        again = ask(server)
        assert again.cached_tokens == first.prompt_tokens - 1
        assert server.stats()["demotions"] == 0
