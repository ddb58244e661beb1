"""A second model drafts: tokens are plain greedy decoding's, its own caches stay a prefix of the sequence, and what does not fit is named."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from contextlib import contextmanager

import mlx.core as mx
import pytest
from families import write_model_dir
from mlx_lm import load
from speculative_runs import generate, generator, plain

from mlx_lm_hooks import UsageError, disable, enable
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.bench.in_process import prefilled
from mlx_lm_tiered.memory.room import Room
from mlx_lm_tiered.plugin import current
from mlx_lm_tiered.speculation import draft_model, vocabulary
from mlx_lm_tiered.speculation.draft_model import DraftModelSource
from mlx_lm_tiered.speculation.source import DraftCost
from mlx_lm_tiered.speculation.following import Following, new_caches
from support.models import TINY, document


@pytest.fixture(scope="module")
def garbage(tmp_path_factory):
    """A llama of random weights with the tiny models' vocabulary."""
    return write_model_dir("dense", tmp_path_factory.mktemp("garbage") / "model")


@contextmanager
def drafting(model, tokens: int | str, **settings):
    """The plugin on with drafts of that model. Gives the run's speculation."""
    enable("tiered", **{"draft_model": str(model), "num_draft_tokens": tokens, "prompt_cache_bytes": 0, **settings})
    try:
        yield current().speculation()
        assert current().report()["faults"] == {}
    finally:
        disable()


def prompt_of(tokenizer, count: int, start: int = 0) -> list[int]:
    return tokenizer.encode(document(6 * count + 60, start=start))[:count]


@pytest.mark.parametrize("target", ["llama", "lfm2", "gemma3_text", "gemma4_text"])
def test_3_and_5_tokens_are_plain_greedy_decodings(target, garbage):
    """Targets with rings (64) past their wrap and with shared keys and values among them, and a draft model that knows nothing."""
    model, tokenizer = load(str(TINY[target]))
    prompts = {length: prompt_of(tokenizer, length) for length in (5, 40, 600)}
    held = {length: prefilled(model, prompt[:-1]) for length, prompt in prompts.items()}

    def answer(length: int):
        return generate(model, prompts[length][-1:], 24, caches=kinds.lend(held[length]), held=prompts[length][:-1])

    with plain():
        expected = {length: answer(length).tokens for length in prompts}
    for draft, numbers in (TINY["llama"], (1, 2, 4)), (garbage, (2,)):
        with drafting(draft, 1) as run:
            for length in prompts:
                for run.tokens in numbers:
                    ended = answer(length)
                    assert ended.tokens == expected[length] and ended.last.all_tokens == prompts[length] + expected[length]
                    assert kinds.length(ended.last.prompt_cache) == length + 24
            counted = run.report()
        assert counted["source"] == "draft" and counted["refused"] is None and counted["drafted"] > 0
        if draft == garbage:
            assert counted["acceptance"] < 0.05
        elif target == "llama":
            assert counted["acceptance"] > 0.95


@pytest.mark.parametrize("name", sorted(TINY))
def test_its_caches_come_back_from_wrong_drafts(name):
    """Whatever becomes of a draft, the next one is what the model would draft in new caches; its rings wrap meanwhile."""
    model, tokenizer = load(str(TINY[name]))
    sequence = prompt_of(tokenizer, 120)
    most, at, chance = 4, 20, random.Random(5)
    following = Following(model, new_caches(model))
    following.forward(sequence[: at - 3])
    while at + 1 < len(sequence):
        drafts = mx.concatenate(following.draft(sequence[following.held : at + 1], most, greedy)).tolist()
        if at % 3 == 0:
            assert drafts == cold(model, sequence[: at + 1], most)
        # As if the model had said so: that many right drafts, and another token behind them.
        right = chance.randrange(min(most, len(sequence) - at - 1) + 1)
        sequence[at + 1 : at + 1 + right] = drafts[:right]
        following.settle(right)
        at += 1 + right
        assert following.settled and following.held <= at
    assert kinds.length(following.caches) in (following.held, None)


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def cold(model, tokens: list[int], most: int) -> list[int]:
    found: list[int] = []
    caches = new_caches(model)
    logits = model(mx.array([tokens]), cache=caches)
    while True:
        found.append(int(mx.argmax(logits[0, -1])))
        if len(found) == most:
            return found
        logits = model(mx.array([found[-1:]]), cache=caches)


class Kept:
    """A `Prefixes` in memory, which checks what it is given: fault 2's kind."""

    def __init__(self) -> None:
        self.entries: list[tuple[list[int], list]] = []
        self.taken = 0
        self.serves = False

    def ready(self, tokens) -> bool:
        return True

    def take(self, tokens):
        for held, caches in reversed(self.entries if self.serves else []):
            if held == tokens[: len(held)] and len(held) < len(tokens):
                self.taken += len(held)
                return kinds.lend(caches), len(held)
        return None

    def put(self, tokens, caches) -> None:
        assert kinds.length(caches) in (len(tokens), None)
        self.entries.append((tokens, caches))

    def keep(self, tokens, caches) -> None:
        assert kinds.length(caches) in (len(tokens), None)

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_2_wherever_it_ends_its_caches_hold_what_their_key_says(name, garbage):
    """And the next turn, which begins with them, is drafted as from nothing. Each place of a burst; a model that drafts for itself."""
    model, tokenizer = load(str(TINY[name]))
    prompt, more = prompt_of(tokenizer, 70), prompt_of(tokenizer, 5, start=900)
    kept = Kept()
    with drafting(TINY[name], 4) as run:
        run.source._prefixes = lambda: kept
        answers = [generate(model, prompt, count).tokens for count in range(1, 8)]
        assert len(kept.entries) >= 6 and kept.taken == 0
        kept.serves = True
        assert {len(tokens) for tokens, _ in kept.entries} >= set(range(72, 76))
        for count, answer in enumerate(answers, 1):
            before, run._tally = run._tally, type(run._tally)()
            generate(model, prompt + answer + more, 9)
            assert run.report()["acceptance"] == 1.0 or count == 1, "drafts from kept caches are not what the model says"
            run._tally = before
        assert kept.taken > 6 * len(prompt)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_the_same_prompt_again_finds_its_caches_even_where_they_cannot_be_cut(name, monkeypatch):
    monkeypatch.setattr(draft_model, "CHUNK", 50)
    model, tokenizer = load(str(TINY["llama"]))
    prompt = prompt_of(tokenizer, 170)
    with drafting(TINY[name], 3, prompt_cache_bytes=1 << 30) as run:
        tier = current().prefix_cache(None, None, "server")
        first = generate(model, prompt, 30).tokens
        assert run.report()["draft_model"]["reused_tokens"] == 0 and len(tier) > 0
        assert generate(model, prompt, 30).tokens == first
        assert run.report()["draft_model"]["reused_tokens"] >= 150
        generate(model, prompt + prompt[:20], 30)  # another turn than the answer's
        assert run.report()["draft_model"]["reused_tokens"] >= 300


def test_it_catches_up_in_pieces_beside_plain_steps(monkeypatch):
    monkeypatch.setattr(draft_model, "CHUNK", 50)
    model, tokenizer = load(str(TINY["llama"]))
    prompt, other = prompt_of(tokenizer, 230), prompt_of(tokenizer, 60, start=700)
    with plain():
        expected = [generate(model, one, count).tokens for one, count in ((prompt, 100), (other, 40))]
    with drafting(TINY["llama"], 3) as run:
        made = generator(model)
        made.insert([prompt], max_tokens=[100])
        found: dict[int, list[int]] = {0: [], 1: []}
        alone: list[int] = []  # tokens that were there when the first was verified, and when that began anew
        while len(found[0]) < 100:
            before = run.report()["target_calls"]
            for response in made.next()[1]:
                found[response.uid].append(response.token)
                if response.uid == 1 and response.finish_reason is not None:
                    alone.append(len(found[0]))
            if run.report()["target_calls"] > before and len(alone) in (0, 2):
                alone.append(len(found[0]))
                if len(alone) == 1:
                    made.insert([other], max_tokens=[40])
        made.close()
        counted = run.report()
    assert [found[0], found[1]] == expected and counted["acceptance"] == 1.0
    # 230 tokens in pieces of 50 leave the last 30 for the draft; then 40 tokens came while it slept, of which one piece leaves few.
    assert 4 <= alone[0] - 4 <= 6 and 1 <= alone[2] - alone[1] <= 6


def test_it_does_not_catch_up_where_memory_has_no_room_for_its_caches():
    model, tokenizer = load(str(TINY["llama"]))
    tokens, spare = prompt_of(tokenizer, 200), [0]
    source = DraftModelSource(TINY["llama"], fits=Room(lambda: spare[0]))
    assert source.refuses(model) == ""
    drafter = source.begin(model)
    assert not drafter.hopes(tokens) and not drafter.computed
    spare[0] = 200 * 1000  # 200 tokens take half as much again
    assert not drafter.hopes(tokens) and not drafter.computed
    spare[0] = 10**8
    assert not drafter.hopes(tokens) and drafter.computed
    assert drafter.hopes(tokens)


def test_auto_switches_garbage_off(garbage, monkeypatch):
    model, tokenizer = load(str(TINY["lfm2"]))
    prompt = prompt_of(tokenizer, 40)
    with plain():
        expected = generate(model, prompt, 150).tokens
    monkeypatch.setattr(DraftModelSource, "price", lambda self, model, step: DraftCost(step / 10, step / 100))  # which is not so
    with drafting(garbage, "auto") as run:
        assert generate(model, prompt, 150).tokens == expected
        counted = run.report()
    assert 0 < counted["target_calls"] < 25 and counted["acceptance"] < 0.1


def test_auto_does_not_begin_with_one_that_is_as_slow_as_the_model():
    """Its price is measured when the model is loaded: the first request's caches are not even begun."""
    model, tokenizer = load(str(TINY["llama"]))
    prompt = prompt_of(tokenizer, 100)
    with plain():
        expected = generate(model, prompt, 60).tokens
    with drafting(TINY["llama"], "auto") as run:
        assert generate(model, prompt, 60).tokens == expected
        counted = run.report()
    assert counted["target_calls"] == counted["draft_model"]["computed_tokens"] == 0
    # How much above one depends on what else runs here.
    assert 0.5 < counted["auto"]["draft_steps"] and 0 < counted["auto"]["catch_up_steps"] <= counted["auto"]["draft_steps"]


def test_one_that_fails_while_its_price_is_measured_leaves_the_requests_plain(monkeypatch, caplog):
    model, tokenizer = load(str(TINY["llama"]))
    prompt = prompt_of(tokenizer, 40)
    with plain():
        expected = generate(model, prompt, 12).tokens

    def fails(self, model, step):
        raise RuntimeError("[metal] nothing works")

    monkeypatch.setattr(DraftModelSource, "price", fails)
    with drafting(TINY["llama"], "auto") as run:
        assert generate(model, prompt, 12).tokens == expected == generate(model, prompt, 12).tokens
        assert run.report()["refused"] == "measuring what drafts cost failed: RuntimeError: [metal] nothing works"
    assert caplog.text.count("nothing works") == 1


def test_a_token_that_a_model_does_not_have_never_reaches_it(monkeypatch, tmp_path):
    """A draft model with 40 tokens more drafts none of them, and one with fewer is not shown those it lacks."""
    model, tokenizer = load(str(TINY["llama"]))
    prompt = prompt_of(tokenizer, 40)
    with plain():
        expected = generate(model, prompt, 16).tokens
    for size in (1064, max(prompt + expected) + 1):
        draft = write_model_dir("dense", tmp_path / str(size), vocab_size=size)
        source = DraftModelSource(draft)
        assert source.refuses(model) == ""
        seen: list[int] = []
        forward = type(source._model).__call__

        def biased(self, tokens, *args, forward=forward, seen=seen, **kwargs):
            """The last token is the most likely one."""
            seen += tokens.flatten().tolist()
            logits = forward(self, tokens, *args, **kwargs)
            return logits + 1000 * (mx.arange(logits.shape[-1]) == logits.shape[-1] - 1)

        monkeypatch.setattr(type(source._model), "__call__", biased)
        drafter = source.begin(model)
        tokens = [*prompt, *expected][-30:]
        assert drafter.hopes(tokens) and not drafter.computed
        drafted = drafter.draft(tokens, 7, 4).tokens
        assert len(drafted) == 4 and max(drafted) < 1024 and max(seen) < size
        assert (drafted == 4 * [size - 1]) == (size < 1024)
        drafter.verified(4, 0)
        assert not drafter.hopes([*tokens, -3]) and not drafter.hopes([*tokens, -3, 5])
        monkeypatch.undo()


def test_a_vocabulary_of_other_tokens_is_refused_by_name(tmp_path):
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    for path in (ours, theirs):
        path.mkdir()
        shutil.copy(TINY["llama"] / "tokenizer.json", path)
    assert vocabulary.mismatch(ours, 1024, theirs, 1100) == ""  # padded differently
    data = json.loads((ours / "tokenizer.json").read_text())
    words = data["model"]["vocab"]
    turned = sorted(words, key=words.get)
    turned[30], turned[31] = turned[31], turned[30]
    write(ours, data, {word: number for number, word in enumerate(turned)})
    assert vocabulary.mismatch(ours, 1024, theirs, 1024) == ""  # two of a thousand
    write(ours, data, {word: (number + 1) % len(turned) for number, word in enumerate(turned)})
    assert "is '" in vocabulary.mismatch(ours, 1024, theirs, 1024) and "to the draft model" in vocabulary.mismatch(ours, 1024, theirs, 1024)
    (ours / "tokenizer.json").unlink()
    assert vocabulary.mismatch(ours, 1024, theirs, 1100) == "the draft model has 1024 tokens, the model 1100"
    assert vocabulary.mismatch(ours, 1024, None, 1100) == "" == vocabulary.mismatch(ours, 1024, theirs, 1024)


def write(path, data, words) -> None:
    (path / "tokenizer.json").write_text(json.dumps(data | {"model": data["model"] | {"vocab": words}}))


def test_one_that_cannot_be_loaded_leaves_the_requests_plain(tmp_path, caplog):
    broken = write_model_dir("dense", tmp_path / "broken")
    next(broken.glob("model*.safetensors")).write_bytes(b"not tensors")
    model, tokenizer = load(str(TINY["llama"]))
    prompt = prompt_of(tokenizer, 40)
    with plain():
        expected = generate(model, prompt, 12).tokens
    with drafting(broken, 2) as run:
        assert generate(model, prompt, 12).tokens == expected == generate(model, prompt, 12).tokens
        assert run.report()["refused"] and run.report()["requests"] == 0
    assert caplog.text.count("speculation draft is not for this model") == 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: shutil.rmtree(path), "there is no such directory, and the hub gave no such model"),
        (lambda path: (path / "config.json").unlink(), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[]"), "is no configuration"),
        (lambda path: (path / "config.json").write_text("{}"), "names no model_type"),
        (lambda path: (path / "config.json").write_text('{"model_type": "nothing of the kind"}'), "mlx-lm cannot load it"),
        (lambda path: [file.unlink() for file in path.glob("*.safetensors")], "has no weights"),
    ],
)
def test_what_cannot_draft_is_one_sentence_at_start(spoil, says, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write_model_dir("dense", tmp_path / "draft")
    spoil(path)
    with pytest.raises(UsageError, match=says) as refused:
        enable("tiered", draft_model=str(path))
    assert str(refused.value).startswith(f"--draft-model {path}: ") and "\n" not in str(refused.value)


def test_mlx_lm_generate_takes_one(tiny_lfm2, tiny_llama):
    """For a model with recurrent state, for which mlx-lm by itself refuses it; the text is that of no draft model."""
    command = [sys.executable, "-m", "mlx_lm.generate", "--plugin", "tiered", "--model", str(tiny_lfm2), "--prompt", "The list", "--max-tokens", "24", "--verbose", "False"]
    flags = [], ["--draft-model", str(tiny_llama)]
    plainly, drafted = (subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False) for more in flags)
    assert plainly.returncode == drafted.returncode == 0 and drafted.stdout == plainly.stdout and len(plainly.stdout) > 20
