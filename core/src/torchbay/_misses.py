"""Why the calls of this thread were not served where their guards held."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

__all__ = ["forget_misses", "note_miss", "take_miss"]


class _Notes(threading.local):
    """What was noted in one thread, by the node of a tree where a call left it."""

    def __init__(self) -> None:
        self.reasons: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()


_notes = _Notes()


def note_miss(node: object, reason: str) -> None:
    """Note why a call leaves a tree at a node."""
    _notes.reasons.pop(node, None)
    _notes.reasons[node] = reason


def take_miss(nodes: Iterable[object]) -> str | None:
    """Return what was noted last at one of these nodes, and forget what was noted at any."""
    here = set(nodes)
    noted = [node for node in _notes.reasons if node in here]
    reasons = [_notes.reasons.pop(node) for node in noted]
    return reasons[-1] if reasons else None


def forget_misses() -> None:
    """Forget what earlier calls noted."""
    _notes.reasons.clear()
