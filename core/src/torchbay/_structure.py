"""Arguments and results as trees: what holds what, how to test it, how to build it again.

A tree's inner nodes are containers, its leaves tensors, plain values (compared by type and value)
and opaque objects (compared by identity). Trees print themselves as Python expressions; what runs
on every call is made of those.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import operator
import pathlib
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from types import BuiltinFunctionType, ModuleType
from typing import Any

import attrs
import torch

from torchbay._source import Names
from torchbay._torch_compat import pytree_node

__all__ = [
    "Container",
    "Form",
    "instance_of",
    "is_plain",
    "is_plain_object",
    "key_source",
    "keys_test",
    "same_keys",
    "same_value",
    "shown_key",
    "take_apart",
    "value_test",
]

_BY_IDENTITY = (
    type(None),
    bool,
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    BuiltinFunctionType,
    type,
)
_BY_EQUALITY = (
    int,
    str,
    bytes,
    range,
    torch.device,
    torch.Size,
    dt.date,
    dt.datetime,
    dt.time,
    dt.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePosixPath,
    pathlib.PosixPath,
    uuid.UUID,
)
_PLAIN = frozenset({*_BY_IDENTITY, *_BY_EQUALITY, float, complex})
_DEEPEST = 64


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is compared by type and value wherever it stands."""
    kind = type(value)
    if isinstance(value, (tuple, frozenset)) and kind in (tuple, frozenset):
        return depth < _DEEPEST and all(is_plain(item, depth + 1) for item in value)
    if isinstance(value, slice):
        return all(map(is_plain, (value.start, value.stop, value.step)))
    if isinstance(value, enum.Enum):
        return True
    if isinstance(value, BuiltinFunctionType):
        # Bound to an object, it is a way to that object.
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    if isinstance(value, (int, float, str)):
        # Of a subclass, as long as it adds nothing.
        return not getattr(value, "__dict__", None)
    return kind in _PLAIN or isinstance(value, type) or _is_numpy_scalar(value)


def _is_numpy_scalar(value: object) -> bool:
    # NumPy is not imported for it: where it is absent, so are its scalars.
    kind = type(value)
    return kind.__module__ == "numpy" and hasattr(kind, "dtype") and kind.__name__ != "ndarray"


def same_value(left: object, right: object) -> bool:
    """Compare plain values as a program can: 1, 1.0 and True differ, so do 0.0 and -0.0."""
    if type(left) is not type(right):
        return False
    for kinds, same in _SAME:
        if isinstance(left, kinds):
            return bool(same(left, right))
    return _is_numpy_scalar(left) and same_value(left.item(), right.item())  # type: ignore[attr-defined]


def _same_float(left: float, right: float) -> bool:
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return float(left) == float(right) and math.copysign(1, left) == math.copysign(1, right)


def _same_complex(left: complex, right: complex) -> bool:
    return _same_float(left.real, right.real) and _same_float(left.imag, right.imag)


def _same_items(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(same_value, left, right))


def _same_slice(left: slice, right: slice) -> bool:
    return _same_items((left.start, left.stop, left.step), (right.start, right.stop, right.step))


def _same_set(left: frozenset[Any], right: frozenset[Any]) -> bool:
    return left == right and {(type(i), i) for i in left} == {(type(i), i) for i in right}


# The first that fits. Not ``==`` for numbers and text: a subclass may define it as it likes.
_SAME: tuple[tuple[Any, Callable[[Any, Any], bool]], ...] = (
    ((enum.Enum, *_BY_IDENTITY), operator.is_),
    (float, _same_float),
    (complex, _same_complex),
    (int, int.__eq__),
    (str, str.__eq__),
    (_BY_EQUALITY, operator.eq),
    ((tuple, list), _same_items),
    (slice, _same_slice),
    (frozenset, _same_set),
)


def value_test(access: str, value: object, names: Names) -> str:
    """Return an expression that is true when ``access`` is this plain value."""
    kind = type(value)
    if value is None or value is True or value is False or value is ...:
        return f"{access} is {value!r}"
    if kind in (int, str, bytes):
        return f"(type({access}) is {kind.__name__} and {access} == {value!r})"
    if kind is float and math.isfinite(value) and value != 0:  # type: ignore[arg-type]
        return f"(type({access}) is float and {access} == {value!r})"
    if kind in _BY_IDENTITY or isinstance(value, (enum.Enum, type)):
        return f"{access} is {names.of(value, getattr(value, '__name__', str(value)))}"
    return f"{names.of(same_value, 'same_value')}({access}, {names.of(value, kind.__name__)})"


def keys_test(access: str, keys: tuple[Any, ...], names: Names) -> str:
    """Return an expression that is true when a mapping has these plain keys, in this order."""
    if all(type(key) is str for key in keys):
        return f"[*{access}] == {list(keys)!r}"
    # 1, 1.0 and True are one key to a dict, and three to a program that iterates over it.
    return f"{names.of(same_value, 'same_value')}((*{access},), {names.of(keys, 'keys')})"


@attrs.frozen
class Form:
    """What two containers have in common whatever they hold: class, and size or keys."""

    kind: type
    size: int
    keys: tuple[Any, ...] | None = None

    def test(self, access: str, names: Names) -> str:
        """Return an expression that is true when ``access`` is a container of this form."""
        is_builtin = self.kind in (tuple, list, dict)
        name = self.kind.__name__ if is_builtin else names.of(self.kind, self.kind.__name__)
        is_kind = f"type({access}) is {name}"
        if issubclass(self.kind, dict):
            return f"{is_kind} and {keys_test(access, self.keys or (), names)}"
        if issubclass(self.kind, (tuple, list)):
            return f"{is_kind} and len({access}) == {self.size}"
        return f"{is_kind} and [*{access}.__dict__] == {list(self.keys or ())!r}"

    def is_same(self, other: Form) -> bool:
        """Whether a container of the other form would pass the test."""
        mine, theirs = (self.size, self.keys), (other.size, other.keys)
        return self.kind is other.kind and same_value(mine, theirs)

    def __str__(self) -> str:
        kind = self.kind.__qualname__
        return (
            f"{kind} of length {self.size}"
            if self.keys is None
            else f"{kind} with {list(self.keys)}"
        )


@attrs.frozen
class Container:
    """A container taken apart.

    Attributes:
        value: The container itself.
        labels: How a user writes each child, after the container's own path: ``[0]``, ``.mask``.
        children: What it holds, in order.
        keys: What else must be equal: the keys of a mapping, the names of attributes.
    """

    value: Any
    labels: tuple[str, ...]
    children: tuple[Any, ...]
    keys: Any = None

    @property
    def form(self) -> Form:
        """What must be equal for a container to stand in its place; holds nothing of it."""
        return Form(type(self.value), len(self.children), self.keys)

    def access(self, access: str, index: int, names: Names) -> str:
        """Return an expression for one child of the container that ``access`` stands for."""
        if isinstance(self.value, dict):
            return f"{access}[{key_source(self.keys[index], names)}]"
        if isinstance(self.value, (tuple, list)):
            return f"{access}[{index}]"
        return f"{access}.{self.keys[index]}"

    def build(self, children: Sequence[str], names: Names) -> str:
        """Return an expression that makes such a container out of these expressions."""
        kind = type(self.value)
        if kind is list:
            return f"[{', '.join(children)}]"
        if kind is tuple:
            return f"({', '.join(children)}{',' if len(children) == 1 else ''})"
        if kind is dict:
            return self._mapping(children, names)
        name = names.of(kind, kind.__name__)
        if kind is collections.OrderedDict:
            return f"{name}({self._mapping(children, names)})"
        if kind is collections.defaultdict:
            factory = names.of(self.value.default_factory, "default_factory")
            return f"{name}({factory}, {self._mapping(children, names)})"
        if (node := pytree_node(kind)) is not None and isinstance(self.value, dict):
            _, context = node.flatten_fn(self.value)
            unflatten = names.of(node.unflatten_fn, f"make_{kind.__name__}")
            return f"{unflatten}([{', '.join(children)}], {names.of(context, 'layout')})"
        if hasattr(kind, "_make"):
            return f"{name}({', '.join(children)})"
        if isinstance(self.value, tuple):
            return f"{name}(({', '.join(children)},))"
        make = names.of(instance_of, "instance_of")
        fields = ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, children, strict=True))
        return f"{make}({name}, {{{fields}}})"

    def _mapping(self, children: Sequence[str], names: Names) -> str:
        pairs = zip(self.keys, children, strict=True)
        return "{" + ", ".join(f"{key_source(key, names)}: {child}" for key, child in pairs) + "}"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(zip(self.labels, self.children, strict=True))


def key_source(key: object, names: Names) -> str:
    """Return an expression for a key of a mapping; a key that is an object is not kept alive."""
    if type(key) in (str, int, bool):
        return repr(key)
    if is_plain(key):
        return names.of(key, f"key_{key}")
    hint = f"key_{type(key).__name__}"
    try:
        return f"{names.of(weakref.ref(key), hint)}()"
    except TypeError:
        return names.of(key, hint)


def shown_key(key: object) -> str:
    """Return a key of a mapping as a user would write it; of an object, which one it is."""
    return repr(key) if is_plain(key) else f"{type(key).__qualname__} at {id(key):#x}"


def same_keys(first: Iterable[object], second: Iterable[object]) -> bool:
    """Whether there are the same keys in the same order; objects are not asked what they equal."""
    pairs = zip_longest(first, second, fillvalue=_MISSING)
    return all(one is other or (is_plain(one) and one == other) for one, other in pairs)


_MISSING = object()


def instance_of(kind: type, attributes: dict[str, Any]) -> Any:
    """Make an object of a plain class with these attributes, without running its ``__init__``."""
    made: Any = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def take_apart(value: Any, *, fresh: bool = False) -> Container | None:
    """Return what a container holds, or None for a leaf.

    Args:
        value: Any object.
        fresh: Also take plain objects apart by their attributes. Only right for objects that
            nobody else knows yet: a copy of them is then as good as the original.
    """
    kind = type(value)
    if isinstance(value, torch.Size) or is_plain(value):
        return None
    if isinstance(value, (list, tuple)) and _is_known_sequence(kind):
        labels = getattr(kind, "_fields", None)
        dotted = [f".{n}" for n in labels] if labels else [f"[{i}]" for i in range(len(value))]
        return Container(value, tuple(dotted), tuple(value))
    if isinstance(value, dict) and _is_known_mapping(kind) and all(map(is_plain, value)):
        return Container(
            value, tuple(f"[{key!r}]" for key in value), tuple(value.values()), tuple(value)
        )
    if _is_record(value) or (fresh and is_plain_object(value)):
        attributes = vars(value)
        return Container(
            value,
            tuple(f".{name}" for name in attributes),
            tuple(attributes.values()),
            tuple(attributes),
        )
    return None


def _is_known_sequence(kind: type) -> bool:
    return (
        kind in (list, tuple)
        or (issubclass(kind, tuple) and hasattr(kind, "_make") and hasattr(kind, "_fields"))
        or kind.__module__ == "torch.return_types"
    )


def _is_known_mapping(kind: type) -> bool:
    return (
        kind in (dict, collections.OrderedDict, collections.defaultdict)
        or pytree_node(kind) is not None
    )


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and is_plain_object(value)


def is_plain_object(value: object) -> bool:
    """Whether an object is nothing but its class and its ``__dict__``."""
    kind = type(value)
    return (
        kind.__basicsize__ <= _Plain.__basicsize__
        and kind.__flags__ & _HEAP_TYPE != 0
        and hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, type, BaseException, *_SYMBOLS))
    )


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Plain:
    """The smallest class with a ``__dict__``, to compare others with."""


_HEAP_TYPE = 1 << 9


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors a result holds, in containers and plain objects alike."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and (container := take_apart(value, fresh=True)) is not None:
        for child in container.children:
            yield from tensors_in(child, depth + 1)
