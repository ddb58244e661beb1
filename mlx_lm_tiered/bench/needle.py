"""Needle in a haystack under KV schemes: numbers hidden in a long text, asked for at its end.

The sentences are those of RULER's simplest task (Hsieh et al., 2024): one hidden number
for a city, and a question that ends where the number must follow. Every scheme reads
each text as mlx-lm does and goes on greedily; ``found`` counts the answers that begin
with the number. ``nats`` says more where a model finds few: the mean negative log
probability of the number's tokens, each given those before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx

from mlx_lm_tiered.bench.text import document
from mlx_lm_tiered.progress import Progress
from mlx_lm_tiered.schemes.spec import Spec

from .in_process import loaded, named, planned, prefilled, scheme

CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Tunis", "Riga", "Perth")
NEEDLE = "One of the special magic numbers for {city} is: {number}."
QUESTION = "What is the special magic number for {city} mentioned in the provided text? The special magic number for {city} mentioned in the provided text is"


def run(model_path: Path, schemes: Sequence[str], tokens: int = 1024, cases: int = 4, seed: int = 0) -> dict[str, Any]:
    """Measure it over `cases` texts of about `tokens`, the needle deeper in each. Raises ValueError for a scheme that the model cannot have."""
    asked = named(schemes)
    model, tokenizer = loaded(model_path, [spec for _, spec in asked])
    for _, spec in asked:
        planned(model, spec, model_path)
    drawn = random.Random(seed)
    hidden = [(CITIES[n % len(CITIES)], str(drawn.randrange(10**6, 10**7)), (n + 0.5) / cases) for n in range(cases)]
    texts = [haystack(tokenizer, tokens, *one) for one in hidden]
    rows = []
    for name, spec in asked:
        with Progress(name) as progress:
            seen = []
            for number, (text, (_, wanted, _)) in enumerate(zip(texts, hidden, strict=True)):
                seen.append(ask(model, tokenizer, spec, text, wanted))
                progress(number + 1, cases)
        rows.append({"scheme": name, "found": sum(found for found, _ in seen), "of": cases, "nats": mean(nats for _, nats in seen)})
    return {"bench": "needle", "model": model_path.name, "tokens": max(map(len, texts)), "depths": [depth for *_, depth in hidden], "seed": seed, "rows": rows}


def haystack(tokenizer: Any, tokens: int, city: str, number: str, depth: float) -> list[int]:
    """About `tokens` tokens of English that end in the question, with the needle behind a sentence at `depth` of it, 0 to 1."""
    question = QUESTION.format(city=city)
    frame = len(tokenizer.encode(NEEDLE.format(city=city, number=number) + question))
    ids = tokenizer.encode(document(8 * tokens))[: max(1, tokens - frame)]
    text = tokenizer.decode(ids)
    at = text.find(". ", int(depth * len(text)))
    at = at + 2 if at >= 0 else text.rfind(". ") + 2
    return tokenizer.encode(f"{text[:at]}{NEEDLE.format(city=city, number=number)} {text[at:].strip()} {question}")


def ask(model: Any, tokenizer: Any, spec: Spec, prompt: list[int], wanted: str) -> tuple[bool, float]:
    """Whether the model goes on with the number, and the number's mean negative log probability in nats."""
    answer = _tokens_of(tokenizer, wanted)
    with scheme(spec):
        caches = prefilled(model, prompt[:-1])
        nats, same, token = [], True, prompt[-1]
        # Step by step, as an answer is made. Up to the first difference the greedy answer is the number itself.
        for next_token in answer:
            logits = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
            nats.append((mx.logsumexp(logits) - logits[next_token]).item())
            same = same and mx.argmax(logits).item() == next_token
            token = next_token
    return same, mean(nats)


def _tokens_of(tokenizer: Any, number: str) -> list[int]:
    """The number's tokens behind a word."""
    word = tokenizer.encode("is")
    both = tokenizer.encode(f"is {number}")
    return both[len(word) :]
