"""What a call can read besides its arguments: modules, objects, classes, closures and globals.

The walk starts at the callable and at its opaque arguments and follows attributes, elements and
closures. It finds *holders*, the dicts, lists, tuples and cells that programs keep values in, and
in each the *readings*: this holder holds this value under this key. A reading is what a guard
checks, what a snapshot compares and, when its value is a tensor, what becomes an input of the graph.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, MappingProxyType
from typing import Any

import attrs
import torch

from torchbay._call import Call
from torchbay._observe._names import imports_in, is_named
from torchbay._observe._state import is_own, is_replaceable, may_change
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
        is_loose: Whether it stands where the call puts another one, so that no guard asks for it
            but only for one like it.
        access: How emitted code reaches its owner, if that is a container among the arguments.
    """

    path: str
    container: Any
    owner: Any
    suffix: str = "{}"
    is_whole: bool = True
    readings: list[Reading] = attrs.field(factory=list)
    via: Reading | None = None
    is_pinned: bool = True
    is_loose: bool = False
    access: str | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether it is the very same container on every call, and may be named."""
        return self.is_pinned and not self.is_loose

    @property
    def is_namespace(self) -> bool:
        """Whether it holds what a class defines."""
        return isinstance(self.container, MappingProxyType) and isinstance(self.owner, type)


class Reach:
    """Everything found, each object once.

    Attributes:
        holders: The containers, by identity.
        names: Names that objects hold, for code to read attributes without naming them.
        codes: The code whose globals have been looked at.
    """

    def __init__(self) -> None:
        self.holders: dict[int, Holder] = {}
        self.names: set[str] = set()
        self.codes: set[CodeType] = set()
        self._parts: dict[int, list[Holder]] = {}
        self._roots: list[int] = []
        self._weak_roots: list[int] = []
        self._pending: collections.deque[tuple[str, Any]] = collections.deque()
        # By identity, and kept alive, so that no other object gets the same one.
        self._walked: dict[int, Any] = {}
        self._namespaces: dict[type, MappingProxyType[str, Any]] = {}

    @classmethod
    def of(cls, call: Call, codes: Mapping[CodeType, dict[str, Any]]) -> Reach:
        """Walk from a callable, its opaque arguments, and code known to run in the call."""
        reach = cls()
        reach.add_root("self", call.function)
        reach.add_root("torch.nn.modules.module", global_module_hooks())
        classes = (item for item in call.values if isinstance(item.value, type))
        for item in (*call.objects, *classes):
            reach.add_weak_root(item.path, item.value)
        reach.add_globals(codes)
        reach.complete()
        return reach

    def add_globals(self, codes: Mapping[CodeType, dict[str, Any]]) -> list[Reading]:
        """Add what code can read of its module's globals; return what was not known yet.

        What it imports where it runs is added as well.
        """
        self.codes |= codes.keys()
        names = [(codes[code], name) for code in codes for name in dict.fromkeys(code.co_names)]
        for code, variables in codes.items():
            for module, taken in imports_in(code, variables):
                names += [(vars(module), name) for name in taken or ()]
                if not taken and is_own(module) and id(module) not in self._roots:
                    self.add_root(module.__name__, module)
        found = [self._read_global(variables, name) for variables, name in names]
        return [reading for reading in found if reading is not None]

    def add_root(self, path: str, value: Any) -> None:
        """Walk from an object that lives as long as the program."""
        self._roots.append(id(value))
        self._pending.append((path, value))

    def add_weak_root(self, path: str, value: Any) -> None:
        """Walk from an object that must not be kept alive."""
        self._weak_roots.append(id(value))
        self._pending.append((path, value))

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

    def watched(
        self, names: frozenset[str] | None, is_written: Callable[[Holder, Any], bool]
    ) -> list[Holder]:
        """Return the holders that code mentioning only these names can get at.

        Each comes with the readings that such code can make.

        Args:
            names: The names; None stands for every name.
            is_written: Whether the call writes what a holder holds under a key.
        """
        watch = _Watch(self._parts, names, is_written)
        watch.follow(self._roots, is_pinned=True)
        watch.follow(self._weak_roots, is_pinned=False)
        return list(watch.found.values())

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


class _Watch:
    """Follows readings from object to object, first those that lead to the same object always."""

    def __init__(
        self,
        parts: Mapping[int, list[Holder]],
        names: frozenset[str] | None,
        is_written: Callable[[Holder, Any], bool],
    ) -> None:
        self.found: dict[int, Holder] = {}
        self._parts = parts
        self._names = names
        self._is_written = is_written
        self._seen: set[int] = set()

    def follow(self, roots: Sequence[int], *, is_pinned: bool) -> None:
        """Add what these objects lead to."""
        held: collections.deque[tuple[int, Reading | None]]
        held = collections.deque((root, None) for root in roots)
        # Followed last: an object is held fast if any other way leads to it.
        loose: collections.deque[tuple[int, Reading | None]] = collections.deque()
        while held or loose:
            is_loose = not held
            part, via = (held or loose).popleft()
            if part in self._seen:
                continue
            self._seen.add(part)
            for holder in self._parts.get(part, ()):
                # A guard asks of a set what it holds, never which set it is.
                is_any = is_loose or isinstance(holder.container, set)
                found = attrs.evolve(
                    holder,
                    readings=[r for r in holder.readings if _can_name(r, self._names)],
                    via=via,
                    is_pinned=is_pinned,
                    is_loose=is_any and not holder.is_namespace,
                )
                self.found.setdefault(id(holder.container), found)
                for reading in found.readings:
                    queue = loose if self._may_be_replaced(found, reading) else held
                    queue.append((id(reading.value), reading))

    def _may_be_replaced(self, holder: Holder, reading: Reading) -> bool:
        is_loose = holder.is_loose or self._is_written(holder, reading.key)
        return is_loose and is_replaceable(reading.value)


def _can_name(reading: Reading, names: frozenset[str] | None) -> bool:
    return reading.attribute is None or is_named(reading.attribute, names)
