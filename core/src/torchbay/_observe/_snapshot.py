"""Python state before and after: what a call wrote, and how to undo it."""

from __future__ import annotations

from types import CellType, FunctionType, MappingProxyType
from typing import Any

import attrs

from torchbay._observe._reach import Holder, Reach
from torchbay._structure import is_plain, same_value

__all__ = ["Change", "Snapshot", "is_same"]

_NOTHING = object()


@attrs.frozen(eq=False)
class Change:
    """One place that holds another value than before; the same value twice where none is known."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.before is self.after:
            return self.path
        return f"{self.path} was {_show(self.before)} and is {_show(self.after)}"


class Snapshot:
    """A shallow copy of every container that was reached."""

    def __init__(self, reach: Reach) -> None:
        self._copies = [
            (holder, _copy(holder))
            for holder in reach.holders.values()
            if not isinstance(holder.container, tuple)
        ]

    def changes(self) -> list[Change]:
        """Return every place that differs, by identity or, for plain values, by value."""
        return [
            change
            for holder, before in self._copies
            for change in _differences(holder.path, before, _copy(holder, before))
        ]

    def restore(self) -> None:
        """Put every container back as it was."""
        for holder, before in self._copies:
            if any(_differences("", before, _copy(holder, before))):
                _put_back(holder, before)


def _copy(holder: Holder, like: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """Return what a holder holds; of one not read as a whole, the part that was read."""
    container = holder.container
    if isinstance(container, CellType):
        try:
            return {None: container.cell_contents}
        except ValueError:
            return {}
    if isinstance(container, list):
        return dict(enumerate(container))
    if isinstance(container, set):
        return dict.fromkeys(container, True)
    if holder.is_whole:
        return dict(container)
    if isinstance(container, FunctionType):
        return {reading.key: getattr(container, reading.key) for reading in holder.readings}
    keys = like if like is not None else [reading.key for reading in holder.readings]
    return {key: container[key] for key in keys if key in container}


def _put_back(holder: Holder, before: dict[Any, Any]) -> None:
    """Restore what differs, key by key: other threads may be reading the rest."""
    container = holder.container
    if isinstance(container, CellType):
        container.cell_contents = before[None]
    elif isinstance(container, list):
        container[:] = before.values()
    elif isinstance(container, set):
        container.intersection_update(before)
        container.update(before)
    elif isinstance(container, (FunctionType, MappingProxyType)):
        # A class's namespace changes through the class only; a plain proxy, not at all.
        for key, old in before.items():
            setattr(holder.owner, key, old)
    else:
        for key in [key for key in container if holder.is_whole and key not in before]:
            del container[key]
        container.update((k, v) for k, v in before.items() if container.get(k, _NOTHING) is not v)


def _differences(path: str, before: dict[Any, Any], after: dict[Any, Any]) -> list[Change]:
    return [
        Change(_place(path, key), old, new)
        for key in {**before, **after}
        if not is_same(old := before.get(key, _NOTHING), new := after.get(key, _NOTHING))
    ]


def is_same(old: object, new: object) -> bool:
    """Whether a place holds what it held: the same object, or an equal plain value."""
    return old is new or (is_plain(old) and same_value(old, new))


def _place(path: str, key: object) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}"
    return path if key is None else f"{path}[{key!r}]"


def _show(value: object) -> str:
    if value is _NOTHING:
        return "absent"
    return repr(value) if is_plain(value) else f"a {type(value).__qualname__}"
