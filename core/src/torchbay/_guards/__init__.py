"""Third stage: everything a graph relied on becomes a guard."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch

from torchbay._call import Call, Item, is_usable
from torchbay._guards._emit import GuardFunction, compile_source, emit
from torchbay._guards._kinds import (
    ContainerGuard,
    EnvironmentGuard,
    Guard,
    IdentityGuard,
    Mismatch,
    NoOverlapGuard,
    NumberGuard,
    ObjectGuard,
    RelationGuard,
    SameTensorGuard,
    ShapeOfCallGuard,
    SizeGuard,
    SizesGuard,
    TensorGuard,
    ValueGuard,
    float_tensor,
    tensor_facts,
)
from torchbay._observe import Holder, Observation, Reading
from torchbay._source import Names
from torchbay._structure import is_plain, key_source
from torchbay._torch_compat import tensor_guard
from torchbay._torch_symbols import has_symbols, size_guards
from torchbay._trace import Input, Trace

__all__ = [
    "Guard",
    "GuardFunction",
    "Mismatch",
    "compile_source",
    "guards_of_call",
    "guards_of_graph",
]


def guards_of_graph(
    call: Call, observation: Observation, trace: Trace, written: Sequence[int]
) -> GuardFunction:
    """Guard everything a graph relied on: the call, the Python values read, tensors, sizes."""
    read = [EnvironmentGuard(name, value) for name, value in observation.environment.items()]
    return _emitted(call, observation.watched, read, trace.inputs, written, trace)


def guards_of_call(call: Call) -> GuardFunction:
    """Guard only what was passed: for a call that is served without a graph."""
    unique = {id(item.value): item for item in call.tensors}
    inputs = [Input(item.value, (item,), is_state=False) for item in unique.values()]
    return _emitted(call, (), (), inputs, (), None)


def _emitted(
    call: Call,
    watched: Sequence[Holder],
    read: Sequence[Guard],
    inputs: Sequence[Input],
    written: Sequence[int],
    trace: Trace | None,
) -> GuardFunction:
    names = _names(call)
    sources = _Sources(names, watched, call)
    numbers = trace.numbers if trace is not None else ()
    fakes = trace.fakes if trace is not None else [entry.tensor for entry in inputs]
    pairs = list(zip(inputs, fakes, strict=False))
    tensors = [_tensor_guard(sources.access(e.places[0]), e, fake) for e, fake in pairs]
    before = [*_call_guards(call, numbers), *_watch_guards(watched, sources), *read]
    after = [*_ties(inputs, sources), *_overlap(inputs, tensors, written)]
    after += _size_guards(trace, tensors) if trace is not None else []
    are_alike = tensor_guard([e.tensor for e in inputs], [f for _, f in pairs]) if inputs else None
    expressions = [_number_source(item, names) for item in numbers]
    return emit(before, tensors, expressions, after, names, are_alike)


def _number_source(item: Item, names: Names) -> str:
    """Return an expression for a number as the graph takes it."""
    is_int = isinstance(item.value, int)
    return item.access if is_int else f"{names.of(float_tensor, 'float_tensor')}({item.access})"


def _size_guards(trace: Trace, tensors: Sequence[TensorGuard]) -> Iterable[Guard]:
    """Guard what the graph relies on about the sizes and numbers that it leaves open."""
    places = [(guard.path, guard.access) for guard in tensors]
    places += [(item.path, item.access) for item in trace.numbers]
    symbolic = {f"t{i}": fake for i, fake in enumerate(trace.fakes) if has_symbols(fake)}
    for expression, where in size_guards(trace.mode, symbolic):
        yield RelationGuard.of(expression, places, where)


def _names(call: Call) -> Names:
    """Return names for emitted code; the call's own stand in the expressions for its items."""
    ours = (
        "args",
        "kwargs",
        "inputs",
        "match",
        "ambient_state_is_unchanged",
        "are_alike",
        "CANNOT_LOOK",
    )
    names = Names(*ours, *call.names.values)
    names.values |= call.names.values
    return names


class _Sources:
    """How emitted code reaches what was read."""

    def __init__(self, names: Names, watched: Sequence[Holder], call: Call) -> None:
        self._names = names
        self._arguments = {id(item.value): item.access for item in call.objects}
        self._holders = {id(holder.container): holder for holder in watched}
        self._references: dict[int, weakref.ref[Any]] = {}

    def access(self, place: Item | Reading) -> str:
        """Return an expression for a place's current value."""
        if isinstance(place, Item):
            return place.access
        holder = self.container(self._holders[id(place.holder)])
        if isinstance(place.holder, CellType):
            return f"{holder}.cell_contents"
        if isinstance(place.holder, FunctionType):
            return f"{holder}.{place.key}"
        return f"{holder}[{key_source(place.key, self._names)}]"

    def container(self, holder: Holder) -> str:
        """Return an expression for a container."""
        if holder.is_pinned:
            return self._names.of(holder.container, holder.path)
        return holder.suffix.format(self._owner(holder))

    def _owner(self, holder: Holder) -> str:
        if (access := self._arguments.get(id(holder.owner))) is not None:
            return access
        if (reference := self._reference(holder.owner)) is not None:
            return f"{self._names.of(reference, f'{holder.path}_ref')}()"
        assert holder.via is not None, "only arguments are reached without a reading"
        return self.access(holder.via)

    def _reference(self, owner: Any) -> weakref.ref[Any] | None:
        if id(owner) not in self._references:
            try:
                self._references[id(owner)] = weakref.ref(owner)
            except TypeError:
                return None
        return self._references[id(owner)]


def _call_guards(call: Call, numbers: Sequence[Item]) -> Iterable[Guard]:
    yield ShapeOfCallGuard(len(call.args), tuple(call.kwargs))
    for item, container in call.containers:
        yield ContainerGuard(item.path, item.access, container.form)
    for item in call.values:
        if item in numbers:
            yield NumberGuard(item.path, item.access, type(item.value))
        else:
            yield ValueGuard(item.path, item.access, item.value)
    for item in call.objects:
        yield ObjectGuard.of(item.path, item.access, item.value)


def _watch_guards(watched: Sequence[Holder], sources: _Sources) -> Iterable[Guard]:
    for holder in watched:
        # What a tuple holds cannot change.
        if not isinstance(holder.container, tuple) or not holder.is_pinned:
            for reading in holder.readings:
                yield from _reading_guards(reading, sources.access(reading), holder.is_pinned)
    growing = [holder for holder in watched if _can_grow(holder)]
    pinned = [(holder.path, holder.container) for holder in growing if holder.is_pinned]
    for group in ([s for s in pinned if not s[1]], [s for s in pinned if s[1]]):
        if group:
            yield SizesGuard.of(group)
    for holder in growing:
        if not holder.is_pinned:
            kind, size = type(holder.container), len(holder.container)
            yield SizeGuard(holder.path, sources.container(holder), kind, size)


def _can_grow(holder: Holder) -> bool:
    return holder.is_whole and isinstance(holder.container, (dict, list))


def _reading_guards(reading: Reading, access: str, is_pinned: bool) -> Iterable[Guard]:  # noqa: FBT001
    value = reading.value
    if isinstance(value, torch.Tensor) and is_usable(value):
        return
    if isinstance(value, set):
        yield ValueGuard(reading.path, f"type({access})", set)
        yield ValueGuard(reading.path, f"frozenset({access})", frozenset(value))
    elif is_plain(value):
        yield ValueGuard(reading.path, access, value)
    elif is_pinned:
        yield IdentityGuard(reading.path, access, value)
    elif not isinstance(value, (list, dict, tuple)):
        yield ObjectGuard.of(reading.path, access, value)


def _tensor_guard(access: str, entry: Input, fake: torch.Tensor) -> TensorGuard:
    is_same = tensor_guard([entry.tensor], [fake])
    return TensorGuard(entry.path, access, tensor_facts(entry.tensor, fake), is_same)


def _ties(inputs: Sequence[Input], sources: _Sources) -> Iterable[Guard]:
    for entry in inputs:
        first, *others = entry.places
        for other in others:
            yield SameTensorGuard(
                other.path, sources.access(other), first.path, sources.access(first)
            )


def _overlap(
    inputs: Sequence[Input], tensors: Sequence[TensorGuard], written: Sequence[int]
) -> Iterable[Guard]:
    if written and len(tensors) > 1:
        path = ", ".join(inputs[position].path for position in written)
        others = [guard.access for i, guard in enumerate(tensors) if i not in written]
        yield NoOverlapGuard(path, tuple(tensors[i].access for i in written), tuple(others))
