"""Figures as people read them, on the page and in a terminal. None: not known."""

from __future__ import annotations

from ...settings import format_size

UNKNOWN = "—"


def size(value: float | None) -> str:
    """Bytes."""
    return UNKNOWN if value is None else format_size(int(value))


def number(value: float | None) -> str:
    """A whole number."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share of 1."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def rate(value: float | None) -> str:
    """So many a second."""
    return UNKNOWN if value is None else f"{value:,.1f}"


def seconds(value: float | None) -> str:
    """How long something took."""
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 99.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    for unit, length in (("d", 86400), ("h", 3600)):
        if value >= 1.5 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value / 60:.0f} min"


def ago(value: float | None) -> str:
    """How long ago something was, in no less than seconds."""
    return seconds(value) if value is None or value >= 9.95 else f"{value:.0f} s"


def tier(name: str) -> str:
    """What people call a tier."""
    return {"ram": "RAM", "queue": "Spill queue", "ssd": "SSD", "shared": "Shared store"}.get(name, UNKNOWN)
