"""``POST /admin/cache/probe``: what a request would find, without sending it."""

from __future__ import annotations

import json
from typing import Any

from mlx_lm_hooks import Reply, Request

from ..prompts import BadPrompt, parse
from ..runtime import Runtime
from .replies import reply
from .tokens import Tokens

AROUND = 16  # tokens of the prompt before and behind the place where it diverges


class Prober:
    """Answers for the model that is loaded. Runs on HTTP threads: it touches no array and makes nothing younger."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._tokens = Tokens(runtime.args)

    def handle(self, request: Request) -> Reply:
        """200 with what is found; 400 for what is no prompt, 503 while no model is loaded."""
        source = self._runtime.source
        if source is None or source.path is None:
            return reply(503, {"error": "no model is loaded whose files are known"})
        try:
            value = json.loads(request.body)
            if isinstance(value, dict) and "tokens" in value:
                tokens = _given(value)
            else:
                tokens = self._tokens.of(source.path, parse(value))
        except RecursionError:
            return reply(400, {"error": "the body is nested too deeply"})
        except BadPrompt as error:
            return reply(400, {"error": str(error)})
        except ValueError as error:
            return reply(400, {"error": f"the body is not JSON: {error}"})
        looks = self._runtime.probe(source, tokens)
        tier = max(looks, key=lambda name: looks[name].hit)  # the first of equals, which is the quickest
        nearest = max(looks, key=lambda name: looks[name].common)
        common = looks[nearest].common
        found = {
            "model": str(source.path),
            "prompt_tokens": len(tokens),
            "hit_tokens": looks[tier].hit,
            "hit_tier": tier if looks[tier].hit else None,
            "tiers": {name: look._asdict() for name, look in looks.items()},
            "nearest_tier": nearest if common else None,
            "directory": str(self._runtime.settings.ssd_cache or ""),
        }
        # Of the prompt only, which the client has: what others said stays in files that only their owner can read.
        start = max(0, common - AROUND)
        return reply(200, {**found, "around": {"from": start, "tokens": tokens[start : common + AROUND]}})


def _given(value: dict[str, Any]) -> list[int]:
    tokens = value["tokens"]
    if len(value) > 1 or not isinstance(tokens, list) or not tokens or not all(type(t) is int and -(1 << 62) < t < 1 << 62 for t in tokens):
        raise BadPrompt("its tokens are not a list of whole numbers, alone")
    return tokens
