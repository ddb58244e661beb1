"""Rows that leave the batch and come back, in upstream's own `ResponseGenerator`: what they say is what they would have said."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.models import TINY
from support.waiting import until
from test_seam_server import serving
from witness import Witness

from mlx_lm_hooks import Refused, hookimpl
from mlx_lm_patches import preempting, usage
from mlx_lm_patches.features import isolation
from mlx_lm_patches.mailbox import give_up

TEXTS = {"first": 60, "Tell me about the os module": 90, "third": 30, "another one, a little longer than the others": 75}


def ask(generator, text, most, *, temperature=0.0, stop_words=(), progress=None):
    """A reply with penalties, so that what was said before counts; its tokens and their log-probabilities."""
    import mlx_lm.server as server

    request = server.CompletionRequest("chat", "", [{"role": "user", "content": text}], None, None)
    options = server.GenerationArguments(
        model=server.ModelDescription("default_model", "default_model", None),
        sampling=server.SamplingArguments(temperature, 1.0, 0, 0.0, 0.0, 0.1),
        logits=server.LogitsProcessorArguments(None, 1.3, 20, 0.2, 20, 0.1, 20),
        stop_words=list(stop_words), max_tokens=most, num_draft_tokens=3, logprobs=True, top_logprobs=2, seed=None, chat_template_kwargs=None,
    )  # fmt: skip
    _, reply = generator.generate(request, options, progress_callback=lambda done, total: None if progress is None else progress.append((done, total)))
    found = list(reply)
    return [r.token for r in found], [r.logprob for r in found], found[-1].finish_reason if found else None


def together(generator, texts=TEXTS, **options):
    with ThreadPoolExecutor() as pool:
        futures = {text: pool.submit(ask, generator, text, most, **options) for text, most in texts.items()}
        return {text: future.result(60) for text, future in futures.items()}


class Rooms:
    """A plugin's `mlx_lm_room` that has the newest row leave at the `at`-th questions; `lost` has its caches thrown away."""

    def __init__(self, at=(), lost=False):
        self.at, self.lost = set(at), lost
        self.asked = self.left = 0
        self.cancelled = 0
        self.granted = 1
        self.among: list[int] = []  # rows of each question
        self.plugin: Witness | None = None
        self.holding = threading.Event()  # rows that left stay away while it is not set
        self.holding.set()
        self.returns: list[int] = []
        self.refusing = False

    def room(self, caches):
        assert caches and self.plugin is not None
        self.asked += 1
        self.among.append(len(caches[0].offset) if hasattr(caches[0], "offset") else 0)
        if self.lost:
            self.plugin.prefixes[0].entries.clear()
        if self.asked in self.at:
            self.left += 1
            return 0
        return self.granted

    def step(self):
        return self.holding.is_set()

    def cancel(self):
        self.cancelled += 1


@pytest.fixture
def rooms(monkeypatch):
    made = Rooms()

    @hookimpl
    def room(self, caches):
        made.plugin = self
        return made.room(caches)

    @hookimpl
    def hold(self, source, tokens, max_tokens, preempted):
        if preempted:
            made.returns.append(preempted)
        return made if preempted else None

    @hookimpl
    def admit(self, request):
        assert request.preempted is not None
        return Refused(503, "no room at all", 10) if request.preempted and made.refusing else None

    for name, hook in (("mlx_lm_room", room), ("mlx_lm_hold", hold), ("mlx_lm_admit", admit)):
        monkeypatch.setattr(Witness, name, hook, raising=False)
    return made


@pytest.mark.parametrize("family", ("llama", "gemma3_text", "lfm2"))
@pytest.mark.parametrize("lost", (False, True), ids=("stored", "computed anew"))
def test_rows_that_leave_say_what_they_would_have_said(family, lost, rooms):
    """Rings and recurrent state come back, too. Rows leave twice in a step, and all of them; some a dozen times."""
    rooms.lost = lost
    with serving(TINY[family], "--prompt-concurrency", "2") as (_, generator):
        expected = together(generator)
        rooms.at = {*range(rooms.asked + 20, rooms.asked + 160, 9), *(rooms.asked + n for n in (30, 31, 32, 33, 34, 50, 51))}
        found = together(generator)
    assert rooms.left >= 12 and max(rooms.returns) > 1, "some have left more than once"
    for text in TEXTS:
        assert found[text][0] == expected[text][0] and found[text][2] == expected[text][2], text
        assert found[text][1] == pytest.approx(expected[text][1], abs=1e-4)


@pytest.mark.parametrize("lost", (False, True), ids=("stored", "computed anew"))
@pytest.mark.parametrize("family", ("llama", "lfm2"))
def test_rows_leave_in_the_middle_of_their_prompts(family, lost, rooms, monkeypatch):
    """Some before their first chunk, some behind it; what is stored at a prompt's borders is stored as ever."""
    held: list[str] = []

    class Seen(preempting.Prefilling):
        def __init__(self, sequence, times):
            super().__init__(sequence, times)
            held.append("queued" if sequence[3] is not None else "begun" if self.held < len(self.tokens) - 1 else "done")

    monkeypatch.setattr(preempting, "Prefilling", Seen)
    texts = {"first": 150, **{f"{n}: " + "the words of a longer question " * (4 + n): 12 for n in range(4)}}
    with serving(TINY[family], "--prompt-concurrency", "1", "--prefill-step-size", "16") as (plugin, generator), ThreadPoolExecutor() as pool:
        expected = {text: ask(generator, text, most) for text, most in texts.items()}
        plugin.prefixes[0].entries.clear()
        puts = len(plugin.named("put"))
        rooms.lost = lost
        rooms.at = {*range(rooms.asked + 3, rooms.asked + 400, 2)}
        first = pool.submit(ask, generator, "first", 150)
        until(lambda: rooms.left > 2)
        found = together(generator, {text: most for text, most in texts.items() if text != "first"})
        found["first"] = first.result(60)
        borders = {put["tokens"] for put in plugin.named("put")[:puts]}
        assert borders <= {put["tokens"] for put in plugin.named("put")[puts:]}
    for text in texts:
        assert found[text][0] == expected[text][0], text
    assert {"queued", "begun"} <= set(held)


def test_a_stop_word_that_began_before_a_row_left_ends_it(tiny_llama, rooms):
    with serving(tiny_llama) as (_, generator):
        tokens = ask(generator, "first", 60)[0]
        words = generator.model_provider.tokenizer.decode(tokens[20:23])
        expected = ask(generator, "first", 60, stop_words=[words])
        assert expected[2] == "stop" and len(expected[0]) < 60
        rooms.at = set(range(rooms.asked + 1, rooms.asked + 200, 2))  # before each token
        assert ask(generator, "first", 60, stop_words=[words])[0] == expected[0] and rooms.left > 10


def test_others_go_on_while_a_row_is_away_and_its_client_gets_signs_of_life(tiny_llama, rooms, monkeypatch):
    monkeypatch.setattr(preempting, "SIGN", 0.05)
    progress = {text: [] for text in TEXTS}
    with serving(tiny_llama) as (plugin, generator), ThreadPoolExecutor() as pool:
        expected = together(generator)
        rooms.holding.clear()
        rooms.at = {rooms.asked + 40}
        futures = {text: pool.submit(ask, generator, text, most, progress=progress[text]) for text, most in TEXTS.items()}
        until(lambda: sum(future.done() for future in futures.values()) == 3)
        (away,) = [text for text, future in futures.items() if not future.done()]
        assert rooms.left == 1 and plugin.engine.busy
        before = len(progress[away])
        until(lambda: len(progress[away]) >= before + 3)
        rooms.holding.set()
        assert futures[away].result(20)[0] == expected[away][0]
        until(lambda: not plugin.engine.busy)


def test_a_client_that_goes_while_its_row_is_away_is_let_go(tiny_llama, rooms):
    with serving(tiny_llama) as (plugin, generator), ThreadPoolExecutor() as pool:
        expected = ask(generator, "first", 60)
        rooms.holding.clear()
        rooms.at = {rooms.asked + 10}
        queues = []
        put = generator.requests.put
        generator.requests.put = lambda item: (queues.append(item), put(item))
        away = pool.submit(ask, generator, "first", 60)
        until(lambda: rooms.left == 1)
        other = pool.submit(ask, generator, "third", 30)
        assert len(other.result(20)[0]) == 30, "who comes later is served"
        give_up(next(item for item in queues if isinstance(item, tuple))[0])
        until(lambda: not plugin.engine.busy)
        with pytest.raises(ConnectionAbortedError):
            away.result(20)
        rooms.holding.set()
        assert ask(generator, "first", 60)[0] == expected[0]


def test_a_row_that_can_never_come_back_is_told_so(tiny_llama, rooms):
    with serving(tiny_llama) as (plugin, generator):
        expected = ask(generator, "first", 60)
        rooms.refusing, rooms.at = True, {rooms.asked + 10}
        with pytest.raises(Refused, match="no room at all"):
            ask(generator, "first", 60)
        rooms.refusing = False
        assert ask(generator, "first", 60)[0] == expected[0] and not plugin.engine.decoding or plugin.engine.busy


def test_a_loop_that_begins_anew_lets_go_of_rows_that_were_away(tiny_llama, rooms, monkeypatch):
    """Else the first in line is one that nobody asks for any more, and the batch is there until it is collected."""
    from mlx_lm import server

    formatted = server._format_top_logprobs

    def generators():
        return [weakref.ref(one) for one in gc.get_objects() if type(one).__name__ == "BatchGenerator"]

    def once(*args):
        monkeypatch.setattr(server, "_format_top_logprobs", formatted)
        raise ZeroDivisionError

    with serving(tiny_llama) as (_, generator), ThreadPoolExecutor() as pool:
        expected = ask(generator, "first", 60)
        rooms.holding.clear()
        rooms.at = {rooms.asked + 10}
        futures = [pool.submit(ask, generator, text, most) for text, most in TEXTS.items()]
        until(lambda: rooms.left == 1)
        failing = generators()
        gc.disable()
        try:
            monkeypatch.setattr(isolation.log, "exception", lambda *a: None)  # pytest keeps what is logged, with its frames
            monkeypatch.setattr(server, "_format_top_logprobs", once)
            assert any(isinstance(future.exception(20), ZeroDivisionError) for future in futures)
            until(lambda: rooms.cancelled == 1)
            until(lambda: all(one() is None for one in failing))
        finally:
            gc.enable()
        assert ask(generator, "first", 60)[0] == expected[0]


def test_a_plugin_that_fails_to_answer_has_no_row_leave(tiny_llama, rooms, monkeypatch):
    with serving(tiny_llama) as (_, generator):
        expected = ask(generator, "first", 60)
        monkeypatch.setattr(rooms, "room", lambda caches: 1 / 0)
        assert ask(generator, "first", 60) == expected and rooms.left == 0


def test_what_is_granted_to_rows_is_not_granted_to_one_that_is_alone(tiny_llama, rooms):
    """It may be drafted for, beside what it keeps."""
    with serving(tiny_llama) as (_, generator):
        together(generator)
        rooms.granted = 1000
        rooms.among.clear()
        together(generator)
        assert max(rooms.among) > 1 and rooms.among[-1] == 1 and len(rooms.among) <= 2 * len(TEXTS), "whenever one joins or ends"


class Counting:
    """A `Speculation` whose speculators, one for each time that a row is in the batch, count how often they are asked to draft."""

    def __init__(self):
        self.begun = self.asked = 0

    def model_loaded(self, model):
        pass

    def begin(self, model, row):
        self.begun += 1
        return Counted(self)


class Counted:
    def __init__(self, among):
        self._among, self._own = among, 0

    def advance(self, row):
        self._among.asked += 1
        self._own += 1
        return False

    def usage(self):
        return {"drafted_tokens": self._own}

    def end(self):
        pass


def test_usage_says_what_was_drafted_before_a_row_left_too(tiny_llama, rooms, monkeypatch):
    speculation = Counting()
    monkeypatch.setattr(Witness, "mlx_lm_speculation", hookimpl(lambda self: speculation))
    contexts = []
    with serving(tiny_llama) as (_, generator):
        generate = generator.generate
        monkeypatch.setattr(generator, "generate", lambda *a, **k: contexts.append(generate(*a, **k)) or contexts[-1])
        rooms.at = {rooms.asked + 10, rooms.asked + 30}
        ask(generator, "first", 60)
    assert rooms.left == 2 and speculation.begun == 3 and speculation.asked == 60
    assert getattr(contexts[0][0], usage.USAGE) == {"drafted_tokens": 60}
