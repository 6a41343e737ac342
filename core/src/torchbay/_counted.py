"""Numbers of things, in words."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, thing: str) -> str:
    """Return how many of a thing there are: ``1 call``, ``2 calls``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
