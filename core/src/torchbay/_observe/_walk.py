"""How each kind of object is walked: which containers it is made of, and what they hold."""

from __future__ import annotations

import collections
import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import torch

from torchbay._observe._state import (
    LARGEST,
    attributes_of,
    is_own,
    is_users_class,
    is_watchable,
    may_change,
    slots_of,
    wraps_another,
)
from torchbay._source import is_user_file
from torchbay._structure import is_plain, shown_key
from torchbay._torch_optim import global_optimizer_hooks

if TYPE_CHECKING:
    from torchbay._observe._reach import Holder, Reach

__all__ = ["walker_of"]


def _walk_module(reach: Reach, path: str, module: torch.nn.Module) -> None:
    attributes = module.__dict__
    for name in ("_parameters", "_buffers", "_modules"):
        _walk_registry(reach, path, module, name)
    for name in _HOOKS:
        suffix = f"{{}}.__dict__[{name!r}]"
        _walk_items(reach, reach.hold(f"{path}.{name}", attributes[name], module, suffix=suffix))
    holder = reach.hold(path, attributes, module, suffix="{}.__dict__")
    for name, value in list(attributes.items()):
        if name not in _MODULE_INTERNALS:
            reach.read(holder, f"{path}.{name}", name, value, name)
    _walk_class(reach, type(module), module)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _walk_registry(reach: Reach, path: str, module: torch.nn.Module, registry: str) -> None:
    entries = module.__dict__[registry]
    holder = reach.hold(path, entries, module, suffix=f"{{}}.__dict__[{registry!r}]")
    for name, value in list(entries.items()):
        # A tensor or a submodule may be reached by iterating, without its name.
        reach.read(holder, f"{path}.{name}", name, value, name if value is None else None)


def _walk_object(reach: Reach, path: str, value: Any) -> None:
    attributes = attributes_of(value)
    holder = reach.hold(path, attributes, value, suffix="{}.__dict__")
    # Python's own code names the one attribute of these.
    is_named_elsewhere = isinstance(value, _NAMED_ELSEWHERE)
    for name, attribute in list(attributes.items()):
        needed = None if is_named_elsewhere else name
        reach.read(holder, f"{path}.{name}", name, attribute, needed)
    _walk_class(reach, type(value), value)


def _walk_optimizer(reach: Reach, path: str, optimizer: torch.optim.Optimizer) -> None:
    _walk_object(reach, path, optimizer)
    reach.add_root("torch.optim.optimizer", global_optimizer_hooks())


_NAMED_ELSEWHERE = (collections.ChainMap, collections.UserDict, collections.UserList)


def _walk_class(reach: Reach, kind: type, value: Any) -> None:
    """Note the attributes of a user's class, as part of an object of it."""
    for base in kind.__mro__:
        if is_users_class(base):
            namespace = reach.namespace_of(base)
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


def _walk_items(reach: Reach, holder: Holder) -> None:
    container = holder.container
    is_mapping = isinstance(container, Mapping)
    items = container.items() if is_mapping else enumerate(container)
    for key, item in list(items):
        reach.read(holder, f"{holder.path}[{shown_key(key)}]", key, item, None)


def _walk_container(reach: Reach, path: str, value: Any) -> None:
    _walk_items(reach, reach.hold(path, value, value))


def _walk_function(reach: Reach, path: str, function: FunctionType) -> None:
    for index, cell in enumerate(function.__closure__ or ()):
        _walk_cell(reach, function, index, cell)
    holder = reach.hold(function.__name__, function, function, is_whole=False)
    for name in ("__defaults__", "__kwdefaults__"):
        if (defaults := getattr(function, name)) is not None:
            reach.read(holder, f"{path}.{name}", name, defaults, None)
    if is_own(function) or vars(function):
        _walk_items(reach, reach.hold(path, vars(function), function, suffix="{}.__dict__"))
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
    _hold_parts(
        reach,
        path,
        wrapper,
        "({0}.__dict__['__wrapped__'],)",
        attributes_of(wrapper)["__wrapped__"],
    )


def _hold_parts(reach: Reach, path: str, whole: Any, suffix: str, *parts: Any) -> None:
    """Note objects that another one cannot be without."""
    holder = reach.hold(path, parts, whole, suffix=suffix)
    for index, part in enumerate(parts):
        reach.read(holder, path, index, part, None)


def _walk_reference(reach: Reach, path: str, reference: Any) -> None:
    if type(reference) is weakref.ReferenceType and (value := reference()) is not None:
        reach.add_weak_root(f"{path}()", value)


def _walk_getter(reach: Reach, path: str, getter: Any) -> None:
    del path
    reach.names.update(name for part in getter.__reduce__()[1] for name in part.split("."))


def _walk_set(reach: Reach, path: str, value: set[Any]) -> None:
    reach.hold(path, value, value, is_whole=False)


def _walk_python_module(reach: Reach, path: str, module: ModuleType) -> None:
    holder = reach.hold(path, module.__dict__, module, is_whole=False, suffix="{}.__dict__")
    for name, value in list(vars(module).items()):
        if not name.startswith("__") and may_change(value, is_library=False):
            reach.read(holder, f"{module.__name__}.{name}", name, value, name)


_MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def walker_of(value: Any) -> Callable[[Reach, str, Any], None] | None:
    """Return what walks an object, or None for one that holds nothing to be found."""
    if isinstance(value, torch.Tensor) or (is_plain(value) and not isinstance(value, type)):
        return None
    if isinstance(value, (list, tuple, dict)) and len(value) > LARGEST:
        return None
    for kind, walk in _WALKERS.items():
        if isinstance(value, kind):
            return walk
    if isinstance(value, (type, ModuleType)):
        walk_definition = _walk_python_module if isinstance(value, ModuleType) else _walk_own_class
        return walk_definition if is_own(value) else None
    if wraps_another(value):
        return _walk_wrapper
    if slots_of(value):
        return _walk_slots
    return _walk_object if is_watchable(value) else None


def _walk_slots(reach: Reach, path: str, value: Any) -> None:
    holder = reach.hold(path, value, value, is_whole=False)
    for name in slots_of(value):
        if hasattr(value, name):
            reach.read(holder, f"{path}.{name}", name, getattr(value, name), name)
    _walk_class(reach, type(value), value)


def _walk_own_class(reach: Reach, path: str, kind: type) -> None:
    del path
    _walk_class(reach, kind, kind)


_WALKERS: dict[type, Callable[[Reach, str, Any], None]] = {
    torch.nn.Module: _walk_module,
    torch.optim.Optimizer: _walk_optimizer,
    dict: _walk_container,
    MappingProxyType: _walk_container,
    list: _walk_container,
    tuple: _walk_container,
    set: _walk_set,
    FunctionType: _walk_function,
    MethodType: _walk_method,
    BuiltinFunctionType: _walk_builtin,
    functools.partial: _walk_partial,
    operator.attrgetter: _walk_getter,
    weakref.ReferenceType: _walk_reference,
}


def _nested(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(deeper for part in inner for deeper in _nested(part))]
