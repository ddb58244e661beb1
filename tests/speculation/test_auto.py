"""``--num-draft-tokens auto``: what it chooses over a clock that the test moves, and that no choice changes a token."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from families import build
from speculative_runs import Known, generate, plain, speculation

from mlx_lm_tiered.settings import AUTO
from mlx_lm_tiered.speculation import requests
from mlx_lm_tiered.speculation.auto import ALLOWED, CHOICES, MEASURED, Auto
from mlx_lm_tiered.speculation.costs import FIRST
from mlx_lm_tiered.speculation.draft_model import BEHIND
from mlx_lm_tiered.speculation.pricing import WIDTHS
from mlx_lm_tiered.speculation.source import Draft, DraftCost, Price

STEP = 0.01


class Model:
    pass


class World:
    """A model whose steps and verifications take what is said, and a source of which each draft has so many right tokens.

    What it takes is measured beforehand, unless `believed` says what is believed instead. `lost` is what drafting has cost in all, in steps; negative when it gained.
    """

    def __init__(self, round_steps: Callable[[int], float], right: Callable[[int], int], draft: DraftCost = DraftCost(), prompt: int = 0, room: int = 512, believed: Callable[[int], float] | None = None, late: float = 0.0):
        """`round_steps` and `believed` say what a verification of so many tokens takes, its drafts included; `draft` what a draft model's part of it is; `late` how much longer the step behind it takes."""
        self.late, self._after = late, False
        self.draft, self.prompt, self.room = draft, prompt, room
        self.believed = believed or round_steps
        self.now, self.tokens, self.rounds = 0.0, 0, 0
        self.round_steps, self.right = round_steps, right
        self.model, self.auto = Model(), Auto(lambda: self.now)
        self.first_pass: dict[int, float] = {}  # steps that the first verification of an order of size takes besides
        self.noise: Callable[[int], float] = lambda number: 0.0
        self._ready = 0.0  # when the pending token is known
        self._steps = 0
        self.request()

    def request(self) -> None:
        rounds = {width: STEP * self.believed(width) - self.draft.draft * (width - 1) for width in WIDTHS}
        self.auto.prepare(self.model, lambda: Price(STEP, rounds, STEP * self.late, *self.draft))
        self.behind = self.prompt if self.draft.draft else 0
        self.chooser, self.choices = self.auto.begin(self.model), []
        self.start, self.first, self._ready = self.now, self.tokens, self.now

    def go(self, tokens: int, hopes: bool = True, drafts: bool = True) -> list[int]:
        """Generate at least that many tokens; the numbers of drafts that were allowed before each step."""
        self.choices = []
        end = self.tokens + tokens
        while self.tokens < end:
            allowed = self.chooser.allowed(self.tokens)
            self.choices.append(allowed)
            if self.behind > BEHIND and allowed:
                self._catch_up()
            elif allowed and hopes:
                self.now = max(self.now, self._ready)
                self.chooser.waited()
                if drafts:
                    self._verify(allowed)
                    continue
            self._steps += 1
            ready = max(self.now, self._ready)
            self._ready = ready + STEP * (1 + self.noise(self._steps) + self.late * self._after)
            self._after = False
            self.now = ready
            self.tokens += 1
            self.behind += self.draft.draft > 0
        return self.choices

    def _catch_up(self) -> None:
        """With 100 tokens, beside a plain step, where that is worth it."""
        if self.chooser.worth(self.behind, self.room - (self.tokens - self.first)):
            piece = min(self.behind, 100)
            self.chooser.beside(piece)
            self._ready += piece * self.draft.behind
            self.behind -= piece

    def _verify(self, drafted: int) -> None:
        size = drafted.bit_length()
        self.now += STEP * (self.round_steps(drafted + 1) + self.first_pass.pop(size, 0.0))
        accepted = min(self.right(self.rounds), drafted)
        self.rounds += 1
        self.tokens += 1 + accepted
        self.behind = 0
        self._ready, self._after = self.now, True
        self.chooser.verified(drafted, accepted)

    @property
    def lost(self) -> float:
        return (self.now - self.start) / STEP - (self.tokens - self.first)


def cheap(width: int) -> float:
    return 1 + 0.08 * (width - 1)


def test_it_measures_plain_steps_first_and_grows_where_drafts_are_right():
    world = World(cheap, lambda number: 99)
    choices = world.go(200)
    first = next(place for place, choice in enumerate(choices) if choice)
    assert MEASURED <= first <= MEASURED + 3 and choices[first] == FIRST
    assert choices[first:] == sorted(choices[first:]) and choices[-1] == CHOICES[-1]
    assert world.lost < -100


def test_what_a_wide_verification_costs_bounds_it():
    """Up to five tokens cost little, more cost much."""
    world = World(lambda width: 1.1 if width <= 5 else 3.0 * width, lambda number: 99)
    assert set(world.go(800)[-20:]) == {4}


@pytest.mark.parametrize("cost", [1.02, 1.3, 2.0, 5.0, 40.0])
def test_where_drafts_are_wrong_it_ceases_and_what_it_loses_is_bounded(cost: float):
    world = World(lambda width: cost, lambda number: 0)
    before = world.go(100)
    assert before.count(0) > 40 and any(before) == (cost < 3)
    spent = world.rounds
    for tokens in (100, 1000, 5000):
        world.go(tokens)
        plain_steps = world.tokens - world.first
        # The last verification may be one more than it has saved for, and a high price is tried once before it is believed.
        assert world.lost <= ALLOWED + 0.01 * plain_steps + (cost - 1)
    assert world.rounds > spent  # tried again
    spent = world.rounds
    world.go(5000)
    assert (world.rounds > spent) == (cost < 4)  # where that can be paid for
    world.request()
    world.go(64)
    assert world.lost <= 0.03 * 64


@pytest.mark.parametrize(("cost", "late"), [(1.3, 0.0), (1.8, 0.5), (2.0, 1.0), (2.4, 1.2)])
def test_a_request_with_a_short_answer_loses_next_to_nothing_the_first_of_a_process_neither(cost: float, late: float):
    """Also where a round and the step behind it take two steps, as on a GPU, where the host is most of a small model's step."""
    for right in 0, 1:
        world = World(lambda width: cost, lambda number: right, late=late)  # noqa: B023
        tried = 0
        for _ in range(8):
            world.request()
            world.go(64)
            assert world.lost <= 0.03 * 64
            tried = max(tried, world.rounds)
        assert tried


def test_where_a_round_takes_two_steps_right_drafts_pay_all_the_same():
    world = World(lambda width: 1.8, lambda number: 99, late=0.8)
    world.go(400)
    assert world.lost < -150


def test_what_was_measured_wrongly_beforehand_is_put_right():
    """A pause of the machine can have made drafts look dear, or steps long and so drafts cheap."""
    dear = World(cheap, lambda number: 99, believed=lambda width: 30.0)
    assert not any(dear.go(300)) and dear.go(600)[-1] == CHOICES[-1]
    cheaply = World(lambda width: 5.0, lambda number: 0, believed=cheap)
    cheaply.go(1000)
    assert cheaply.lost <= ALLOWED + 0.01 * 1000 + 4 * 4


def test_what_others_prefills_take_between_steps_is_not_a_steps_time():
    """With it a step would seem long, and so a verification cheap; and other requests of the model share what was learnt."""
    world = World(lambda width: 9.0, lambda number: 1)
    for _ in range(8):
        world.request()
        for _ in range(12):
            world.go(1)
            world.now += 30 * STEP
            world.auto.interrupted()
        world.go(30)
    world.request()
    before = world.rounds
    assert not any(world.go(96)) and world.rounds == before
    assert all(steps > 5 for _, steps in world.auto.report()["verification_steps"])


def test_where_right_drafts_cost_more_than_they_bring_it_ceases_too():
    world = World(lambda width: 2.5 * width, lambda number: 99)
    choices = world.go(2000)
    assert choices[-1] == 0 and world.lost < 0.01 * world.tokens + 50


def test_when_drafts_become_right_it_comes_back():
    world = World(cheap, lambda number: 0)
    world.go(300)
    assert world.choices[-1] == 0
    world.right = lambda number: 99
    choices = world.go(600)
    assert choices[-1] >= 8 and sum(choice == 0 for choice in choices) < 200


def test_a_slow_first_pass_is_not_held_against_drafts():
    world = World(cheap, lambda number: 99)
    world.first_pass = dict.fromkeys(range(1, 7), 200.0)
    while world.rounds < 1:
        world.go(1)
    assert world.go(300)[-1] == CHOICES[-1]
    assert all(steps < 3 for _, steps in world.auto.report()["verification_steps"])


def test_lookups_that_find_nothing_are_not_taken_for_slow_steps_and_outliers_are_no_measure():
    world = World(cheap, lambda number: 99)
    world.noise = lambda number: 30.0 if number % 7 == 0 else 0.0
    world.go(100, drafts=False)
    assert world.auto.report()["step_seconds"] == pytest.approx(STEP)


def test_steps_with_others_in_the_batch_count_for_nothing():
    world = World(cheap, lambda number: 99)
    world.go(20)
    measured = world.auto.report()["step_seconds"]
    world.now += 100.0
    world._ready = world.now
    world.tokens += 400
    assert world.go(100)[-1] == CHOICES[-1] and world.auto.report()["step_seconds"] == pytest.approx(measured)


def test_another_model_has_other_costs():
    world = World(cheap, lambda number: 99)
    world.go(100)
    assert world.auto.report()["verification_steps"][0] == [2, 1.08]
    world.model, world.believed = Model(), lambda width: 7.0
    world.request()
    assert world.auto.report()["verification_steps"] == [[2, 7.0], [3, 7.0], [5, 7.0]]


def priced(draft: float, behind: float) -> DraftCost:
    """In steps."""
    return DraftCost(STEP * draft, STEP * behind)


def test_a_draft_model_that_takes_a_step_for_a_draft_is_never_begun_with():
    """The first requests of a server lose nothing by it, whatever their prompts."""
    world = World(lambda width: 1.1 + 1.9 * (width - 1), lambda number: 99, priced(1.9, 0.1), prompt=200)
    for _ in range(6):
        world.request()
        assert not any(world.go(64)[:-1]) and world.rounds == 0 and world.lost < 1e-6
    assert world.auto.report()["draft_steps"] == 1.9


def test_a_cheap_one_drafts_from_its_first_request_on_with_as_many_as_its_price_allows():
    for draft, first in (0.02, 4), (0.4, 2):
        world = World(lambda width, draft=draft: 1 + (0.03 + draft) * (width - 1), lambda number: 99, priced(draft, 0.001), prompt=300)
        assert next(filter(None, world.go(200))) == first and world.lost < -100


def test_it_catches_up_where_what_is_left_pays_for_it():
    """As long as nothing is known of the drafts, for next to nothing; and what it takes is learnt: in the end ten times as much as was thought."""
    world = World(lambda width: 1 + 0.12 * (width - 1), lambda number: 99, priced(0.1, 0.01))

    def begun(prompt: int, room: int) -> bool:
        world.prompt, world.room, before = prompt, room, world.rounds
        world.request()
        world.go(60)
        return world.rounds > before

    assert not begun(2000, 64) and not begun(2000, 512) and world.lost < 1e-6
    assert begun(100, 512) and begun(100, 64) and world.lost < -20
    assert not begun(4000, 64) and begun(4000, 512)
    world.draft = priced(0.1, 0.1)
    assert begun(400, 200) and begun(400, 200) and begun(400, 200)
    assert world.auto.report()["catch_up_steps"] == pytest.approx(0.1, rel=0.3)
    assert not begun(4000, 512)


def test_an_unknown_draft_model_waits_until_what_its_trial_may_lose_was_saved():
    world = World(lambda width: 1 + 0.12 * (width - 1), lambda number: 0, priced(0.1, 0.01), prompt=2000)
    plain = 0
    while not world.rounds:
        world.request()
        world.go(100)
        plain += 100
        assert plain < 4000
    assert plain > 1900
    assert world.lost < 30


def test_how_often_a_draft_model_was_right_is_remembered():
    """One that knows nothing costs the first request what it takes to see that, and the others next to nothing."""
    world = World(lambda width: 1 + 0.12 * (width - 1), lambda number: 0, priced(0.1, 0.01), prompt=60)
    world.go(64)
    assert world.rounds and world.lost < 4
    for _ in range(10):
        world.request()
        world.go(64)
        assert world.lost < 0.03 * 64
    world.right = lambda number: 99
    world.request()
    world.go(1000)
    world.request()
    assert max(world.go(64)) > 2


def prompt_of(count: int) -> list[int]:
    mx.random.seed(1)
    return mx.random.randint(3, 1000, (count,)).tolist()


@pytest.fixture
def rounds_take_a_step(monkeypatch):
    """By what is believed: what a tiny model's forwards really take here is chance."""
    monkeypatch.setattr(requests, "price", lambda model, source: Price(1.0, dict.fromkeys(WIDTHS, 1.0)))


@pytest.mark.usefixtures("rounds_take_a_step")
@pytest.mark.parametrize("family", ["sliding", "hybrid"])
def test_whatever_it_chooses_the_tokens_are_plain_decodings(family: str):
    """A step a token by its own clock, so that it drafts; right, half right and wrong drafts alternate."""
    model, _ = build(family)
    prompt = prompt_of(45)
    with plain():
        expected = generate(model, prompt, 60)
    with speculation(AUTO, lambda: Known(prompt, expected.tokens)) as run:
        run._auto._clock = Ticking()
        got = generate(model, prompt, 60)
        assert got.tokens == expected.tokens and got.last.all_tokens == prompt + expected.tokens
        report = run.report()
        assert report["accepted"] > 0 and run.faults() == {}
    assert report["draft_tokens"] == AUTO and report["auto"]["verification_steps"]


def test_steps_beside_which_a_draft_model_catches_up_say_nothing():
    world = World(lambda width: 1.2, lambda number: 64)
    world.go(MEASURED + 2, hopes=False)
    for _ in range(40):
        assert world.chooser.allowed(world.tokens) > 0
        world.chooser.beside(100)
        world.now = world._ready = world.now + 20 * STEP
        world.tokens += 1
    assert world.auto.step == pytest.approx(STEP)


@pytest.mark.usefixtures("rounds_take_a_step")
def test_a_source_of_nonsense_ends_at_no_drafts():
    class Nonsense(Known):
        def draft(self, tokens, pending, most, caches, probabilities=None):
            clock.now += 0.5
            following = self.answer[len(tokens) - self.start + 1 :][:most]
            return Draft([(token + 17) % 1000 for token in following])

    model, _ = build("dense")
    prompt = prompt_of(45)
    with plain():
        expected = generate(model, prompt, 120).tokens
    clock = Ticking()
    with speculation(AUTO, lambda: Nonsense(prompt, expected)) as run:
        run._auto._clock = clock
        assert generate(model, prompt, 120).tokens == expected
        report = run.report()
    assert report["accepted"] == 0 and 0 < report["target_calls"] < 15
    assert report["auto"]["draft_tokens"] == 0 and report["auto"]["pauses"] > 0


class Ticking:
    """A clock that goes on by one each time."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now
