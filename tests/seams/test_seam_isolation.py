"""Errors in one row of a batch, and in a step of several: who gets them, and that the others' tokens are as ever (fault 11)."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from queue import Queue

import pytest
from support.waiting import until
from test_seam_server import ask, serving

from mlx_lm_hooks.types import Refused
from mlx_lm_patches.mailbox import Mailbox

TEXTS = ("first", "second", "third")
LENGTH = 60
LONG = 700  # decodes on when upstream looks for the next request, twice a second


class Boom(RuntimeError):
    pass


@pytest.fixture(scope="module")
def plain(tiny_llama):
    with serving(tiny_llama) as (_, generator):
        return {text: ask(generator, text, max_tokens=LENGTH)[0] for text in TEXTS} | {"long": ask(generator, "long", max_tokens=LONG)[0]}


def fails_after(monkeypatch, owner, name: str, calls: int, *, of=lambda *args: True):
    """Make a function raise at its `calls`-th call among those that `of` picks, once."""
    original = getattr(owner, name)
    made = []

    def failing(*args, **kwargs):
        if of(*args):
            made.append(args)
            if len(made) == calls:
                raise Boom("on purpose")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return made


def together(generator, texts=TEXTS, **options):
    """Each text's tokens or error, all asked at once."""

    def one(text):
        try:
            return ask(generator, text, max_tokens=LENGTH, **options)[0]
        except Exception as error:
            return error

    with ThreadPoolExecutor() as pool:
        return dict(zip(texts, pool.map(one, texts), strict=True))


def check(generator, answers, plain, broken):
    for text, answer in answers.items():
        if text in broken:
            assert isinstance(answer, Boom), (text, answer)
        else:
            assert answer == plain[text], text
    assert generator.is_healthy and ask(generator, "third", max_tokens=LENGTH)[0] == plain["third"]


class Short:
    """A KV scheme under which a row of three finds no room once."""

    start = 0

    def __init__(self):
        self.ended = 0

    def name(self, path):
        return "plain"

    def caches(self, model, path, caches):
        return caches

    def model_loaded(self, model):
        self.model = model

    def converts(self, model):
        return False

    def plain_class(self, cache):
        return type(cache)

    def attention(self, upstream):
        return upstream

    def short(self, caches):
        if self.ended or not caches or len(caches[0].offset) < 3:
            return None
        self.ended += 1
        return 1, Refused(503, "no room", 7)


def test_a_row_for_which_there_is_no_room_ends_before_the_step_of_the_others(tiny_llama, plain):
    scheme = Short()
    with serving(tiny_llama, scheme=scheme) as (plugin, generator):
        answers = together(generator)
        check_again = ask(generator, "third", max_tokens=LENGTH)[0]
    (refused,) = [answer for answer in answers.values() if isinstance(answer, Exception)]
    assert isinstance(refused, Refused) and (refused.status, refused.retry_after) == (503, 7) and scheme.ended == 1
    assert all(answer in (refused, plain[text]) for text, answer in answers.items()) and check_again == plain["third"]
    assert sum(put["role"] == "assistant" for put in plugin.named("put")) == 4, "what it computed is stored as well"


@pytest.mark.parametrize("part", ["_make_sampler", "_make_logits_processors"])
@pytest.mark.parametrize("when", ["at once", "made", "first token", "later"])
def test_a_rows_own_part_fails(tiny_llama, plain, monkeypatch, part, when):
    import mlx_lm.server as server

    original = getattr(server, part)
    made = []

    def making(*args):
        made.append(args)
        if len(made) != 2:
            return original(*args)
        if when == "at once":
            raise Boom("on purpose")
        calls = []

        def failing(*given):
            calls.append(given)
            if when == "made" or len(calls) > (1 if when == "first token" else 20):
                raise Boom("on purpose")
            return given[-1] if part == "_make_logits_processors" else given[0].argmax(axis=-1)

        return [failing] if part == "_make_logits_processors" else failing

    monkeypatch.setattr(server, part, making)
    with serving(tiny_llama) as (_, generator):
        ask(generator, "warm up", max_tokens=1)
        answers = together(generator)
        broken = [text for text, answer in answers.items() if isinstance(answer, Exception)]
        assert len(broken) == 1
        check(generator, answers, plain, broken)


def test_a_sampler_of_the_wrong_shape_is_its_rows_fault(tiny_llama, plain, monkeypatch):
    import mlx_lm.server as server

    original = server._make_sampler
    monkeypatch.setattr(server, "_make_sampler", lambda args, tokenizer: (lambda logprobs: logprobs) if args.max_tokens == 7 else original(args, tokenizer))
    with serving(tiny_llama) as (_, generator), ThreadPoolExecutor() as pool:
        others = pool.submit(together, generator)
        with pytest.raises(ValueError, match="a sampler gave"):
            ask(generator, "wrong", max_tokens=7)
        check(generator, others.result(), plain, [])


@pytest.mark.parametrize("name", ["add_token", "finalize"])
def test_a_detokenizer_fails(tiny_llama, plain, monkeypatch, name):
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer as Streaming
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer as Naive

    with serving(tiny_llama) as (_, generator):
        ask(generator, "warm up", max_tokens=1)
        kind = next(k for k in (Streaming, Naive) if isinstance(generator.model_provider.tokenizer._detokenizer, k))
        made = fails_after(monkeypatch, kind, name, 30 if name == "add_token" else 1)
        answers = together(generator)
        broken = [text for text, answer in answers.items() if isinstance(answer, Exception)]
        assert len(broken) == 1 and made
        check(generator, answers, plain, broken)


def test_wrong_stop_words_are_their_requests_fault(tiny_llama, plain, monkeypatch):
    import mlx_lm.server as server

    fails_after(monkeypatch, server, "make_stop_sequences", 1)
    with serving(tiny_llama) as (_, generator):
        with pytest.raises(Boom):
            ask(generator, "first")
        check(generator, together(generator), plain, [])


def test_an_empty_prompt_is_its_requests_fault(tiny_llama, plain, monkeypatch):
    import mlx_lm.server as server

    original = server.ResponseGenerator._tokenize

    def tokenize(self, tokenizer, request, args):
        if request.messages[0]["content"] == "empty":
            return [], [[]], ["assistant"], "normal", None
        return original(self, tokenizer, request, args)

    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", tokenize)
    with serving(tiny_llama) as (_, generator), ThreadPoolExecutor() as pool:
        others = pool.submit(together, generator)
        with pytest.raises(ValueError, match="empty prompt"):
            ask(generator, "empty")
        check(generator, others.result(), plain, [])


def test_a_forward_of_all_rows_fails(tiny_llama, plain, monkeypatch):
    """Whoever was in it gets the error; who comes later is served."""
    generate = import_module("mlx_lm.generate")

    with serving(tiny_llama) as (_, generator):
        ask(generator, "warm up", max_tokens=1)
        fails_after(monkeypatch, generate.GenerationBatch, "_step", 25)
        answers = together(generator)
        assert any(isinstance(answer, Boom) for answer in answers.values())
        check(generator, answers, plain, [text for text, answer in answers.items() if isinstance(answer, Exception)])


@pytest.mark.parametrize("name", ["prompt", "generate", "split", "extend"])
def test_a_prefill_fails_while_another_row_decodes(tiny_llama, plain, monkeypatch, name):
    """The row that decodes loses no token of the step in which it happened."""
    generate = import_module("mlx_lm.generate")

    with serving(tiny_llama) as (plugin, generator), ThreadPoolExecutor() as pool:
        ask(generator, "warm up", max_tokens=1)
        going = []
        original = generate.GenerationBatch.next
        monkeypatch.setattr(generate.GenerationBatch, "next", lambda self: going.append(len(self)) or original(self))
        first = pool.submit(ask, generator, "long", max_tokens=LONG)
        until(lambda: len(going) > 3)
        made = fails_after(monkeypatch, generate.PromptProcessingBatch, name, 1, of=lambda *args: args[0].uids or getattr(args[1], "uids", None))
        with pytest.raises(Boom):
            ask(generator, "second", max_tokens=LENGTH)
        assert made and not first.done() and first.result()[0] == plain["long"]
        check(generator, {}, plain, [])


def test_a_prefill_fails_in_the_step_that_ends_another_row(tiny_llama, plain, monkeypatch):
    """The one that ended has its answer; the one whose prefill was broken off does not go on with half of it."""
    generate, ended, prefilled = import_module("mlx_lm.generate"), [], []
    step, prompt = generate.GenerationBatch.next, generate.PromptProcessingBatch.prompt

    def next(self):
        responses = step(self)
        ended.extend(r for r in responses if r.finish_reason is not None)
        return responses

    def failing(self, tokens):
        if tokens and "other" in prefilled:
            prefilled.append(len(ended))
            if len(ended) == 1:
                ended.append(None)
                raise Boom("on purpose")
        return prompt(self, tokens)

    monkeypatch.setattr(generate.GenerationBatch, "next", next)
    monkeypatch.setattr(generate.PromptProcessingBatch, "prompt", failing)
    with serving(tiny_llama, "--prefill-step-size", "1") as (_, generator), ThreadPoolExecutor() as pool:
        whole = pool.submit(ask, generator, "long", max_tokens=LONG)
        until(lambda: len(generator.requests.queue) == 0)
        prefilled.append("other")
        with pytest.raises(Boom):
            ask(generator, "again and " * 500)
        assert whole.result(30)[0] == plain["long"]
    assert {*prefilled[1:]} == {0, 1}, "it was not being prefilled when the other ended"


def test_of_several_that_join_at_once_only_the_one_that_cannot_fails(tiny_llama, plain, monkeypatch):
    generate = import_module("mlx_lm.generate")
    import mlx_lm.server as server

    original = generate._merge_caches

    def merging(caches):
        if any(getattr(one[0], "wrong", False) for one in caches):
            raise Boom("on purpose")
        return original(caches)

    monkeypatch.setattr(generate, "_merge_caches", merging)
    with serving(tiny_llama) as (_, generator):
        inner = server.BatchGenerator.insert_segments

        def insert(self, *args, **kwargs):
            uids = inner(self, *args, **kwargs)
            if kwargs["max_tokens"] == [7]:
                self._unprocessed_sequences[-1][3][0].wrong = True
            return uids

        monkeypatch.setattr(server.BatchGenerator, "insert_segments", insert)
        for _ in range(3):
            with ThreadPoolExecutor() as pool:
                others = pool.submit(together, generator)
                with pytest.raises(Boom):
                    ask(generator, "wrong", max_tokens=7)
                check(generator, others.result(), plain, [])


def test_an_error_outside_of_any_row_leaves_the_thread_alive(tiny_llama, plain, monkeypatch):
    import mlx_lm.server as server

    with serving(tiny_llama) as (_, generator):
        ask(generator, "warm up", max_tokens=1)
        fails_after(monkeypatch, server, "_format_top_logprobs", 40)
        answers = together(generator)
        assert any(isinstance(answer, Boom) for answer in answers.values())
        check(generator, answers, plain, [text for text, answer in answers.items() if isinstance(answer, Exception)])


def test_a_loop_that_cannot_run_ends_as_ever(tiny_llama, monkeypatch):
    import mlx_lm.server as server

    monkeypatch.setattr(server.ModelProvider, "load_default", lambda self: (_ for _ in ()).throw(Boom("on purpose")))
    with serving(tiny_llama) as (_, generator):
        until(lambda: not generator.is_healthy)


def test_an_error_that_nobody_reads_holds_nothing_of_its_request():
    """The client of a request outside the batch went away: the frames of its error held caches, and who waits for their blocks waited for the next request."""

    def fails(caches):
        try:
            raise KeyError(len(caches))
        except KeyError as error:
            raise Boom("on purpose") from error

    class Caches(list):
        pass

    caches, mailbox = Caches(), Mailbox(Queue())
    held = weakref.ref(caches)
    try:
        fails(caches)
    except Boom as error:
        mailbox.put(error)
    del caches
    assert held() is None and isinstance(mailbox.queue.get(), Boom)
