"""``POST /admin/cache/probe``: what a request would find, without sending it."""

from __future__ import annotations

import json
from typing import Any

from mlx_lm_hooks import Reply, Request

from ..prefix.probing import answer
from ..prompts import BadPrompt, parse
from ..runtime import Runtime
from .replies import reply
from .tokens import Tokens


LOADING = 60.0  # seconds to wait for the model that the server starts with


class Prober:
    """Answers for the model that is loaded. Runs on HTTP threads: it touches no array and makes nothing younger."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._tokens = Tokens(runtime.args)

    def handle(self, request: Request) -> Reply:
        """200 with what is found; 400 for what is no prompt, 503 while no model is loaded.

        Right after a start it waits for the model, as a request would.
        """
        source = self._runtime.wait_loaded(LOADING)
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
        return reply(200, answer(str(source.path), tokens, looks, str(self._runtime.settings.ssd_cache or "")))


def _given(value: dict[str, Any]) -> list[int]:
    tokens = value["tokens"]
    if len(value) > 1 or not isinstance(tokens, list) or not tokens or not all(type(t) is int and -(1 << 62) < t < 1 << 62 for t in tokens):
        raise BadPrompt("its tokens are not a list of whole numbers, alone")
    return tokens
