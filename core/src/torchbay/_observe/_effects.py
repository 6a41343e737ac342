"""Which changes to Python state are effects, and which of them an epilogue can repeat."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from types import CellType
from typing import Any

import torch

from torchbay._observe._reach import Holder
from torchbay._observe._snapshot import ABSENT, Change
from torchbay._reason import CannotServe
from torchbay._structure import is_plain, same_value, take_apart

__all__ = ["EffectHistory", "counts", "is_writable"]

_PATIENCE = 4
_DEEPEST = 64
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_REGISTRIES = (
    "['_parameters']",
    "['_modules']",
    "['_forward_hooks']",
    "['_forward_pre_hooks']",
    "['_backward_hooks']",
    "['_backward_pre_hooks']",
)


class EffectHistory:
    """Remembers what earlier observed calls of one callable changed.

    State written on the first call only (a lazily built mask, a warned-once flag) is no effect: a
    change counts when an observed call shows it again.
    """

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._unsettled = 0

    def is_settled(self, changes: Sequence[Change]) -> bool:
        """Whether a call with these changes may be captured; if not, the next one decides.

        Raises:
            CannotServe: The call changes Python state every time, as no epilogue can.
        """
        if not changes:
            self._unsettled = 0
            return True
        self._unsettled += 1
        is_patient = self._unsettled < _PATIENCE
        repeated = [change for change in changes if change.subject in self._changed]
        self._changed.update(change.subject for change in changes)
        for change in repeated if is_patient else changes:
            _refuse_unwritable(change)
        return not is_patient or (bool(repeated) and all(map(_is_repeatable, changes)))


def _refuse_unwritable(change: Change) -> None:
    if not _is_repeatable(change):
        raise CannotServe(
            f"every call changes Python state: {change}",
            remedy="Return the value instead of storing it, or keep it in a tensor",
        )


def _is_repeatable(change: Change) -> bool:
    """Whether an epilogue can do what the call did."""
    if change.holder is None or not is_writable(change.holder):
        return False
    is_number = counts(change) or not moves_a_number(change.before, change.after)
    return _is_writable_key(change) and is_number


def counts(change: Change) -> bool:
    """Whether a place holds another number than before, which a graph can compute from that."""
    old, new = change.before, change.after
    return type(old) is type(new) and type(old) in (int, float) and not same_value(old, new)


def is_writable(holder: Holder) -> bool:
    """Whether a container can be written as the program did, without running a user's code."""
    kind = type(holder.container)
    is_known = kind in _MAPPINGS or kind in (list, set, CellType) or holder.is_namespace
    return is_known and not holder.suffix.endswith(_REGISTRIES)


def _is_writable_key(change: Change) -> bool:
    holder, key = change.holder, change.key
    assert holder is not None, "only what a holder holds has a key"
    is_replaced = change.before is not ABSENT and change.after is not ABSENT
    if holder.suffix.endswith("['_buffers']") or holder.is_namespace:
        return is_replaced
    return key is ABSENT or is_plain(key) or isinstance(key, torch.Tensor)


def moves_a_number(before: Any, after: Any, depth: int = 0) -> bool:
    """Whether a number, or one in a container, is another than before.

    Such numbers are counters more often than not, with another value on every call.
    """
    if _is_number(before) and _is_number(after):
        return not same_value(before, after)
    first, second = _parts(before), _parts(after)
    if depth > _DEEPEST or len(first) != len(second) or before is after:
        return False
    return any(moves_a_number(a, b, depth + 1) for a, b in zip(first, second, strict=True))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (tuple, list)):
        return value
    container = take_apart(value, fresh=True)
    return container.children if container is not None else ()
