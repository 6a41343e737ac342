"""Forgetting everything that was compiled."""

from __future__ import annotations

from torchbay._compile import live_dispatchers
from torchbay._registry import loaded
from torchbay.plugin import ResettableBackend

__all__ = ["reset"]


def reset() -> None:
    """Drop the specializations of every compiled object, then what backends keep of their own."""
    for dispatcher in list(live_dispatchers):
        dispatcher.reset()
    objects = [d.settings.backend for d in live_dispatchers]
    for backend in {id(b): b for b in (*loaded(), *objects)}.values():
        if isinstance(backend, ResettableBackend):
            backend.reset()
