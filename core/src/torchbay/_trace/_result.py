"""What a call returns, as an expression over the graph's outputs and inputs."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from torchbay._call import Call
from torchbay._reason import CannotServe
from torchbay._source import Names
from torchbay._structure import is_plain, same_value, take_apart
from torchbay._torch_symbols import concrete, is_number

__all__ = ["ResultReader"]

_DEEPEST = 64


class ResultReader:
    """Walks the observed and the traced result together.

    What both runs returned as the same object existed before the call and is returned again; what
    each run made for itself is made anew on every call.
    """

    def __init__(self, call: Call, inputs: Mapping[int, int], names: Names) -> None:
        """``inputs`` maps the id of a real or fake input to its position."""
        self.tensors: list[Any] = []
        self._call = call
        self._inputs = inputs
        self._names = names
        self._slots: dict[int, int] = {}
        self._times: collections.Counter[int] = collections.Counter()
        self._made: dict[int, str] = {}

    def expression(self, observed: Any, traced: Any) -> str:
        """Return an expression that makes the result.

        Raises:
            CannotServe: The runs returned different things, or something that cannot be made anew.
        """
        self._count(observed, 0)
        return self._read(observed, traced, "result")

    def _count(self, value: Any, depth: int) -> None:
        """Count how often each container stands in the result: as often, it is one object."""
        if depth > _DEEPEST:
            raise CannotServe("the result holds itself or is nested too deeply")
        if not isinstance(value, torch.Tensor) and (parts := take_apart(value, fresh=True)):
            self._times[id(value)] += 1
            for child in parts.children:
                self._count(child, depth + 1)

    def _read(self, observed: Any, traced: Any, path: str) -> str:
        if isinstance(traced, torch.Tensor):
            return self._output(traced)
        if is_number(traced):
            return self._number(observed, traced, path)
        if type(traced) in (tuple, torch.Size) and any(map(is_number, traced)):
            return self._sizes(observed, traced, path)
        if is_plain(observed):
            return self._plain(observed, traced, path)
        if (source := self._argument(observed)) is not None:
            return source
        if observed is traced:
            return self._names.of(observed, path)
        if (name := self._made.get(id(observed))) is not None:
            return name
        source = self._container(observed, traced, path)
        if self._times[id(observed)] == 1:
            return source
        name = self._made[id(observed)] = self._names.fresh(path)
        return f"({name} := {source})"

    def _output(self, value: Any) -> str:
        if (position := self._inputs.get(id(value))) is not None:
            return f"inputs[{position}]"
        slot = self._slots.setdefault(id(value), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(value)
        return f"out[{slot}]"

    def _number(self, observed: Any, traced: Any, path: str) -> str:
        """Let a number that is a symbol be computed on every call."""
        if not same_value(observed, found := concrete(traced)):
            raise CannotServe(f"{path} is {observed!r} in one run and {found!r} in another")
        return self._output(traced)

    def _sizes(self, observed: Any, traced: Any, path: str) -> str:
        if type(observed) is not type(traced) or len(observed) != len(traced):
            raise CannotServe(f"{path} has another form in a second run of the call")
        pairs = enumerate(zip(observed, traced, strict=True))
        parts = "".join(f"{self._read(one, two, f'{path}[{i}]')}, " for i, (one, two) in pairs)
        is_size = isinstance(traced, torch.Size)
        return f"{self._names.of(torch.Size, 'Size')}(({parts}))" if is_size else f"({parts})"

    def _plain(self, observed: Any, traced: Any, path: str) -> str:
        if not same_value(observed, traced):
            raise CannotServe(f"{path} is {observed!r} in one run and {traced!r} in another")
        is_literal = type(observed) in (int, str, bool, type(None))
        return repr(observed) if is_literal else self._names.of(observed, path)

    def _argument(self, observed: Any) -> str | None:
        containers = (item for item, _ in self._call.containers)
        for item in (*containers, *self._call.objects):
            if item.value is observed:
                return item.access
        return None

    def _container(self, observed: Any, traced: Any, path: str) -> str:
        first, second = take_apart(observed, fresh=True), take_apart(traced, fresh=True)
        if first is None or second is None:
            kind = f"{type(observed).__module__}.{type(observed).__qualname__}"
            raise CannotServe(f"{path} is a {kind}, which cannot be made anew on every call")
        if type(observed) is not type(traced) or first.labels != second.labels:
            raise CannotServe(f"{path} has another form in a second run of the call")
        children = [
            self._read(child, other, path + label)
            for (label, child), (_, other) in zip(first, second, strict=True)
        ]
        return first.build(children, self._names)
