"""Loads, idle turns and sequential boundaries, in upstream's own `ResponseGenerator`."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager

import pytest
from support.waiting import until
from witness import Witness

from mlx_lm_hooks import Invocation
from mlx_lm_patches.engine import BUSY_TURNS
from mlx_lm_patches.host import host

QUESTION = "Tell me about the os module and its functions, then explain how the sys module works."


def arguments(*argv: str):
    """The server's own parsed arguments."""
    import mlx_lm.server as server

    class Parsed(Exception):
        pass

    def capture(args):
        raise Parsed(args)

    original, server.ModelProvider = server.ModelProvider, capture
    wired, server.maybe_set_recommended_wired_limit = server.maybe_set_recommended_wired_limit, lambda: None
    old, sys.argv = sys.argv, ["mlx_lm.server", *argv]
    try:
        server.main()
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        sys.argv, server.ModelProvider, server.maybe_set_recommended_wired_limit = old, original, wired


@contextmanager
def serving(model, *argv: str, thinking: str | None = None, scheme=None):
    """A witness, with a KV scheme or none, and a generator that serves `model`."""
    import mlx_lm.server as server

    args = arguments("--model", str(model), *argv)
    plugin = Witness()
    plugin.timeout, plugin.scheme = 10.0, scheme
    host.activate(plugin.plugins(), Invocation("server", args))
    provider = server.ModelProvider(args)
    generator = server.ResponseGenerator(provider, server.LRUPromptCache(args.prompt_cache_size))
    try:
        yield plugin, generator
    finally:
        generator.stop_and_join()
        host.deactivate()


def ask(generator, text=QUESTION, *, seed=None, max_tokens=4, model="default_model"):
    """The reply's tokens and the number of reused ones."""
    import mlx_lm.server as server

    request = server.CompletionRequest("chat", "", [{"role": "user", "content": text}], None, None)
    options = server.GenerationArguments(
        model=server.ModelDescription(model, "default_model", None),
        sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
        logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=max_tokens,
        num_draft_tokens=3,
        logprobs=False,
        top_logprobs=-1,
        seed=seed,
        chat_template_kwargs=None,
    )
    progress = []
    context, reply = generator.generate(request, options, progress_callback=lambda *a: progress.append(a))
    tokens = [r.token for r in reply]
    return tokens, context, progress


def test_a_model_is_announced_with_its_files(tiny_llama):
    with serving(tiny_llama, "--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "7") as (plugin, generator):
        ask(generator)
    (loaded,) = plugin.named("model_loaded")
    assert loaded["path"] == str(tiny_llama.resolve()) and loaded["scheme"] == "affine:8:32@7"
    assert (loaded["adapter"], loaded["draft"], loaded["generation"]) == ("None", None, 1)


def test_a_draft_model_is_part_of_the_source(tiny_llama):
    with serving(tiny_llama, "--draft-model", str(tiny_llama)) as (plugin, generator):
        ask(generator)
    assert plugin.named("model_loaded")[0]["draft"] == str(tiny_llama.resolve())


def test_the_engine_is_announced_before_its_thread_runs(tiny_llama):
    with serving(tiny_llama) as (plugin, generator):
        assert plugin.named("engine_started") == [{"event": "engine_started", "alive": False}]
        until(lambda: plugin.engine.alive)
    assert not plugin.engine.alive


def test_idle_turns_run_on_the_generation_thread_back_to_back(tiny_llama):
    with serving(tiny_llama) as (plugin, generator):
        ask(generator)
        until(lambda: not plugin.engine.busy)
        plugin.work = 200
        started = time.monotonic()
        plugin.engine.wake()
        until(lambda: plugin.work == 0)
        # Upstream's poll alone would take 0.1 s for each.
        assert time.monotonic() - started < 3.0
        assert {e["thread"] for e in plugin.named("idle")} == {generator._generation_thread.name}


def test_wake_ends_the_wait(tiny_llama):
    with serving(tiny_llama) as (plugin, generator):
        ask(generator)
        until(lambda: not plugin.engine.busy)
        times = []
        for _ in range(10):
            until(lambda: plugin.work == 0)
            time.sleep(0.02)
            plugin.work = 1
            started = time.monotonic()
            plugin.engine.wake()
            until(lambda: plugin.work == 0)
            times.append(time.monotonic() - started)
        assert sorted(times)[5] < 0.03, times
        # No wake is delivered as a request.
        assert ask(generator)[0] and plugin.engine.alive


def test_requests_come_before_idle_work(tiny_llama):
    with serving(tiny_llama) as (plugin, generator):
        ask(generator)
        plugin.work = 1 << 40
        started = time.monotonic()
        busy = []
        probe = threading.Thread(target=lambda: [busy.append(plugin.engine.busy) or time.sleep(0.001) for _ in range(300)])
        probe.start()
        tokens, _, _ = ask(generator, max_tokens=100)
        assert len(tokens) == 100 and time.monotonic() - started < 5.0
        probe.join()
        assert any(busy)


@pytest.mark.parametrize("seed", [None, 7], ids=["batch", "sequential"])
def test_busy_turns_come_between_steps_or_requests_and_seldom(tiny_llama, seed):
    with serving(tiny_llama) as (plugin, generator):
        started = time.monotonic()
        for _ in range(3):
            ask(generator, max_tokens=100, seed=seed)
        turns = plugin.named("busy")
        assert 1 <= len(turns) <= (time.monotonic() - started) / BUSY_TURNS + 1
        assert {(e["busy"], e["thread"]) for e in turns} == {(True, generator._generation_thread.name)}


def test_a_failing_busy_task_does_not_stop_the_server(tiny_llama, monkeypatch):
    monkeypatch.setattr(Witness, "hurry", lambda self: 1 / 0)
    with serving(tiny_llama) as (plugin, generator):
        assert len(ask(generator, max_tokens=50)[0]) == 50 and generator.is_healthy


def test_a_failing_idle_task_does_not_stop_the_server(tiny_llama, monkeypatch):
    monkeypatch.setattr(Witness, "idle", lambda self: 1 / 0)
    with serving(tiny_llama) as (plugin, generator):
        assert ask(generator)[0] and generator.is_healthy


@pytest.mark.parametrize("seed", [None, 7], ids=["batch", "sequential"])
def test_both_paths_give_the_same_with_and_without(tiny_llama, seed):
    import mlx_lm.server as server

    args = arguments("--model", str(tiny_llama))
    generator = server.ResponseGenerator(server.ModelProvider(args), server.LRUPromptCache())
    plain = ask(generator, seed=seed)[0]
    generator.stop_and_join()
    with serving(tiny_llama) as (plugin, generator):
        assert ask(generator, seed=seed)[0] == plain
        tokens, context, _ = ask(generator, seed=seed)
        assert tokens == plain and context.prompt_cache_count == len(context.prompt) - 1
    assert all(e["offsets"] == [e["tokens"]] for e in plugin.named("put"))


def test_the_sequential_path_keeps_the_prompts_boundary(tiny_lfm2):
    """Recurrent state cannot be shortened: without the boundary the same prompt would be computed again."""
    with serving(tiny_lfm2, "--prefill-step-size", "16") as (plugin, generator):
        first, context, progress = ask(generator, seed=1)
        second, again, _ = ask(generator, seed=1)
    prompt = len(context.prompt)
    assert plugin.named("snapshot")[0]["tokens"] == prompt - 1 == plugin.named("snapshot")[0]["offsets"][0]
    assert len(plugin.named("observe")) == len(range(0, prompt - 1, 16))
    assert second == first and again.prompt_cache_count == prompt - 1
    assert progress[0] == (0, prompt) and progress[-1] == (prompt, prompt)


def test_a_boundary_before_a_thinking_tail(tiny_lfm2, monkeypatch):
    """The next turn will not have the tail: what is kept ends before it, and the reply is the same."""
    import mlx_lm.server as server

    original = server.ResponseGenerator._tokenize

    def with_tail(self, *args):
        prompt, *rest = original(self, *args)
        return prompt, [prompt[:-5], prompt[-5:]], ["user", "assistant"], *rest[2:]

    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", with_tail)
    with serving(tiny_lfm2) as (plugin, generator):
        first, context, progress = ask(generator, seed=1)
        second, again, _ = ask(generator, seed=1)
    monkeypatch.undo()
    with serving(tiny_lfm2) as (_, generator):
        plain = ask(generator, seed=1)[0]
    prompt = len(context.prompt)
    assert plugin.named("snapshot")[0]["tokens"] == prompt - 5 == plugin.named("snapshot")[0]["offsets"][0]
    assert first == second == plain and again.prompt_cache_count == prompt - 5
    assert [p for p, _ in progress] == sorted({p for p, _ in progress}) and {t for _, t in progress} == {prompt}


def test_merged_rows_come_from_the_plugin(tiny_llama, monkeypatch):
    from mlx_lm_hooks import hookimpl

    merged = []

    @hookimpl
    def mlx_lm_merge_row(self, caches):
        merged.append([c.offset for c in caches])
        return [type(c).merge([c]) for c in caches] if merged[1:] else None

    monkeypatch.setattr(Witness, "mlx_lm_merge_row", mlx_lm_merge_row, raising=False)
    with serving(tiny_llama) as (plugin, generator):
        first = ask(generator)[0]
        second, context, _ = ask(generator)
    assert second == first and merged[0] == [0, 0, 0] and merged[-1] == [context.prompt_cache_count] * 3
