"""How emitted code reaches what was read: guards on every call, and the epilogue that writes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import CellType
from typing import Any

from torchbay._call import Call, Item
from torchbay._observe import GradientPlace, Holder, Reading, has_attributes
from torchbay._source import Names
from torchbay._structure import key_source

__all__ = ["Access"]


def item_of(mapping: dict[Any, Any], key: Any) -> Any:
    """Return what a dict holds under a key, where asking it would put there what is missing.

    Raises:
        KeyError: There is no such key.
    """
    found = dict.get(mapping, key, _MISSING)
    if found is _MISSING:
        raise KeyError(key)
    return found


_MISSING = object()


class Access:
    """Expressions for the places that a call's values came from."""

    def __init__(self, names: Names, watched: Sequence[Holder], call: Call) -> None:
        self._names = names
        self._arguments = {id(item.value): item.access for item in call.objects}
        self._holders = {id(holder.container): holder for holder in watched}
        self._owners = {id(h.owner): h for h in watched if not h.is_namespace}
        self._references: dict[int, weakref.ref[Any]] = {}

    def of(self, place: Item | Reading | GradientPlace) -> str:
        """Return an expression for a place's current value."""
        if isinstance(place, GradientPlace):
            return f"{self.of(place.owner)}.grad"
        if isinstance(place, Item):
            return place.access
        holder = self.container(self._holders[id(place.holder)])
        if isinstance(place.holder, CellType):
            return f"{holder}.cell_contents"
        if has_attributes(place.holder):
            return f"{holder}.{place.key}"
        key = key_source(place.key, self._names)
        if hasattr(type(place.holder), "__missing__"):
            return f"{self._names.of(item_of, 'item_of')}({holder}, {key})"
        return f"{holder}[{key}]"

    def container(self, holder: Holder) -> str:
        """Return an expression for a container."""
        if holder.is_fixed:
            return self._names.of(holder.container, holder.path)
        return holder.suffix.format(holder.access or self._owner(holder))

    def holder_of(self, value: Any) -> Holder | None:
        """Return the container an object is or has, if it must be reached anew on every call."""
        holder = self._holders.get(id(value)) or self._owners.get(id(value))
        return holder if holder is not None and not holder.is_fixed else None

    def object(self, value: Any) -> str | None:
        """Return an expression for an object that must not be named, or None if it may be."""
        holder = self.holder_of(value)
        if holder is None:
            return None
        return self.container(holder) if holder.container is value else self._owner(holder)

    def _owner(self, holder: Holder) -> str:
        if not holder.is_loose and not isinstance(holder.owner, (list, dict, tuple)):
            if (access := self._arguments.get(id(holder.owner))) is not None:
                return access
            if (reference := self._reference(holder.owner)) is not None:
                return f"{self._names.of(reference, f'{holder.path}_ref')}()"
        assert holder.via is not None, "only arguments are reached without a reading"
        return self.of(holder.via)

    def _reference(self, owner: Any) -> weakref.ref[Any] | None:
        if id(owner) not in self._references:
            try:
                self._references[id(owner)] = weakref.ref(owner)
            except TypeError:
                return None
        return self._references[id(owner)]
