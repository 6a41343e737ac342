"""Python state before and after: what a call wrote, and how to undo it."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, MappingProxyType
from typing import Any

import attrs

from torchbay._observe._reach import Holder, Reach
from torchbay._observe._state import has_attributes
from torchbay._structure import is_plain, same_keys, same_value, shown_key

__all__ = ["ABSENT", "Change", "Effect", "Snapshot", "is_same", "put"]


class _Absent:
    """Stands for what is not there."""


ABSENT = _Absent()


@attrs.frozen(eq=False)
class Change:
    """One place that holds another value than before; the same value twice where none is known.

    Attributes:
        path: How a user would write the place.
        before: What it held, or `ABSENT`.
        after: What it holds.
        holder: What holds it, or None where it can only be told that something changed.
        key: The key, index or element in it.
    """

    path: str
    before: Any
    after: Any
    holder: Holder | None = None
    key: Any = None

    @property
    def subject(self) -> str:
        """What is said to have changed, whichever element of a list it was."""
        if self.holder is not None and isinstance(self.holder.container, list):
            return self.holder.path
        return self.path

    def __str__(self) -> str:
        if self.before is self.after:
            return self.path
        return f"{self.path} was {_show(self.before)} and is {_show(self.after)}"


@attrs.frozen(eq=False)
class Effect:
    """A container that a call changed, with what it held before and after."""

    holder: Holder
    before: Mapping[Any, Any]
    after: Mapping[Any, Any]

    @property
    def changes(self) -> Iterator[Change]:
        """The places in it that differ, by identity or, for plain values, by value."""
        for key in {**self.before, **self.after}:
            old, new = self.before.get(key, ABSENT), self.after.get(key, ABSENT)
            if not is_same(old, new):
                yield Change(_place(self.holder.path, key), old, new, self.holder, key)
        if self.is_reordered:
            yield Change(f"the order of {self.holder.path}", None, None, self.holder, ABSENT)

    @property
    def is_reordered(self) -> bool:
        """Whether keys moved: a plain write leaves a key's place, and a new key comes last."""
        if not self.holder.is_whole or not isinstance(self.holder.container, dict):
            return False
        kept = [key for key in self.before if key in self.after]
        added = (key for key in self.after if key not in self.before)
        return not same_keys([*kept, *added], self.after)


class Snapshot:
    """A shallow copy of containers."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._copies = [
            (holder, _copy(holder)) for holder in holders if not isinstance(holder.container, tuple)
        ]

    @classmethod
    def of(cls, reach: Reach) -> Snapshot:
        """Copy every container that was reached."""
        return cls(reach.holders.values())

    def effects(self) -> list[Effect]:
        """Return every container that holds something else now."""
        found = (Effect(holder, old, _copy(holder)) for holder, old in self._copies)
        return [effect for effect in found if any(True for _ in effect.changes)]

    def restore(self) -> None:
        """Put every container back as it was."""
        for effect in self.effects():
            _put_back(effect.holder, effect.before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put every container back as it was, for a while."""
        now = Snapshot(holder for holder, _ in self._copies)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _copy(holder: Holder) -> dict[Any, Any]:
    """Return what a holder holds; of a module or a class, what has an ordinary name."""
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
    if has_attributes(container):
        keys = [reading.key for reading in holder.readings]
        return {key: getattr(container, key) for key in keys if hasattr(container, key)}
    return {key: value for key, value in [*container.items()] if not _is_special(key)}


def _is_special(name: object) -> bool:
    return isinstance(name, str) and name.startswith("__")


def _put_back(holder: Holder, before: Mapping[Any, Any]) -> None:
    """Restore what differs, key by key: other threads may be reading the rest."""
    container = holder.container
    if isinstance(container, CellType):
        _fill(container, before)
    elif isinstance(container, list):
        container[:] = before.values()
    elif isinstance(container, set):
        container.intersection_update(before)
        container.update(before)
    elif has_attributes(container) or holder.is_namespace:
        _set_attributes(holder.owner, before, _copy(holder))
    elif not isinstance(container, MappingProxyType):
        _refill(container, before, is_whole=holder.is_whole)


def put(holder: Holder, key: Any, value: Any) -> None:
    """Let a container hold a value under a key."""
    container = holder.container
    if isinstance(container, CellType):
        container.cell_contents = value
    elif has_attributes(container) or holder.is_namespace:
        setattr(holder.owner, key, value)
    else:
        container[key] = value


def _fill(cell: CellType, before: Mapping[Any, Any]) -> None:
    if before:
        cell.cell_contents = before[None]
    else:
        del cell.cell_contents


def _set_attributes(owner: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    # A class's namespace changes through the class only.
    for key in now.keys() - before.keys():
        delattr(owner, key)
    for key, old in before.items():
        if now.get(key, ABSENT) is not old:
            setattr(owner, key, old)


def _refill(container: Any, before: Mapping[Any, Any], *, is_whole: bool) -> None:
    # Subclasses give these methods another meaning: a Counter's update() adds.
    kind = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
    for key in [key for key in container if is_whole and key not in before]:
        kind.__delitem__(container, key)
    for key, value in before.items():
        if kind.get(container, key, ABSENT) is not value:
            kind.__setitem__(container, key, value)
    if is_whole and not same_keys(container, before):
        for key in before:
            kind.__setitem__(container, key, kind.pop(container, key))


def is_same(old: object, new: object) -> bool:
    """Whether a place holds what it held: the same object, or an equal plain value."""
    return old is new or (is_plain(old) and same_value(old, new))


def _place(path: str, key: object) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}"
    return path if key is None else f"{path}[{shown_key(key)}]"


def _show(value: object) -> str:
    if value is ABSENT:
        return "absent"
    return repr(value) if is_plain(value) else f"a {type(value).__qualname__}"
