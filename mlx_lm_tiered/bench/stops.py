"""Speculation that is stopped everywhere: whether tokens, caches and the next turn are plain decoding's, from RAM and from a disk.

An answer of many tokens is generated in pieces, by one ``generate_step`` each, which end at every
place to stop at and go on from the prefix that an earlier piece stored one to nine places before;
so what was stored at each place is used. Past a sliding window an entry can only be used
whole: one token too many or too few in it, and it is not found or answers wrongly.

What is expected of the next turn is plain decoding's without anything stored, from caches that grew with
the answer token by token; of every tenth place it is computed anew from the first token, too, and must be the same. With
all computed anew, which took three quarters of the time, nothing else was expected (400 places of 2,000 tokens).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_lm_tiered import disable, enable, stats

from ..caches import lend
from .in_process import prefilled
from .text import document

MORE = 3  # tokens of the next turn's prompt
FOLLOWING = 4  # tokens of its answer
PIECES = 9  # places that the longest piece goes past
SECTION = 100  # stops between two starts of the plugin: a script's entries wait in memory until its end
ANEW = 10  # places from one whose next turn is computed from the first token to the next


class Stop(NamedTuple):
    """A place to stop at, in tokens of the answer, and the tokens of the next turn that begins there."""

    place: int
    following: list[int]


def run(model_path: Path, tokens: int, every: int, drafts: int, scheme: str, prefix_tokens: int = 100, part: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Stops every `every` tokens of an answer of `tokens`; the counts of stops that differ, and what was drafted.

    `part` (number, of how many) is a share of the places, those behind each other; its first piece has nothing stored to go on from.
    """
    import mlx_lm.server  # noqa: F401  (hooked before the model's modules are imported)

    counts: Counter[str] = Counter()
    places = list(range(every, tokens + 1, every))
    number, of = part
    places = places[len(places) * (number - 1) // of : len(places) * number // of]
    with _on(counts, "plain", kv_scheme=scheme, prompt_cache_bytes=0):
        from mlx_lm import load

        model, tokenizer = load(str(model_path))
        prompt = list(tokenizer.encode(document(8 * prefix_tokens)))[:prefix_tokens]
        more = prompt[:MORE]
        answer = _generated(model, prompt, places[-1])
        stops = list(_expected(model, prompt, answer, places, more))
        for stop in stops[::ANEW]:
            counts["wrong_expected"] += _generated(model, [*prompt, *answer[: stop.place], *more], FOLLOWING) != stop.following
    sections = [stops[at : at + SECTION] for at in range(0, len(stops), SECTION)]
    with TemporaryDirectory(prefix="mlx-lm-tiered-stops-", ignore_cleanup_errors=True) as folder:
        on = {"kv_scheme": scheme, "ssd_cache": str(Path(folder) / "cold"), "ssd_restore": "always", "speculation": "ngram", "num_draft_tokens": drafts}
        for section in sections:
            with _on(counts, "first", **on):
                for place, following in section:
                    at = max(0, place - every * (1 + place // every % PIECES))
                    counts["wrong_tokens"] += _generated(model, [*prompt, *answer[:at]], place - at) != answer[at:place]
                    counts["wrong_next"] += _generated(model, [*prompt, *answer[:place], *more], FOLLOWING) != following
        for section in sections:
            with _on(counts, "restarted", **on):
                for place, following in section:
                    counts["wrong_restored"] += _generated(model, [*prompt, *answer[:place], *more], FOLLOWING) != following
    return {
        "tokens": tokens, "stops": len(stops), "part": f"{number}/{of}", "kv_scheme": scheme, "draft_tokens": drafts,
        "computed_anew": len(stops[::ANEW]), "wrong_expected": counts["wrong_expected"],
        "wrong_tokens": counts["wrong_tokens"], "wrong_next": counts["wrong_next"], "wrong_next_from_ssd": counts["wrong_restored"],
        "wrong_lengths": counts["wrong_lengths"], "hits_from_ram": counts["first_ram"], "hits_after_starts": counts["first_ssd"],
        "hits_from_ssd": counts["restarted_ssd"], "drafted": counts["drafted"], "accepted": counts["accepted"], "faults": counts["faults"],
    }  # fmt: skip


@contextmanager
def _on(counts: Counter[str], phase: str, **settings: Any) -> Iterator[None]:
    """The plugin with these settings; what it counted is added to `counts`."""
    enable(**settings)
    try:
        yield
        seen = stats() or {}
    finally:
        disable()
    counts["wrong_lengths"] += seen["keys_shortened"]
    counts["faults"] += sum(seen["faults"].values())
    for tier, hits in seen["hits_by_tier"].items():
        counts[f"{phase}_{tier}"] += hits
    if phase == "first":
        for name in ("drafted", "accepted"):
            counts[name] += seen["speculation"][name]


def found(result: dict[str, Any]) -> list[str]:
    """What is not as it must be, in sentences."""
    wrong = [f"{name}: {result[name]}" for name in ("wrong_expected", "wrong_tokens", "wrong_next", "wrong_next_from_ssd", "wrong_lengths", "faults") if result[name]]
    if not 0 < result["accepted"] < result["drafted"]:
        wrong.append("no draft was cut: nothing was tested")
    hits = result["hits_from_ram"] + result["hits_after_starts"]
    # The pieces that begin where the answer does have nothing to go on from but the prompt, which the first stores.
    if hits < 2 * result["stops"] - PIECES or result["hits_from_ssd"] < result["stops"]:
        wrong.append("prefixes were not found where they were stored")
    return wrong


def _expected(model: Any, prompt: Sequence[int], answer: Sequence[int], places: Sequence[int], more: Sequence[int]) -> Iterator[Stop]:
    """The places with what comes next by plain decoding, from caches that grow from one place to the next."""
    caches, held = prefilled(model, prompt), 0
    for place in places:
        caches, held = prefilled(model, answer[held:place], caches), place
        yield Stop(place, _generated(model, more, FOLLOWING, lend(caches)))


def _generated(model: Any, prompt: Sequence[int], count: int, caches: list[Any] | None = None) -> list[int]:
    """So many tokens behind a prompt; `caches` hold what comes before it."""
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count, prompt_cache=caches)]
