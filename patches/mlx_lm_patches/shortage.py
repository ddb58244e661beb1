"""Telling that mlx got no memory from what it raises."""

from __future__ import annotations

from mlx_lm_hooks.types import Refused

RETRY_AFTER_SECONDS = 10

# Metal: "[metal::malloc] Attempting to allocate ...", "... Insufficient Memory"; CUDA: "cudaMallocAsync(...)
# failed: out of memory"; the allocator in front of each: "[malloc] Unable to allocate ...".
_WORDS = ("unable to allocate", "attempting to allocate", "out of memory", "insufficient memory")


def without_memory(error: BaseException) -> Refused | None:
    """The refusal that a failed allocation amounts to; None for other errors."""
    text = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(words in text.lower() for words in _WORDS)):
        return Refused(503, f"the device has no memory left for the request ({text or 'MemoryError'}); try again later", RETRY_AFTER_SECONDS)
    return None
