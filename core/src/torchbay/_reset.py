"""Forgetting everything that was compiled."""

from __future__ import annotations

from torchbay._compile import Dispatcher, live_dispatchers
from torchbay._dynamo import DynamoDispatcher, live_dynamo_dispatchers
from torchbay._registry import loaded
from torchbay.plugin import ResettableBackend

__all__ = ["reset"]


def reset() -> None:
    """Drop the specializations of every compiled object, then what backends keep of their own."""
    dispatchers: list[Dispatcher | DynamoDispatcher] = [*live_dispatchers, *live_dynamo_dispatchers]
    for dispatcher in dispatchers:
        dispatcher.reset()
    objects = [dispatcher.settings.backend for dispatcher in dispatchers]
    for backend in {id(b): b for b in (*loaded(), *objects)}.values():
        if isinstance(backend, ResettableBackend):
            backend.reset()
