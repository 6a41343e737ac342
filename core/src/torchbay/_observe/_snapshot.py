"""Python state before and after: what a call wrote, and how to undo it."""

from __future__ import annotations

from types import CellType
from typing import Any

import attrs

from torchbay._observe._reach import Reach
from torchbay._structure import is_plain, same_value

__all__ = ["Change", "Snapshot"]

_NOTHING = object()


@attrs.frozen(eq=False)
class Change:
    """One place that holds another value than before."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path} was {_show(self.before)} and is {_show(self.after)}"


class Snapshot:
    """A shallow copy of every container that was reached."""

    def __init__(self, reach: Reach) -> None:
        self._copies = [
            (path, holder, _copy(holder))
            for path, holder in reach.holders.values()
            if not isinstance(holder, tuple)
        ]

    def changes(self) -> list[Change]:
        """Return every place that differs, by identity or, for plain values, by value."""
        return [
            change
            for path, holder, before in self._copies
            for change in _differences(path, before, _copy(holder))
        ]

    def restore(self) -> None:
        """Put every container back as it was."""
        for _path, holder, before in self._copies:
            if any(_differences("", before, _copy(holder))):
                _put_back(holder, before)


def _copy(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, CellType):
        try:
            return {None: holder.cell_contents}
        except ValueError:
            return {}
    return dict(enumerate(holder)) if isinstance(holder, list) else dict(holder)


def _put_back(holder: Any, before: dict[Any, Any]) -> None:
    """Restore what differs, key by key: other threads may be reading the rest."""
    if isinstance(holder, CellType):
        holder.cell_contents = before[None]
    elif isinstance(holder, list):
        holder[:] = before.values()
    else:
        for key in [key for key in holder if key not in before]:
            del holder[key]
        holder.update((k, old) for k, old in before.items() if holder.get(k, _NOTHING) is not old)


def _differences(path: str, before: dict[Any, Any], after: dict[Any, Any]) -> list[Change]:
    return [
        Change(_place(path, key), old, new)
        for key in {**before, **after}
        if not _is_same(old := before.get(key, _NOTHING), new := after.get(key, _NOTHING))
    ]


def _is_same(old: object, new: object) -> bool:
    return old is new or (is_plain(old) and same_value(old, new))


def _place(path: str, key: object) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}"
    return path if key is None else f"{path}[{key!r}]"


def _show(value: object) -> str:
    if value is _NOTHING:
        return "absent"
    return repr(value) if is_plain(value) else f"a {type(value).__qualname__}"
