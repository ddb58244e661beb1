"""What a plugin may see of a client's request while it is served."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Served:
    """A client's request for a completion, from its arrival to its end.

    The host writes it while the request goes on, any thread may read it. Times are
    seconds of `time.monotonic`; None: that has not come yet. `processed` of the
    `to_process` tokens that nothing stored spared it have been prefilled. `finish`
    is ``stop`` or ``length``, ``abort`` when its client went away, ``refused``, or
    ``error``; empty while it runs. `notes` are the plugins' own, each under its name.
    """

    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None  # it left the queue
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    reused_tokens: int = 0
    processed: int = 0
    to_process: int = 0
    tokens: int = 0  # generated so far
    finish: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
