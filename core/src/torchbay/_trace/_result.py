"""What a call returns, as an expression over the graph's outputs and inputs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchbay._access import Access
from torchbay._call import Call
from torchbay._reason import CannotServe
from torchbay._source import Names
from torchbay._structure import is_plain, same_value, take_apart
from torchbay._torch_symbols import concrete, is_number

__all__ = ["ResultReader"]

_DEEPEST = 64


class ResultReader:
    """Walks what the observed and the traced run returned, and left behind, together.

    What both runs have as the same object existed before the call and is used again; what each run
    made for itself is made anew on every call.
    """

    def __init__(
        self,
        call: Call,
        inputs: Mapping[int, int],
        names: Names,
        access: Access,
        bound: Callable[[str, str], str],
    ) -> None:
        """Start with no tensors.

        Args:
            call: The observed call.
            inputs: The position of an input by the id of the real and of the fake tensor.
            names: The names that expressions use.
            access: How objects are reached that must not be named.
            bound: Returns a name for what an expression stands for before anything is written.
        """
        self.tensors: list[Any] = []
        self._call = call
        self._inputs = inputs
        self._names = names
        self._access = access
        self._bound = bound
        self._slots: dict[int, int] = {}
        self._times: collections.Counter[int] = collections.Counter()
        self._made: dict[int, str] = {}

    def expressions(self, values: Sequence[tuple[str, Any, Any]]) -> list[str]:
        """Return expressions that make values, to be evaluated in this order.

        Args:
            values: Of each value its path, what it was in the observed and in the traced run.

        Raises:
            CannotServe: The runs have different things, or something that cannot be made anew.
        """
        for path, observed, traced in values:
            self._count(observed, traced, path, 0)
        return [self._read(observed, traced, path) for path, observed, traced in values]

    def _count(self, observed: Any, traced: Any, path: str, depth: int) -> None:
        """Count how often each container is met: as often, it is one object."""
        if depth > _DEEPEST:
            raise CannotServe(f"{path} holds itself or is nested too deeply")
        if observed is traced or isinstance(observed, torch.Tensor):
            return
        first, second = take_apart(observed, fresh=True), take_apart(traced, fresh=True)
        if first is None or second is None:
            return
        self._times[id(observed)] += 1
        for child, other in zip(first.children, second.children, strict=False):
            self._count(child, other, path, depth + 1)

    def _read(self, observed: Any, traced: Any, path: str) -> str:
        if isinstance(traced, torch.Tensor) or isinstance(observed, torch.Tensor):
            return self._tensor(observed, traced, path)
        if is_number(traced):
            return self._number(observed, traced, path)
        if type(traced) in (tuple, torch.Size) and any(map(is_number, traced)):
            return self._sizes(observed, traced, path)
        if is_plain(observed):
            return self._plain(observed, traced, path)
        if (source := self._argument(observed)) is not None:
            return self._bound(source, path)
        if observed is traced:
            source = self._access.object(observed)
            return self._names.of(observed, path) if source is None else self._bound(source, path)
        if (name := self._made.get(id(observed))) is not None:
            return name
        if type(observed) is set:
            source = self._set(observed, traced, path)
        else:
            source = self._container(observed, traced, path)
        if self._times[id(observed)] == 1:
            return source
        name = self._made[id(observed)] = self._names.fresh(path)
        return f"({name} := {source})"

    def _tensor(self, observed: Any, traced: Any, path: str) -> str:
        if not isinstance(observed, torch.Tensor) or not isinstance(traced, torch.Tensor):
            raise CannotServe(f"{path} is a tensor in one run of the call and not in another")
        if self._inputs.get(id(traced)) != self._inputs.get(id(observed)):
            raise CannotServe(f"{path} is an input in one run of the call and not in another")
        return self._output(traced)

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

    def _set(self, observed: set[Any], traced: Any, path: str) -> str:
        if type(traced) is not set or not is_plain(frozen := frozenset(observed)):
            raise CannotServe(f"{path} is a set of what cannot be made anew on every call")
        return f"set({self._plain(frozen, frozenset(traced), path)})"

    def _argument(self, observed: Any) -> str | None:
        for item in (*self._call.holders, *self._call.objects):
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
