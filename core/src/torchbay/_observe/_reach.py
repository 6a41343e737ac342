"""What a call can read besides its arguments: modules, objects, classes, closures and globals.

The walk starts at the callable and at its opaque arguments and follows attributes, elements and
closures. It finds *holders*, the dicts, lists, tuples and cells that programs keep values in, and
in each the *readings*: this holder holds this value under this key. A reading is what a guard
checks, what a snapshot compares and, when its value is a tensor, what becomes an input of the graph.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, MappingProxyType
from typing import Any

import attrs
import torch

from torchbay._call import Call
from torchbay._observe._state import may_change
from torchbay._observe._walk import walker_of
from torchbay._source import is_library_file
from torchbay._torch_compat import global_module_hooks

__all__ = ["Holder", "Reach", "Reading"]


@attrs.frozen(eq=False)
class Reading:
    """A value somebody could read.

    Attributes:
        path: How a user would write it: ``self.layers.0.training``.
        holder: What holds it: a dict, list, tuple, cell, function or the namespace of a class.
        key: The value's key or index in it; None for a cell.
        value: The value.
        attribute: The name code must mention to read it, or None when no name is needed.
    """

    path: str
    holder: Any
    key: Any
    value: Any
    attribute: str | None = None


@attrs.define(eq=False)
class Holder:
    """A container and what was read of it.

    Attributes:
        path: How a user would write it.
        container: The container itself.
        owner: The object it is part of.
        suffix: How it is reached from its owner, as a template.
        is_whole: Whether everything it holds was read, so that one thing more would be a change.
        readings: What was read of it.
        via: The reading that led to its owner, if one did.
        is_pinned: Whether guards may keep it alive. What only a call's arguments lead to, they
            must not: it would live as long as the compiled object.
    """

    path: str
    container: Any
    owner: Any
    suffix: str = "{}"
    is_whole: bool = True
    readings: list[Reading] = attrs.field(factory=list)
    via: Reading | None = None
    is_pinned: bool = True


class Reach:
    """Everything found, each object once."""

    def __init__(self) -> None:
        self.holders: dict[int, Holder] = {}
        self._parts: dict[int, list[Holder]] = {}
        self._roots: list[int] = []
        self._argument_roots: list[int] = []
        self._pending: collections.deque[tuple[str, Any]] = collections.deque()
        # By identity, and kept alive, so that no other object gets the same one.
        self._walked: dict[int, Any] = {}
        self._namespaces: dict[type, MappingProxyType[str, Any]] = {}

    @classmethod
    def of(cls, call: Call, codes: Mapping[CodeType, dict[str, Any]]) -> Reach:
        """Walk from a callable, its opaque arguments, and code known to run in the call."""
        reach = cls()
        reach._root("self", call.function)
        reach._root("torch.nn.modules.module", global_module_hooks())
        for item in call.objects:
            reach._argument_roots.append(id(item.value))
            reach._pending.append((item.path, item.value))
        reach.add_globals(codes)
        reach.complete()
        return reach

    def add_globals(self, codes: Mapping[CodeType, dict[str, Any]]) -> list[Reading]:
        """Add what code can read of its module's globals; return what was not known yet."""
        names = [(code, name) for code in codes for name in dict.fromkeys(code.co_names)]
        found = [self._read_global(codes[code], name) for code, name in names]
        return [reading for reading in found if reading is not None]

    def complete(self) -> None:
        """Follow every value that was read, and what it leads to."""
        # A list of what is left, not recursion: users' objects may be chained without end.
        while self._pending:
            path, value = self._pending.popleft()
            if id(value) not in self._walked and (walk := walker_of(value)) is not None:
                self._walked[id(value)] = value
                walk(self, path, value)

    def tensors(self) -> Iterator[Reading]:
        """Yield the readings whose value is a tensor."""
        for holder in self.holders.values():
            yield from (r for r in holder.readings if isinstance(r.value, torch.Tensor))

    def named_tensors(self) -> Iterator[Reading]:
        """Yield the tensors that somebody gave a name: parameters, buffers, closed-over ones."""
        for holder in self.holders.values():
            is_registry = holder.suffix.endswith(("['_parameters']", "['_buffers']"))
            if is_registry or isinstance(holder.container, CellType):
                yield from (r for r in holder.readings if isinstance(r.value, torch.Tensor))

    def watched(self, names: frozenset[str] | None) -> list[Holder]:
        """Return the holders that code mentioning only these names can get at.

        Each comes with the readings that such code can make. None stands for every name.
        """
        found: dict[int, Holder] = {}
        for roots, is_pinned in ((self._roots, True), (self._argument_roots, False)):
            pending: collections.deque[tuple[int, Reading | None]]
            pending = collections.deque((root, None) for root in roots)
            seen: set[int] = set()
            while pending:
                part, via = pending.popleft()
                if part in seen:
                    continue
                seen.add(part)
                for holder in self._parts.get(part, ()):
                    readings = [r for r in holder.readings if _can_name(r, names)]
                    pending += [(id(reading.value), reading) for reading in readings]
                    watched = attrs.evolve(holder, readings=readings, via=via, is_pinned=is_pinned)
                    found.setdefault(id(holder.container), watched)
        return list(found.values())

    def hold(self, path: str, container: Any, part_of: Any, **more: Any) -> Holder:
        """Note a container as part of an object."""
        if (holder := self.holders.get(id(container))) is None:
            holder = self.holders[id(container)] = Holder(path, container, part_of, **more)
        parts = self._parts.setdefault(id(part_of), [])
        if holder not in parts:
            parts.append(holder)
        return holder

    def namespace_of(self, kind: type) -> MappingProxyType[str, Any]:
        """Return a class's namespace, the same object every time; Python makes a new one."""
        return self._namespaces.setdefault(kind, kind.__dict__)

    def read(self, holder: Holder, path: str, key: Any, value: Any, name: str | None) -> Reading:
        """Note a reading, to be followed."""
        reading = Reading(path, holder.container, key, value, name)
        holder.readings.append(reading)
        self._pending.append((path, value))
        return reading

    def _root(self, path: str, value: Any) -> None:
        self._roots.append(id(value))
        self._pending.append((path, value))

    def _read_global(self, variables: dict[str, Any], name: str) -> Reading | None:
        if name not in variables:
            return None
        module = variables.get("__name__", "globals")
        holder = self.hold(module, variables, variables, is_whole=False)
        self._roots.append(id(variables))
        is_known = any(reading.key == name for reading in holder.readings)
        is_library = is_library_file(variables.get("__file__") or "")
        if is_known or not may_change(variables[name], is_library=is_library):
            return None
        return self.read(holder, f"{module}.{name}", name, variables[name], name)


def _can_name(reading: Reading, names: frozenset[str] | None) -> bool:
    return names is None or reading.attribute is None or reading.attribute in names
