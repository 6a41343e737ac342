"""What a call can read besides its arguments: modules, objects, closures and globals.

The walk starts at the callable, at its opaque arguments and at the globals of the code that ran,
and follows attributes, elements and closures. It keeps *readings*: this container holds this value
under this key. A reading is what a guard checks, what a snapshot compares and, when its value is a
tensor, what becomes an input of the graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch

from torchbay._call import Call
from torchbay._source import is_library_file, is_user_file
from torchbay._structure import is_plain

__all__ = ["Reach", "Reading"]

_LARGEST = 4096


@attrs.frozen(eq=False)
class Reading:
    """A value somebody could read.

    Attributes:
        path: How a user would write it: ``self.layers.0.training``.
        holder: The dict, list, tuple or cell that holds the value.
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

    def now(self) -> Any:
        """Return what the holder holds now.

        Raises:
            LookupError, ValueError: It holds nothing there any more.
        """
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return self.holder[self.key]


class Reach:
    """Everything found so far, each object once."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.holders: dict[int, tuple[str, Any]] = {}
        self._seen: set[int] = set()
        self._globals: set[tuple[int, str]] = set()

    @classmethod
    def of(cls, call: Call) -> Reach:
        """Walk from a callable and its opaque arguments."""
        reach = cls()
        reach.walk("self", call.function)
        for item in call.objects:
            reach.walk(item.path, item.value)
        return reach

    def add_globals(self, variables: dict[str, Any], codes: Iterable[CodeType]) -> None:
        """Add what code that ran can read of its module's globals."""
        module = variables.get("__name__", "globals")
        is_library = is_library_file(variables.get("__file__") or "")
        for name in sorted({name for code in codes for name in code.co_names}):
            key = (id(variables), name)
            if name not in variables or key in self._globals:
                continue
            if _may_change(variables[name], is_library=is_library):
                self._globals.add(key)
                self.read(f"{module}.{name}", variables, module, name, variables[name], name)

    def tensors(self) -> Iterator[Reading]:
        """Return the readings whose value is a tensor."""
        return (reading for reading in self.readings if isinstance(reading.value, torch.Tensor))

    def named(self, names: frozenset[str]) -> list[Reading]:
        """Return the readings that code mentioning only these names can make."""
        return [
            reading
            for reading in self.readings
            if reading.attribute is None or reading.attribute in names
        ]

    def read(
        self, path: str, holder: Any, holder_path: str, key: Any, value: Any, attribute: str | None
    ) -> None:
        """Note a reading, and follow its value."""
        self.readings.append(Reading(path, holder, holder_path, key, value, attribute))
        self.walk(path, value)

    def walk(self, path: str, value: Any) -> None:
        """Note what an object holds, once."""
        if is_plain(value) or isinstance(value, torch.Tensor) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if (walk := _walker_of(value)) is not None:
            walk(self, path, value)

    def hold(self, path: str, holder: Any) -> None:
        """Note a container whose elements were read."""
        self._seen.add(id(holder))
        self.holders[id(holder)] = (path, holder)


def _walk_module(reach: Reach, path: str, module: torch.nn.Module) -> None:
    attributes = module.__dict__
    reach.hold(path, attributes)
    for name in ("_parameters", "_buffers", "_modules"):
        _walk_registry(reach, path, attributes[name])
    for name, value in list(attributes.items()):
        if name not in _MODULE_INTERNALS:
            reach.read(f"{path}.{name}", attributes, path, name, value, name)


def _walk_registry(reach: Reach, path: str, registry: dict[str, Any]) -> None:
    reach.hold(path, registry)
    for name, value in list(registry.items()):
        # A tensor or a submodule may be reached by iterating, without its name.
        attribute = name if value is None else None
        reach.read(f"{path}.{name}", registry, path, name, value, attribute)


def _walk_object(reach: Reach, path: str, value: Any) -> None:
    attributes = vars(value)
    reach.hold(path, attributes)
    for name, attribute in list(attributes.items()):
        reach.read(f"{path}.{name}", attributes, path, name, attribute, name)


def _walk_sequence(reach: Reach, path: str, value: list[Any] | tuple[Any, ...]) -> None:
    reach.hold(path, value)
    for index, item in enumerate(value):
        reach.read(f"{path}[{index}]", value, path, index, item, None)


def _walk_dict(reach: Reach, path: str, value: dict[Any, Any]) -> None:
    reach.hold(path, value)
    for key, item in list(value.items()):
        reach.read(f"{path}[{key!r}]", value, path, key, item, None)


def _walk_function(reach: Reach, path: str, function: FunctionType) -> None:
    if not is_user_file(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        _walk_cell(reach, path, name, cell)
    reach.walk(f"{path}.__defaults__", function.__defaults__)
    reach.walk(f"{path}.__kwdefaults__", function.__kwdefaults__)
    reach.add_globals(function.__globals__, _nested(function.__code__))


def _walk_cell(reach: Reach, path: str, name: str, cell: CellType) -> None:
    try:
        value = cell.cell_contents
    except ValueError:
        return
    reach.hold(path, cell)
    reach.read(name, cell, f"{path}_cell_{name}", None, value, None)


def _walk_method(reach: Reach, path: str, method: MethodType) -> None:
    reach.walk(path, method.__self__)
    reach.walk(path, method.__func__)


def _walk_partial(reach: Reach, path: str, partial: functools.partial[Any]) -> None:
    reach.walk(path, partial.func)
    _walk_sequence(reach, f"{path}.args", partial.args)
    _walk_dict(reach, f"{path}.keywords", partial.keywords)


_MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def _may_change(value: Any, *, is_library: bool) -> bool:
    """Whether a global is state rather than a definition: nobody rebinds what a library defines."""
    if isinstance(value, FunctionType):
        filename = value.__code__.co_filename
        return is_user_file(filename) and not is_library_file(filename)
    is_scalar = is_plain(value) and not isinstance(value, (type, BuiltinFunctionType))
    if is_library:
        return is_scalar or isinstance(value, (torch.Tensor, torch.nn.Module))
    is_container = isinstance(value, (list, tuple, dict)) and len(value) <= _LARGEST
    return is_scalar or is_container or isinstance(value, torch.Tensor) or _is_users(value)


def _walker_of(value: Any) -> Callable[[Reach, str, Any], None] | None:
    if isinstance(value, (list, tuple, dict)) and len(value) > _LARGEST:
        return None
    for kind, walk in _WALKERS.items():
        if isinstance(value, kind):
            return walk
    return _walk_object if _is_users(value) else None


_WALKERS: dict[type, Callable[[Reach, str, Any], None]] = {
    torch.nn.Module: _walk_module,
    dict: _walk_dict,
    list: _walk_sequence,
    tuple: _walk_sequence,
    FunctionType: _walk_function,
    MethodType: _walk_method,
    functools.partial: _walk_partial,
}


def _is_users(value: Any) -> bool:
    """Whether an object is of a class outside torch and Python's own library."""
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, torch.nn.Module):
        return True
    root = type(value).__module__.partition(".")[0]
    return root not in _LIBRARIES and isinstance(vars(value), dict)


_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "torchbay", "numpy"}


def _nested(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(deeper for part in inner for deeper in _nested(part))]
