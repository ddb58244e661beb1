"""Which stores there are, by their URL."""

from __future__ import annotations

from urllib.parse import urlsplit

KINDS = {"s3": "s3://BUCKET/PREFIX", "http": "http://HOST/PATH (WebDAV)", "https": "https://HOST/PATH (WebDAV)", "file": "file:///DIRECTORY"}


def parse_store(text: str) -> str:
    """The URL of a store, without a slash at its end. Raises ValueError; the text of a URL that may hold a secret is not in it."""
    text = str(text).strip().rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in KINDS:
        raise ValueError(f"a store's URL is one of {', '.join(KINDS.values())}")
    if "@" in parts.netloc:
        raise ValueError("a URL with a name or password in it ends up in logs; credentials come from the store's own standard sources, for WebDAV from ~/.netrc")
    if parts.query or parts.fragment:
        raise ValueError("a store's URL has no ? and no #")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("a file URL is file:///DIRECTORY, with an absolute path")
    elif not parts.netloc:
        raise ValueError(f"which host or bucket? write it like {KINDS[parts.scheme]}")
    return text
