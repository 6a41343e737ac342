"""One call taken apart: which tensors, values and objects it was given, and where each stands."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Protocol

import attrs
import torch

from torchbay._reason import CannotServe
from torchbay._source import Names
from torchbay._structure import Container, is_plain, take_apart
from torchbay._torch_compat import is_fake
from torchbay.errors import InvalidArgument

__all__ = ["Call", "Item", "Place", "is_usable", "refuse_unusable"]

_DEEPEST = 64


class Place(Protocol):
    """Where the program has a value from, and the value."""

    @property
    def path(self) -> str:
        """How a user would write it."""

    @property
    def value(self) -> Any:
        """The value."""


@attrs.frozen(eq=False)
class Item:
    """Something a call was given.

    Attributes:
        path: How a user would write it: ``mask``, ``batch['ids']``.
        access: How emitted code reaches it: ``args[0]['ids']``.
        value: The tensor, plain value, container or opaque object.
    """

    path: str
    access: str
    value: Any


@attrs.frozen(eq=False)
class Call:
    """What a callable was called with.

    Containers come before what they hold; ``rebuild`` is an expression over ``leaves`` and
    ``numbers`` that makes ``(args, kwargs)`` anew around other tensors and other numbers.
    ``numbers`` are those of the values that are an int or a float.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    containers: tuple[tuple[Item, Container], ...]
    tensors: tuple[Item, ...]
    values: tuple[Item, ...]
    objects: tuple[Item, ...]
    sets: tuple[Item, ...]
    numbers: tuple[Item, ...]
    rebuild: str
    names: Names

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call:
        """Take a call apart.

        Raises:
            CannotServe: An argument holds itself, or is nested too deeply.
        """
        reader = _Reader()
        labels = _parameter_names(function, len(args))
        positional = [
            reader.read(Item(label, f"args[{i}]", value), 0)
            for i, (label, value) in enumerate(zip(labels, args, strict=True))
        ]
        named = [
            (name, reader.read(Item(name, f"kwargs[{name!r}]", value), 0))
            for name, value in kwargs.items()
        ]
        keywords = ", ".join(f"{name!r}: {source}" for name, source in named)
        rebuild = f"(({''.join(source + ', ' for source in positional)}), {{{keywords}}})"
        return cls(
            function,
            args,
            kwargs,
            tuple(reader.containers),
            tuple(reader.tensors),
            tuple(reader.values),
            tuple(reader.objects),
            tuple(reader.sets),
            tuple(reader.numbers),
            rebuild,
            reader.names,
        )

    @property
    def holders(self) -> list[Item]:
        """Return the containers and sets among the arguments, in order."""
        return [*(item for item, _ in self.containers), *self.sets]

    def around(
        self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with other tensors, and other numbers at some paths."""
        others = [numbers.get(item.path, item.value) for item in self.numbers]
        variables = {**self.names.values, "leaves": tensors, "numbers": others}
        args, kwargs = eval(self.rebuild, variables)  # noqa: S307 - our own source
        return args, kwargs


class _Reader:
    """Walks arguments depth first."""

    def __init__(self) -> None:
        self.containers: list[tuple[Item, Container]] = []
        self.tensors: list[Item] = []
        self.values: list[Item] = []
        self.objects: list[Item] = []
        self.sets: list[Item] = []
        self.numbers: list[Item] = []
        self.names = Names("leaves", "numbers", "args", "kwargs", "inputs", "match", "are_alike")
        self._places: dict[int, int] = {}
        self._made: dict[int, str] = {}

    def read(self, item: Item, depth: int) -> str:
        """File an item and what it holds; return the expression that rebuilds it."""
        value = item.value
        if depth > _DEEPEST:
            raise CannotServe(f"argument {item.path} holds itself or is nested too deeply")
        if (source := self._single(item)) is not None:
            return source
        if type(value) is functools.partial:
            return self._partial(item, depth)
        if (container := take_apart(value)) is not None:
            return self._container(item, container, depth)
        if isinstance(value, (dict, list, tuple, set)) and not is_plain(value):
            kind = type(value).__qualname__
            raise CannotServe(f"what argument {item.path}, a {kind}, holds cannot be watched")
        (self.values if is_plain(value) else self.objects).append(item)
        return self.names.of(value, item.path)

    def _single(self, item: Item) -> str | None:
        """File a tensor, a number, a set of plain values or a method; None for anything else."""
        value = item.value
        if isinstance(value, torch.Tensor):
            # One tensor passed twice is one leaf; the second place is another name for it.
            place = self._places.setdefault(id(value), len(self._places))
            self.tensors.append(item)
            return f"leaves[{place}]"
        if type(value) is set and is_plain(frozen := frozenset(value)):
            self.sets.append(item)
            self.values.append(Item(item.path, f"type({item.access})", set))
            self.values.append(Item(item.path, f"frozenset({item.access})", frozen))
            return f"set({self.names.of(frozen, item.path)})"
        if type(value) in (int, float):
            self.values.append(item)
            self.numbers.append(item)
            return f"numbers[{len(self.numbers) - 1}]"
        if isinstance(value, MethodType):
            # Made anew whenever it is looked up; what it binds is not.
            for part in ("__self__", "__func__"):
                access = f"getattr({item.access}, {part!r}, None)"
                self.objects.append(Item(f"{item.path}.{part}", access, getattr(value, part)))
            return self.names.of(value, item.path)
        return None

    def _partial(self, item: Item, depth: int) -> str:
        """File what a partial function calls and passes: often made anew for every call."""
        self.values.append(Item(item.path, f"type({item.access})", functools.partial))
        for part in ("func", "args", "keywords"):
            place = Item(f"{item.path}.{part}", f"{item.access}.{part}", getattr(item.value, part))
            self.read(place, depth + 1)
        return self.names.of(item.value, item.path)

    def _container(self, item: Item, container: Container, depth: int) -> str:
        value = item.value
        self.containers.append((item, container))
        is_again = id(value) in self._made
        if isinstance(value, collections.defaultdict):
            # What it makes of a missing key.
            path, access = f"{item.path}.default_factory", f"{item.access}.default_factory"
            self.read(Item(path, access, value.default_factory), depth + 1)
        places = (
            Item(item.path + label, container.access(item.access, i, self.names), child)
            for i, (label, child) in enumerate(container)
        )
        children = [self.read(place, depth + 1) for place in places]
        if is_again:
            return self._made[id(value)]
        source = container.build(children, self.names)
        if not isinstance(value, (list, dict)):
            return source
        # One list passed twice is one list to the program.
        self._made[id(value)] = name = self.names.fresh("held")
        return f"({name} := {source})"


def _parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return a name for each positional argument, as the function's author wrote it."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    names += [f"args[{i}]" for i in range(len(names), count)]
    return names[:count]


def refuse_unusable(path: str, tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor no graph can be captured with, before anything runs.

    Raises:
        InvalidArgument: It has no data (meta, fake) or a layout no backend takes.
    """
    if (found := _unusable(tensor)) is not None:
        problem, remedy = found
        raise InvalidArgument(f"{path} {problem}", account=where, remedy=remedy)


def is_usable(tensor: torch.Tensor) -> bool:
    """Whether a graph can be captured with a tensor."""
    return _unusable(tensor) is None


def _unusable(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return what is the matter with a tensor, and what to do about it."""
    if is_fake(tensor):
        return "is a fake tensor", "Call with a real tensor"
    if tensor.is_meta:
        return (
            "is on the meta device and holds no data",
            "Materialize it first, e.g. with module.to_empty(device=...) and a state_dict",
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        remedy = "Convert it with .to_dense() or .to_padded_tensor(), or call the original"
        return f"has layout {layout}", remedy
    if tensor.is_quantized:
        return "is quantized", "Dequantize it, or call the original"
    return None
