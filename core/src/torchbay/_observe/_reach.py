"""What a call can read besides its arguments: modules, objects, classes, closures and globals.

The walk starts at the callable and at its opaque arguments and follows attributes, elements and
closures. It finds *holders*, the dicts, lists, tuples and cells that programs keep values in, and
in each the *readings*: this holder holds this value under this key. A reading is what a guard
checks, what a snapshot compares and, when its value is a tensor, what becomes an input of the graph.
"""

from __future__ import annotations

import argparse
import array
import collections
import functools
import io
import queue
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import attrs
import torch

from torchbay._call import Call
from torchbay._source import is_library_file, is_user_file
from torchbay._structure import is_plain
from torchbay._torch_compat import global_module_hooks

__all__ = ["Holder", "Reach", "Reading", "is_unwatchable"]

_LARGEST = 4096


@attrs.frozen(eq=False)
class Reading:
    """A value somebody could read.

    Attributes:
        path: How a user would write it: ``self.layers.0.training``.
        holder: What holds it: a dict, list, tuple, cell, function or the namespace of a class.
        holder_path: How a user would write the holder.
        key: The value's key or index in it; None for a cell.
        value: The value.
        attribute: The name code must mention to read it, or None when no name is needed.
    """

    path: str
    holder: Any
    holder_path: str
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
        self._kept_alive: list[Any] = []

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
        reach._follow_pending()
        return reach

    def add_globals(self, codes: Mapping[CodeType, dict[str, Any]]) -> list[Reading]:
        """Add what code can read of its module's globals; return what was not known yet."""
        names = [(code, name) for code in codes for name in dict.fromkeys(code.co_names)]
        found = [self._read_global(codes[code], name) for code, name in names]
        return [reading for reading in found if reading is not None]

    def complete(self) -> None:
        """Follow what `add_globals` found."""
        self._follow_pending()

    def tensors(self) -> Iterator[Reading]:
        """Yield the readings whose value is a tensor."""
        for holder in self.holders.values():
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

    def read(self, holder: Holder, path: str, key: Any, value: Any, name: str | None) -> Reading:
        """Note a reading, to be followed."""
        reading = Reading(path, holder.container, holder.path, key, value, name)
        holder.readings.append(reading)
        self._pending.append((path, value))
        return reading

    def _root(self, path: str, value: Any) -> None:
        self._roots.append(id(value))
        self._pending.append((path, value))

    def _follow_pending(self) -> None:
        # A list of what is left, not recursion: users' objects may be chained without end.
        seen = {id(value) for value in self._kept_alive}
        while self._pending:
            path, value = self._pending.popleft()
            if id(value) not in seen and (walk := _walker_of(value)) is not None:
                seen.add(id(value))
                self._kept_alive.append(value)
                walk(self, path, value)

    def _read_global(self, variables: dict[str, Any], name: str) -> Reading | None:
        if name not in variables:
            return None
        module = variables.get("__name__", "globals")
        holder = self.hold(module, variables, variables, is_whole=False)
        self._roots.append(id(variables))
        is_known = any(reading.key == name for reading in holder.readings)
        is_library = is_library_file(variables.get("__file__") or "")
        if is_known or not _may_change(variables[name], is_library=is_library):
            return None
        return self.read(holder, f"{module}.{name}", name, variables[name], name)


def _can_name(reading: Reading, names: frozenset[str] | None) -> bool:
    return names is None or reading.attribute is None or reading.attribute in names


def _walk_module(reach: Reach, path: str, module: torch.nn.Module) -> None:
    attributes = module.__dict__
    for name in ("_parameters", "_buffers", "_modules"):
        _walk_registry(reach, path, module, name)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        suffix = f"{{}}.__dict__[{name!r}]"
        _walk_items(reach, reach.hold(f"{path}.{name}", attributes[name], module, suffix=suffix))
    holder = reach.hold(path, attributes, module, suffix="{}.__dict__")
    for name, value in list(attributes.items()):
        if name not in _MODULE_INTERNALS:
            reach.read(holder, f"{path}.{name}", name, value, name)
    _walk_class(reach, type(module), module)


def _walk_registry(reach: Reach, path: str, module: torch.nn.Module, registry: str) -> None:
    entries = module.__dict__[registry]
    holder = reach.hold(path, entries, module, suffix=f"{{}}.__dict__[{registry!r}]")
    for name, value in list(entries.items()):
        # A tensor or a submodule may be reached by iterating, without its name.
        reach.read(holder, f"{path}.{name}", name, value, name if value is None else None)


def _walk_object(reach: Reach, path: str, value: Any) -> None:
    attributes = vars(value)
    holder = reach.hold(path, attributes, value, suffix="{}.__dict__")
    # Python's own code names the one attribute of these.
    is_named_elsewhere = isinstance(value, (collections.UserDict, collections.UserList))
    for name, attribute in list(attributes.items()):
        needed = None if is_named_elsewhere else name
        reach.read(holder, f"{path}.{name}", name, attribute, needed)
    _walk_class(reach, type(value), value)


def _walk_class(reach: Reach, kind: type, value: Any) -> None:
    """Note the attributes of a user's class, as part of an object of it."""
    for base in kind.__mro__:
        if _is_users_class(base):
            namespace = _namespace(base)
            is_new = id(namespace) not in reach.holders
            path = base.__qualname__
            holder = reach.hold(path, namespace, base, is_whole=False, suffix="{}.__dict__")
            reach.hold(path, namespace, value)
            if is_new:
                _read_class(reach, base, holder)


def _read_class(reach: Reach, kind: type, holder: Holder) -> None:
    for name, value in list(vars(kind).items()):
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, FunctionType):
            reach.add_globals(dict.fromkeys(_nested(function.__code__), function.__globals__))
        if not name.startswith("__") and not isinstance(
            value, (property, classmethod, staticmethod)
        ):
            reach.read(holder, f"{kind.__qualname__}.{name}", name, value, name)


@functools.cache
def _namespace(kind: type) -> MappingProxyType[str, Any]:
    """Return a class's namespace, the same object every time."""
    return kind.__dict__


def _walk_items(reach: Reach, holder: Holder) -> None:
    container = holder.container
    is_mapping = isinstance(container, Mapping)
    items = container.items() if is_mapping else enumerate(container)
    for key, item in list(items):
        reach.read(holder, f"{holder.path}[{key!r}]", key, item, None)


def _walk_container(reach: Reach, path: str, value: Any) -> None:
    _walk_items(reach, reach.hold(path, value, value))


def _walk_function(reach: Reach, path: str, function: FunctionType) -> None:
    for index, cell in enumerate(function.__closure__ or ()):
        _walk_cell(reach, function, index, cell)
    holder = reach.hold(function.__name__, function, function, is_whole=False)
    for name in ("__defaults__", "__kwdefaults__"):
        if (defaults := getattr(function, name)) is not None:
            reach.read(holder, f"{path}.{name}", name, defaults, None)
    if attributes := vars(function):
        _walk_items(reach, reach.hold(path, attributes, function, suffix="{}.__dict__"))
    if is_user_file(function.__code__.co_filename):
        reach.add_globals(dict.fromkeys(_nested(function.__code__), function.__globals__))


def _walk_cell(reach: Reach, function: FunctionType, index: int, cell: CellType) -> None:
    try:
        value = cell.cell_contents
    except ValueError:
        return
    name = function.__code__.co_freevars[index]
    suffix = f"{{}}.__closure__[{index}]"
    holder = reach.hold(f"{function.__name__}_{name}", cell, function, suffix=suffix)
    reach.read(holder, name, None, value, None)


def _walk_method(reach: Reach, path: str, method: MethodType) -> None:
    _hold_parts(
        reach, path, method, "({0}.__self__, {0}.__func__)", method.__self__, method.__func__
    )


def _walk_builtin(reach: Reach, path: str, method: BuiltinFunctionType) -> None:
    _hold_parts(reach, path, method, "({0}.__self__,)", method.__self__)


def _walk_partial(reach: Reach, path: str, partial: functools.partial[Any]) -> None:
    _hold_parts(reach, path, partial, "({0}.func,)", partial.func)
    _walk_items(reach, reach.hold(f"{path}.args", partial.args, partial, suffix="{}.args"))
    keywords = reach.hold(f"{path}.keywords", partial.keywords, partial, suffix="{}.keywords")
    _walk_items(reach, keywords)


def _walk_wrapper(reach: Reach, path: str, wrapper: Any) -> None:
    _hold_parts(reach, path, wrapper, "({0}.__wrapped__,)", wrapper.__wrapped__)


def _hold_parts(reach: Reach, path: str, whole: Any, suffix: str, *parts: Any) -> None:
    """Note objects that another one cannot be without."""
    holder = reach.hold(path, parts, whole, suffix=suffix)
    for index, part in enumerate(parts):
        reach.read(holder, path, index, part, None)


def _walk_set(reach: Reach, path: str, value: set[Any]) -> None:
    reach.hold(path, value, value, is_whole=False)


def _walk_python_module(reach: Reach, path: str, module: ModuleType) -> None:
    holder = reach.hold(path, module.__dict__, module, is_whole=False, suffix="{}.__dict__")
    for name, value in list(vars(module).items()):
        if not name.startswith("__") and _may_change(value, is_library=False):
            reach.read(holder, f"{module.__name__}.{name}", name, value, name)


_MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def _may_change(value: Any, *, is_library: bool) -> bool:
    """Whether a global is state rather than a definition: nobody rebinds what a library defines."""
    if isinstance(value, functools.partial) or hasattr(value, "__wrapped__"):
        return not is_library
    if isinstance(value, BuiltinFunctionType):
        return not is_plain(value)
    if isinstance(value, (FunctionType, type, ModuleType)):
        return _is_own(value)
    is_scalar = is_plain(value)
    if is_library:
        return is_scalar or isinstance(value, (torch.Tensor, torch.nn.Module))
    is_container = isinstance(value, (list, tuple, dict, set)) and len(value) <= _LARGEST
    return is_scalar or is_container or isinstance(value, torch.Tensor) or _is_watchable(value)


def _is_own(definition: Any) -> bool:
    """Whether a function, class or module is the user's own rather than a library's."""
    if isinstance(definition, type):
        return _is_users_class(definition)
    if isinstance(definition, ModuleType) and definition.__spec__ is None:
        return True
    filename = (
        definition.__code__.co_filename
        if isinstance(definition, FunctionType)
        else getattr(definition, "__file__", None)
    )
    return filename is not None and is_user_file(filename) and not is_library_file(filename)


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    if filename is None:
        return kind.__module__ == "__main__"
    return is_user_file(filename) and not is_library_file(filename)


def _walker_of(value: Any) -> Callable[[Reach, str, Any], None] | None:
    if isinstance(value, torch.Tensor) or (is_plain(value) and not isinstance(value, type)):
        return None
    if isinstance(value, (list, tuple, dict)) and len(value) > _LARGEST:
        return None
    for kind, walk in _WALKERS.items():
        if isinstance(value, kind):
            return walk
    if isinstance(value, (type, ModuleType)):
        walk_definition = _walk_python_module if isinstance(value, ModuleType) else _walk_own_class
        return walk_definition if _is_own(value) else None
    if hasattr(value, "__wrapped__"):
        return _walk_wrapper
    return _walk_object if _is_watchable(value) else None


def _walk_own_class(reach: Reach, path: str, kind: type) -> None:
    del path
    _walk_class(reach, kind, kind)


_WALKERS: dict[type, Callable[[Reach, str, Any], None]] = {
    torch.nn.Module: _walk_module,
    dict: _walk_container,
    MappingProxyType: _walk_container,
    list: _walk_container,
    tuple: _walk_container,
    set: _walk_set,
    FunctionType: _walk_function,
    MethodType: _walk_method,
    BuiltinFunctionType: _walk_builtin,
    functools.partial: _walk_partial,
}

_PLAIN_HOLDERS = (SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)


def _is_watchable(value: Any) -> bool:
    """Whether an object is of a class outside torch and Python's own library, with a ``__dict__``."""
    if isinstance(value, _PLAIN_HOLDERS):
        return True
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)) or not hasattr(value, "__dict__"):
        return False
    root = type(value).__module__.partition(".")[0]
    is_library = root in _LIBRARIES and not isinstance(value, torch.nn.Module)
    return not is_library and isinstance(vars(value), dict)


_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "torchbay", "numpy"}
_UNWATCHABLE = (
    array.array,
    bytearray,
    collections.deque,
    io.IOBase,
    memoryview,
    queue.Queue,
    queue.SimpleQueue,
    random.Random,
    threading.Barrier,
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.local,
    weakref.WeakKeyDictionary,
    weakref.WeakSet,
    weakref.WeakValueDictionary,
)


def is_unwatchable(value: Any) -> bool:
    """Whether an object can change in a way that neither guard nor snapshot would see."""
    kind = type(value)
    return (
        isinstance(value, _UNWATCHABLE)
        or (kind.__module__, kind.__qualname__) == ("numpy", "ndarray")
        or (isinstance(value, (list, tuple, dict)) and len(value) > _LARGEST)
        or hasattr(kind, "__next__")
        or kind.__module__.startswith("numpy.random")
        or (isinstance(value, set) and not is_plain(frozenset(value)))
        or (_is_users_class(kind) and not hasattr(value, "__dict__"))
    )


def _nested(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(deeper for part in inner for deeper in _nested(part))]
