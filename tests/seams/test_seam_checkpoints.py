"""Going on from any token of a generation, in upstream's own `ResponseGenerator`: the same tokens, the same text, the same end."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
from support.waiting import until
from test_seam_server import arguments
from witness import Witness

from mlx_lm_hooks import Admission, GenerationState, Invocation, Refused, hookimpl
from mlx_lm_patches import holding
from mlx_lm_patches.host import host

QUESTION = "Tell me about the os module and its functions."
TOKENS = 40


class Keeper(Witness):
    """Keeps every state of every request in memory; `resume` says from how many emitted tokens on the next one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.interval = 1
        self.states: dict[str, dict[int, GenerationState]] = {}
        self.ended: list[bool] = []
        self.reasons: list[str] = []
        self.resume: int | None = None
        self.admitted: list[Admission] = []
        self.refuses = False
        self.caches = lambda: None  # of the one that was refused last

    @hookimpl
    def mlx_lm_admit(self, request):
        self.admitted.append(replace(request, caches=None))
        if not self.refuses:
            return None
        self.refuses = False
        self.caches = weakref.ref(request.caches[0])
        return Refused(503, "full")

    @hookimpl
    def mlx_lm_prefix_cache(self, max_entries, max_bytes, serves):
        return None  # what is reused of a prompt shows logits processors another context

    @hookimpl
    def mlx_lm_generation_checkpoints(self):
        return self

    def skipped(self, reason):
        self.reasons.append(reason)

    def begin(self, source, prompt, policy):
        keeper, states = self, self.states.setdefault(policy, {})

        class Request:
            state = copy.deepcopy(states[keeper.resume]) if keeper.resume else None

            def save(self, state):
                states[len(state.tokens) - len(prompt)] = state._replace(caches=copy.deepcopy(state.caches))

            def end(self, completed):
                keeper.ended.append(completed)

        return Request()


@contextmanager
def serving(model, *argv):
    import mlx_lm.server as server

    args = arguments("--model", str(model), *argv)
    plugin = Keeper()
    host.activate(plugin.plugins(), Invocation("server", args))
    generator = server.ResponseGenerator(server.ModelProvider(args), server.LRUPromptCache(0))
    try:
        yield plugin, generator
    finally:
        generator.stop_and_join()
        host.deactivate()


def options(**given):
    import mlx_lm.server as server

    made = server.GenerationArguments(
        model=server.ModelDescription("default_model", "default_model", None),
        sampling=server.SamplingArguments(given.pop("temperature", 0.0), 1.0, 0, 0.0, 0.0, 0.1),
        logits=server.LogitsProcessorArguments({0: -1000.0, 2: -1000.0}, given.pop("penalty", 0.0), 30, 0.0, 20, 0.0, 20),
        stop_words=[], max_tokens=TOKENS, num_draft_tokens=3, logprobs=False, top_logprobs=-1, seed=None, chat_template_kwargs=None,
    )  # fmt: skip
    return replace(made, **given)


def ask(generator, args, question=QUESTION):
    """Tokens, text and the finish reason."""
    import mlx_lm.server as server

    request = server.CompletionRequest("chat", "", [{"role": "user", "content": question}], None, None)
    _, reply = generator.generate(request, args)
    responses = list(reply)
    return [r.token for r in responses], "".join(r.text for r in responses), responses[-1].finish_reason


CASES = {
    "greedy, batch": {},
    "penalty, batch": {"penalty": 1.3},
    "greedy, single": {"seed": 1},
    "sampled with penalty, single": {"seed": 1, "temperature": 0.9, "penalty": 1.3},
}


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_lfm2", "tiny_gemma3"])
def test_a_generation_goes_on_from_every_token(request, model):
    with serving(request.getfixturevalue(model)) as (keeper, generator):
        for case in CASES.values():
            args = options(**case)
            keeper.resume = None
            whole = ask(generator, args)
            (states,) = (dict(states) for states in keeper.states.values())
            assert sorted(states) == list(range(1, TOKENS - 1)) and len(whole[0]) == TOKENS and whole[2] == "length"
            for keeper.resume in (1, 7, 31, TOKENS - 2):
                assert states[keeper.resume].pending == whole[0][keeper.resume]
                assert ask(generator, args) == whole
            keeper.states.clear()
        assert keeper.ended == [True] * len(CASES) * 5


@pytest.mark.parametrize("seed", [None, 1])
def test_a_stop_word_ends_it_wherever_its_match_was_broken_off(tiny_llama, seed):
    with serving(tiny_llama) as (keeper, generator):
        tokens, _, _ = ask(generator, options(seed=seed))
        tokenizer = generator.model_provider.tokenizer
        # Some tokens of the answer which are also what their text is encoded to.
        at, word = next(
            (i, text)
            for i in range(10, TOKENS - 5)
            if tokenizer.encode(text := tokenizer.decode(tokens[i : i + 4]), add_special_tokens=False) == tokens[i : i + 4]
        )
        keeper.states.clear()
        args = options(seed=seed, stop_words=[word])
        whole = ask(generator, args)
        assert whole[2] == "stop" and whole[0] == tokens[: at + 4]
        (states,) = (dict(states) for states in keeper.states.values())
        # No state whose next token ends it, where the match is known; else the next token is emitted and ends it.
        assert set(range(1, at + 3)) <= set(states)
        for keeper.resume in range(at - 1, at + 3):
            assert ask(generator, args) == whole
        assert keeper.ended[-1] is True


def test_a_state_that_the_request_cannot_have_come_to_is_not_gone_on_from(tiny_llama):
    with serving(tiny_llama) as (keeper, generator):
        args = options()
        whole = ask(generator, args)
        (policy,) = keeper.states
        good = keeper.states[policy][20]
        for bad in (
            good._replace(tokens=[5, *good.tokens[1:]]),
            good._replace(tokens=good.tokens + [3] * TOKENS),
            good._replace(tokens=good.tokens[:-20]),
        ):
            keeper.states[policy][20] = bad
            keeper.resume = 20
            assert ask(generator, args) == whole


def test_a_faulty_plugin_costs_its_checkpoints_only(tiny_llama, caplog):
    with serving(tiny_llama) as (keeper, generator):
        whole = ask(generator, options())
        keeper.states = None  # everything fails from here on
        for seed in (None, 1):
            assert ask(generator, options(seed=seed)) == whole
    assert "looking for a checkpoint" in caplog.text


def test_those_that_cannot_have_any_say_why(tiny_llama):
    with serving(tiny_llama) as (keeper, generator):
        for given in ({"logprobs": True}, {"top_logprobs": 3}):
            assert len(ask(generator, options(**given))[0]) == TOKENS
        keeper.interval = TOKENS
        ask(generator, options())  # never comes to one
    with serving(tiny_llama, "--draft-model", str(tiny_llama)) as (other, generator):
        ask(generator, options())
    assert keeper.reasons == ["logprobs", "logprobs"] and other.reasons == ["speculative"]
    assert keeper.states == other.states == {}


def test_quantized_caches_go_on_too(tiny_llama):
    with serving(tiny_llama, "--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0") as (keeper, generator):
        whole = ask(generator, options())
        for keeper.resume in (1, 20):
            assert ask(generator, options()) == whole


@pytest.mark.parametrize("seed", [None, 1])
def test_what_goes_on_is_admitted_with_what_it_holds(tiny_llama, seed):
    """It needs no memory for what its checkpoint has brought along; and holds none of it once it is refused."""
    with serving(tiny_llama) as (keeper, generator):
        args = options(seed=seed)
        whole = ask(generator, args)
        (states,) = (dict(states) for states in keeper.states.values())
        keeper.resume, keeper.refuses, before = 20, True, len(keeper.admitted)
        with pytest.raises(Refused, match="full"):
            ask(generator, args)
        until(lambda: (gc.collect(), keeper.caches() is None)[1])
        keeper.refuses = False
        assert ask(generator, args) == whole
        for request in keeper.admitted[before:]:
            assert request.tokens == [*states[20].tokens, states[20].pending] and request.cached == len(states[20].tokens)
            assert request.max_tokens == TOKENS - 21 and request.source.path == tiny_llama.resolve()
        assert len(keeper.admitted) == before + 2 and keeper.ended == [True, False, True]


def test_what_ends_in_a_step_that_fails_later_on_is_over(tiny_llama, monkeypatch):
    """Another row's prefill fails in the step that gives the last token."""
    generate = import_module("mlx_lm.generate")
    step, prompt, last, begun = generate.GenerationBatch.next, generate.PromptProcessingBatch.prompt, [], []

    def next(self):
        responses = step(self)
        last.extend(r for r in responses if r.finish_reason is not None)
        return responses

    def failing(self, tokens):
        if tokens:
            begun.append(len(last))
        if last and tokens:
            raise RuntimeError("on purpose")
        return prompt(self, tokens)

    monkeypatch.setattr(generate.GenerationBatch, "next", next)
    with serving(tiny_llama, "--prefill-step-size", "1") as (keeper, generator), ThreadPoolExecutor() as pool:
        whole = pool.submit(ask, generator, options(max_tokens=700))
        until(lambda: any(keeper.states.values()))
        monkeypatch.setattr(generate.PromptProcessingBatch, "prompt", failing)
        other = pool.submit(ask, generator, options(), QUESTION + " " + "again and " * 500)
        assert whole.result(30)[2] == "length"
        with pytest.raises(RuntimeError, match="on purpose"):
            other.result(30)
        assert begun[0] == 0 and begun[-1] == 1, "it was not being prefilled when the other ended"
        assert sorted(keeper.ended) == [False, True]


class Waiting:
    """A preparation that is ready when told."""

    def __init__(self, found: bool):
        self.found, self.tokens = found, []
        self.ready = threading.Event()
        self.steps = self.cancels = 0

    def step(self):
        self.steps += 1
        return self.ready.is_set()

    def cancel(self):
        self.cancels += 1


@pytest.mark.parametrize("found", [True, False])
def test_those_that_decode_go_on_while_a_checkpoint_is_read(tiny_llama, monkeypatch, found):
    """And where it turns out that there is none, while the prompt's prefix is."""
    with serving(tiny_llama) as (keeper, generator), ThreadPoolExecutor() as pool:
        args = options()
        whole = ask(generator, args)
        keeper.resume = 20 if found else None
        made, checkpoint, prefix, begun, rooms = [], Waiting(found), Waiting(False), [], []
        monkeypatch.setattr(holding, "_hold", lambda runtime, source, tokens, most, preempted: rooms.append((tokens, most)))

        def prepare(source, prompt, policy):
            made.append(policy)
            if found and policy in keeper.states:
                checkpoint.tokens = keeper.states[policy][keeper.resume].tokens
            return checkpoint if policy in keeper.states else None

        def otherwise(cache, model, tokens):
            begun.append(tokens)
            return prefix if checkpoint.ready.is_set() and not prefix.steps else None

        monkeypatch.setattr(keeper, "prepare", prepare, raising=False)
        monkeypatch.setattr(type(generator.prompt_cache), "prepare", otherwise)
        other = pool.submit(ask, generator, options(max_tokens=41), "Something else.")
        assert other.result(30)[2] == "length" and len(begun) == 1
        held = pool.submit(ask, generator, args)
        until(lambda: checkpoint.steps)
        assert len(ask(generator, options(max_tokens=42))[0]) == 42 and not held.done()
        checkpoint.ready.set()
        if not found:
            until(lambda: prefix.steps)
            assert len(ask(generator, options(max_tokens=43))[0]) == 43 and not held.done()
            prefix.ready.set()
        assert held.result(30) == whole
        until(lambda: checkpoint.cancels and (found or prefix.cancels))
        assert bool(prefix.steps) != found and len(set(made)) == len(made)
        # It waits for room for what it goes on with.
        assert ((checkpoint.tokens, args.max_tokens - 20) in rooms) == found
