"""What an answer's `usage` says about its speculation: from the generation thread, by upstream's context, to the HTTP thread."""

from __future__ import annotations

from typing import Any

from mlx_lm_hooks.speculation import Speculator

from . import asked
from .isolation import Row
from .runtime import Runtime

# Where a batch has what drafts for its rows, by uid; None for one that cannot speculate.
SPECULATORS = "_mlx_lm_patches_speculators"
# Where a batch has the server's requests that its rows are, by uid.
ROWS = "_mlx_lm_patches_rows"
# Where upstream's context has what its request's speculator said at the end.
USAGE = "_mlx_lm_patches_speculation"


def note(runtime: Runtime, batch: Any, row: Row) -> None:
    """A row has ended, and its last response was not handed out yet; or it was given up."""
    speculator = vars(batch).get(SPECULATORS, {}).get(row.uid)
    if speculator is not None:
        tell(runtime, row.mailbox.context, speculator)
        end(runtime, speculator)


def end(runtime: Runtime, speculator: Speculator) -> None:
    """Tell a request's speculator that its row is gone."""
    try:
        speculator.end()
    except Exception as error:
        runtime.fault("ending to speculate", error)


def tell(runtime: Runtime, context: Any, speculator: Speculator) -> None:
    """Have a request's answer say what its speculator did, beside those before it: a row that leaves its batch and comes back has another one."""
    if context is None:
        return
    try:
        before = getattr(context, USAGE, {})
        setattr(context, USAGE, {name: count + before.get(name, 0) for name, count in speculator.usage().items()})
    except Exception as error:
        runtime.fault("asking what speculation did", error)


def handler(base: type, runtime: Runtime) -> type:
    """The server's handler class, whose requests may say how many drafts they want, and whose answers say in `usage` what speculation did for them."""

    class Handler(base):
        def validate_model_parameters(self) -> None:
            asked.mark(self)
            super().validate_model_parameters()

        def generate_response(self, *args: Any, **kwargs: Any) -> Any:
            return _told(runtime, super().generate_response(*args, **kwargs))

        def completion_usage_response(self, *args: Any, **kwargs: Any) -> Any:
            return _told(runtime, super().completion_usage_response(*args, **kwargs))

    return Handler


def _told(runtime: Runtime, response: dict[str, Any]) -> dict[str, Any]:
    client = runtime.here.client
    said = getattr(client.context, USAGE, None) if client is not None else None
    if said is not None and "usage" in response:
        response["usage"]["speculation"] = said
    return response
