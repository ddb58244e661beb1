"""Each structural family of models through real servers: what they answer over a RAM hit, after a restart, over a partial
prefix and in a batch that others join and leave is, token by token, what stock mlx-lm answers."""

from __future__ import annotations

import threading
import time

import pytest
from families import FAMILIES, TOKENIZER, write_model_dir
from tokenizers import Tokenizer

from support.server import Server, stock, tiered

MORE = 12
# Chosen so that in no family the best token of a continuation leads by less than 0.004, twenty times what rounding changes.
PROMPT = (  # past every window, chunk and compressed group
    '"__init__()" to customize it), no non-"None" value may be returned by "__init__()"; doing so will cause a "TypeError" to be '
    "raised at runtime. object.__del__(self) Called when the instance is about to be destroyed. This is also called a finalizer or "
    '(improperly) a destructor. If a base class has a "__del__()" method, the derived class’s "__del__()" method, if any, must '
    "explicitly call it to ensure proper deletion of "
)
SHORT = "A cache of keys and values"  # within them
TEXTS = {
    "prompt": PROMPT,
    "longer": PROMPT + 'ments the reference count for "x" by one, and the latter is ',
    "short": SHORT + " is small",
    "other": SHORT + " at once",
    "third": SHORT + " and more",
}
# Four at once: what they have in common with what is stored, how much they generate, and when they come.
CROWD = (("longer", 9, 0.0), ("short", 3, 0.0), ("prompt", 12, 0.03), ("other", 6, 0.06))
UNCUTTABLE = ("hybrid", "recurrent", "parallel-hybrid", "compressed")


def tokens_of(text: str) -> list[int]:
    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode(text).ids


def shared(a: str, b: str) -> int:
    pairs = zip(tokens_of(TEXTS[a]), tokens_of(TEXTS[b]), strict=False)
    return next(i for i, (x, y) in enumerate(pairs) if x != y)


def ask(server: Server, model: str, name: str, **options):
    return server.complete(TEXTS[name], model=model, tokens=True, **{"max_tokens": MORE, **options})


def crowd(server: Server, model: str) -> dict[str, list[int]]:
    """The tokens of requests that share a batch for a while."""
    answers = {}

    def one(name: str, count: int, delay: float) -> None:
        time.sleep(delay)
        answers[name] = ask(server, model, name, max_tokens=count).tokens

    threads = [threading.Thread(target=one, args=arguments) for arguments in CROWD]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The answers by server (stock, first, restarted), family and request."""
    root = tmp_path_factory.mktemp("served-families")
    models = {family: str(write_model_dir(family, root / family)) for family in FAMILIES}
    any_model = next(iter(models.values()))
    answers: dict[str, dict[str, dict[str, object]]] = {"stock": {}, "first": {}, "restarted": {}}
    with stock(any_model, root / "stock.log") as server:
        for family, model in models.items():
            answers["stock"][family] = {name: ask(server, model, name) for name in TEXTS}
    with tiered(any_model, root / "cold", log=root / "first.log") as server:
        for family, model in models.items():
            cold = {name: ask(server, model, name) for name in ("prompt", "short")}
            warm = {"hit": ask(server, model, "prompt"), "sequential": ask(server, model, "prompt", seed=3)}
            warm |= {name: ask(server, model, name) for name in ("longer", "other")}
            answers["first"][family] = {**cold, **warm, "crowd": crowd(server, model)}
        answers["first"]["faults"] = server.stats()["faults"]
        assert server.terminate() == 0
    with tiered(any_model, root / "cold", log=root / "restarted.log") as server:
        for family, model in models.items():
            found = {name: ask(server, model, name) for name in ("third", "prompt", "longer")}
            answers["restarted"][family] = {**found, "crowd": crowd(server, model)}
        stats = server.stats()
        answers["restarted"]["faults"] = stats["faults"]
        answers["restarted"]["ssd"] = stats["hits_by_tier"]["ssd"]
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_stocks(runs, family):
    expected = runs["stock"][family]
    for server in ("first", "restarted"):
        for name, answer in runs[server][family].items():
            if name != "crowd":
                text = name if name in TEXTS else "prompt"
                assert answer.tokens == expected[text].tokens, (server, name)


@pytest.mark.parametrize("server", ["first", "restarted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_that_others_join_and_leave_answers_as_one_alone(runs, family, server):
    expected = runs["stock"][family]
    for name, count, _ in CROWD:
        assert runs[server][family]["crowd"][name] == expected[name].tokens[:count], name


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_reused_that_can_be(runs, family):
    first, restarted = runs["first"][family], runs["restarted"][family]
    whole = first["prompt"].prompt_tokens
    assert first["prompt"].cached_tokens == 0
    assert first["hit"].cached_tokens == first["sequential"].cached_tokens == restarted["prompt"].cached_tokens == whole - 1
    assert first["longer"].cached_tokens >= whole - 1 and restarted["longer"].cached_tokens == restarted["longer"].prompt_tokens - 1
    # Recurrent and compressed state cannot be cut to what two prompts share.
    cut = family not in UNCUTTABLE
    assert first["other"].cached_tokens == (shared("other", "short") if cut else 0)
    assert restarted["third"].cached_tokens == (max(shared("third", "short"), shared("third", "other")) if cut else 0)


def test_nothing_failed_on_the_way(runs):
    assert runs["first"]["faults"] == runs["restarted"]["faults"] == {}
    assert runs["restarted"]["ssd"] >= 2 * len(FAMILIES)
