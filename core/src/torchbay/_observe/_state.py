"""Which objects hold state that a program may read and change, and which of it can be watched."""

from __future__ import annotations

import argparse
import array
import collections
import functools
import io
import operator
import queue
import random
import sys
import threading
import weakref
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from torchbay._source import is_library_file, is_user_file
from torchbay._structure import is_plain, is_plain_object

__all__ = [
    "LARGEST",
    "attributes_of",
    "has_attributes",
    "is_own",
    "is_replaceable",
    "is_unwatchable",
    "is_users_class",
    "is_watchable",
    "may_change",
    "slots_of",
    "wraps_another",
]

LARGEST = 4096
"""The most elements of a container that are watched one by one."""


def may_change(value: Any, *, is_library: bool) -> bool:
    """Whether a global is state rather than a definition: nobody rebinds what a library defines."""
    if isinstance(value, (functools.partial, operator.attrgetter)) or wraps_another(value):
        return not is_library
    if isinstance(value, BuiltinFunctionType):
        return not is_plain(value)
    if isinstance(value, (FunctionType, type, ModuleType)):
        return is_own(value)
    is_scalar = is_plain(value)
    if is_library:
        return is_scalar or isinstance(value, (torch.Tensor, torch.nn.Module))
    is_container = isinstance(value, (list, tuple, dict, set)) and len(value) <= LARGEST
    is_reference = isinstance(value, weakref.ReferenceType)
    is_state = is_container or is_reference or is_watchable(value) or is_unwatchable(value)
    return is_scalar or is_state or isinstance(value, torch.Tensor)


def attributes_of(value: Any) -> Any:
    """Return an object's ``__dict__``, or None; its class's own ways of lookup do not run."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def wraps_another(value: Any) -> bool:
    """Whether an object stands for another one, as `functools.wraps` leaves it."""
    return "__wrapped__" in (attributes_of(value) or ())


def is_own(definition: Any) -> bool:
    """Whether a function, class or module is the user's own rather than a library's."""
    if isinstance(definition, type):
        return is_users_class(definition)
    if isinstance(definition, ModuleType) and definition.__spec__ is None:
        return True
    filename = (
        definition.__code__.co_filename
        if isinstance(definition, FunctionType)
        else getattr(definition, "__file__", None)
    )
    return filename is not None and is_user_file(filename) and not is_library_file(filename)


def is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    if filename is None:
        return kind.__module__ == "__main__"
    return is_user_file(filename) and not is_library_file(filename)


_PLAIN_HOLDERS = (
    SimpleNamespace,
    argparse.Namespace,
    collections.ChainMap,
    collections.UserDict,
    collections.UserList,
)


def is_watchable(value: Any) -> bool:
    """Whether an object has a ``__dict__`` and its attributes are a program's state.

    That is so outside torch and Python's own library, and in torch for what trains.
    """
    if isinstance(value, _PLAIN_HOLDERS):
        return True
    attributes = attributes_of(value)
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)) or attributes is None:
        return False
    root = type(value).__module__.partition(".")[0]
    is_library = root in _LIBRARIES and not isinstance(value, _STATEFUL)
    return not is_library and isinstance(attributes, dict)


_STATEFUL = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "torchbay", "numpy"}
_UNWATCHABLE = (
    array.array,
    bytearray,
    collections.deque,
    io.IOBase,
    memoryview,
    operator.methodcaller,
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


def is_replaceable(value: Any) -> bool:
    """Whether an object is as good as another of its class that holds the same."""
    if isinstance(value, (list, dict, tuple)):
        return len(value) <= LARGEST and not is_plain(value)
    return is_users_class(type(value)) and is_plain_object(value)


def is_unwatchable(value: Any) -> bool:
    """Whether an object can change in a way that neither guard nor snapshot would see."""
    kind = type(value)
    return (
        isinstance(value, _UNWATCHABLE)
        or (kind.__module__, kind.__qualname__) == ("numpy", "ndarray")
        or (isinstance(value, (list, tuple, dict)) and len(value) > LARGEST)
        or hasattr(kind, "__next__")
        or kind.__module__.startswith("numpy.random")
        or (isinstance(value, set) and not is_plain(frozenset(value)))
        or (
            is_users_class(kind)
            and attributes_of(value) is None
            and kind.__base__ is not tuple
            and not slots_of(value)
        )
        or kind in weakref.ProxyTypes
        # Others than plain references make what they lead to anew.
        or (isinstance(value, weakref.ReferenceType) and kind is not weakref.ReferenceType)
    )


def has_attributes(container: Any) -> bool:
    """Whether what a container holds are its attributes: defaults of a function, or slots."""
    return isinstance(container, FunctionType) or bool(slots_of(container))


def slots_of(value: Any) -> tuple[str, ...]:
    """Return the attributes of an object of a user's class that has slots and nothing else."""
    kind = type(value)
    if kind.__base__ is not object or attributes_of(value) is not None or not is_users_class(kind):
        return ()
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    # A private name stands under another in the object.
    return () if any(name.startswith("__") for name in names) else names
