"""Third stage: everything a graph relied on becomes a guard."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from torchbay._access import Access
from torchbay._call import Call, Item, Place, is_usable
from torchbay._guards._answers import answer_guards
from torchbay._guards._emit import GuardFunction, compile_source, emit
from torchbay._guards._kinds import (
    ContainerGuard,
    DistinctGuard,
    EnvironmentGuard,
    FastPathGuard,
    Guard,
    IdentityGuard,
    KeysGuard,
    LevelGuard,
    Mismatch,
    NoOverlapGuard,
    NumberGuard,
    ObjectGuard,
    RelationGuard,
    SameObjectGuard,
    ShapeOfCallGuard,
    SizeGuard,
    SizesGuard,
    TensorGuard,
    TensorKeysGuard,
    ValueGuard,
    float_tensor,
    kind_of,
    tensor_facts,
)
from torchbay._observe import Holder, Observation, Reading, argument_holders
from torchbay._source import Names
from torchbay._structure import is_plain
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
    "kind_of",
]


def guards_of_graph(
    call: Call, observation: Observation, trace: Trace, written: Sequence[int]
) -> GuardFunction:
    """Guard everything a graph relied on: the call, the Python values read, tensors, sizes."""
    if trace.joint is not None:
        observation = observation.running(trace.joint.profile)
    names = _names(call)
    access = Access(names, observation.watched, call)
    with observation.as_before():
        read: list[Guard] = [
            *_watch_guards(observation.watched, access, trace.numbers),
            *_shared(call, observation.watched, access),
            *_distinct(call, observation, access),
            *_passed_once(call),
            *(EnvironmentGuard(name, value) for name, value in observation.environment.items()),
            *(LevelGuard(*asked, answer) for asked, answer in observation.levels.items()),
            *([FastPathGuard()] if observation.reads_fast_path else []),
            *_missing_gradients(observation, trace.inputs, access),
            *_keys(observation.watched, trace.inputs, access),
        ]
        answers = answer_guards(trace.inputs, observation, access)
        return _emitted(call, access, read, trace.inputs, written, names, trace, [*answers])


def _missing_gradients(
    observation: Observation, inputs: Sequence[Input], access: Access
) -> Iterable[Guard]:
    """Guard that tensors hold no gradient where the call, which looked, found none."""
    places = {id(entry.tensor): entry.places[0] for entry in inputs}
    for gradient in observation.gradients:
        place = places.get(id(gradient.tensor))
        if place is not None and gradient.before is None:
            yield ValueGuard(f"{place.path}.grad", f"{access.of(place)}.grad", None)


def _keys(watched: Sequence[Holder], inputs: Sequence[Input], access: Access) -> Iterable[Guard]:
    """Guard which tensors they are that a dict has for keys: for others it holds other things."""
    keys = {id(key) for holder in watched for key in _tensor_keys(holder)}
    for entry in inputs:
        if id(entry.tensor) in keys:
            place = entry.places[0]
            yield ObjectGuard.of(place.path, access.of(place), entry.tensor)


def _tensor_keys(holder: Holder) -> Iterable[torch.Tensor]:
    return (r.key for r in holder.readings if isinstance(r.key, torch.Tensor))


def guards_of_call(call: Call) -> GuardFunction:
    """Guard only what was passed: for a call that is served without a graph."""
    unique = {id(item.value): item for item in call.tensors}
    inputs = [Input(item.value, (item,), is_state=False) for item in unique.values()]
    names = _names(call)
    return _emitted(call, Access(names, (), call), (), inputs, (), names)


def _emitted(  # noqa: PLR0913, PLR0917 - what every guard function is made of
    call: Call,
    access: Access,
    read: Sequence[Guard],
    inputs: Sequence[Input],
    written: Sequence[int],
    names: Names,
    trace: Trace | None = None,
    answers: Sequence[Guard] = (),
) -> GuardFunction:
    numbers = trace.numbers if trace is not None else ()
    fakes = trace.fakes if trace is not None else [entry.tensor for entry in inputs]
    pairs = list(zip(inputs, fakes, strict=False))
    tensors = [_tensor_guard(access.of(e.places[0]), e, fake) for e, fake in pairs]
    before = [*_call_guards(call, numbers), *read]
    after = [*_ties(inputs, access), *_overlap(inputs, tensors, written), *answers]
    after += _size_guards(trace, tensors, access) if trace is not None else []
    are_alike = tensor_guard([e.tensor for e in inputs], [f for _, f in pairs]) if inputs else None
    expressions = [_number_source(place, access, names) for place in numbers]
    return emit(before, tensors, expressions, after, names, are_alike)


def _number_source(place: Item | Reading, access: Access, names: Names) -> str:
    """Return an expression for a number as the graph takes it."""
    source = access.of(place)
    is_int = isinstance(place.value, int)
    return source if is_int else f"{names.of(float_tensor, 'float_tensor')}({source})"


def _size_guards(trace: Trace, tensors: Sequence[TensorGuard], access: Access) -> Iterable[Guard]:
    """Guard what the graph relies on about the sizes and numbers that it leaves open."""
    places = [(guard.path, guard.access) for guard in tensors]
    places += [(place.path, access.of(place)) for place in trace.numbers]
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
        "math",
        "torch",
    )
    names = Names(*ours, *call.names.values)
    names.values |= call.names.values
    return names


def _call_guards(call: Call, numbers: Sequence[Item | Reading]) -> Iterable[Guard]:
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


def _watch_guards(
    watched: Sequence[Holder], access: Access, numbers: Sequence[Item | Reading]
) -> Iterable[Guard]:
    counted = {(id(r.holder), r.key) for r in numbers if isinstance(r, Reading)}
    for holder in watched:
        # What a tuple holds cannot change.
        if not isinstance(holder.container, tuple) or not holder.is_fixed:
            for reading in holder.readings:
                if (id(reading.holder), reading.key) in counted:
                    yield NumberGuard(reading.path, access.of(reading), type(reading.value))
                else:
                    yield from _reading_guards(reading, holder, access)
    yield from _size_guards_of([holder for holder in watched if _can_grow(holder)], access)


def _size_guards_of(growing: Sequence[Holder], access: Access) -> Iterable[Guard]:
    """Guard how much containers hold, and under which keys."""
    fixed = [(holder.path, holder.container) for holder in growing if holder.is_fixed]
    for group in ([s for s in fixed if not s[1]], [s for s in fixed if s[1]]):
        if group:
            yield SizesGuard.of(group)
    for holder in growing:
        if not holder.is_fixed:
            kind, size = type(holder.container), len(holder.container)
            yield SizeGuard(holder.path, access.container(holder), kind, size)
        if _is_keyed_by_tensors(holder):
            yield TensorKeysGuard.of(holder.path, access.container(holder), holder.container)
        if _is_ordered(holder):
            yield KeysGuard(holder.path, access.container(holder), (*holder.container,))


def _can_grow(holder: Holder) -> bool:
    kinds = (dict, list) if holder.is_fixed else (dict, list, tuple)
    return holder.is_whole and isinstance(holder.container, kinds)


def _is_ordered(holder: Holder) -> bool:
    """Whether a program that iterates would see that keys moved; attributes have names."""
    is_mapping = holder.suffix == "{}" and isinstance(holder.container, dict)
    return is_mapping and len(holder.container) > 1 and all(map(is_plain, holder.container))


def _is_keyed_by_tensors(holder: Holder) -> bool:
    keys = holder.container if isinstance(holder.container, dict) else ()
    return len(keys) > 1 and all(isinstance(key, torch.Tensor) for key in keys)


def _reading_guards(reading: Reading, holder: Holder, access: Access) -> Iterable[Guard]:
    value, source, path = reading.value, access.of(reading), reading.path
    reached = access.holder_of(value)
    if isinstance(value, torch.Tensor) and is_usable(value):
        return
    if is_plain(value):
        yield ValueGuard(path, source, value)
    elif reached is not None and (reached.is_loose or isinstance(value, _CONTAINERS)):
        yield from _like_guards(reading, reached, access)
    elif holder.is_pinned or isinstance(value, _CONTAINERS):
        yield IdentityGuard(path, source, value)
    else:
        yield ObjectGuard.of(path, source, value)
    if type(value) is weakref.ReferenceType and not isinstance(value(), torch.Tensor):
        yield ValueGuard(f"{path}() is None", f"({source}() is None)", value() is None)


_CONTAINERS = (list, dict, tuple)


def _like_guards(reading: Reading, reached: Holder, access: Access) -> Iterable[Guard]:
    """Guard an object by what it is like; where it stands a second time, that it is the same."""
    value, source, path = reading.value, access.of(reading), reading.path
    if reached.via is not reading:
        other = access.object(value)
        assert other is not None, "it is reached anew on every call"
        yield _is_same(reading, reached.path, other, source)
    elif isinstance(value, set):
        yield ValueGuard(path, f"type({source})", set)
        yield ValueGuard(path, f"frozenset({source})", frozenset(value))
    elif not isinstance(value, _CONTAINERS):
        yield ValueGuard(path, f"type({source})", type(value))


def _shared(call: Call, watched: Sequence[Holder], access: Access) -> Iterable[Guard]:
    """Guard that a container which is passed twice, or is known otherwise, still is."""
    passed: dict[int, Item] = {}
    for item in call.holders:
        first = passed.setdefault(id(item.value), item)
        if first is not item:
            yield _is_same(item, first.path, first.access, item.access)
    for reading in (reading for holder in watched for reading in holder.readings):
        if (known := passed.get(id(reading.value))) is not None:
            yield _is_same(reading, known.path, known.access, access.of(reading))


def _is_same(place: Place, other_path: str, other: str, source: str) -> Guard:
    kind = type(place.value).__qualname__
    return SameObjectGuard(place.path, source, other_path, other, kind)


def _distinct(call: Call, observation: Observation, access: Access) -> Iterable[Guard]:
    """Guard that no container which the call writes is met in another place."""
    known = {id(holder.container): holder for holder in observation.watched}
    effects = [known.get(id(e.holder.container), e.holder) for e in observation.effects]
    written = [holder for holder in effects if isinstance(holder.container, _WRITTEN)]
    ids = {id(holder.container) for holder in written}
    met = [h for h in (*observation.watched, *argument_holders(call)) if id(h.container) not in ids]
    for kind in _WRITTEN:
        targets = [h for h in written if isinstance(h.container, kind)]
        others = [h for h in met if isinstance(h.container, kind)]
        reached = [access.container(h) for h in others if not h.is_fixed]
        pinned = frozenset(id(h.container) for h in others if h.is_fixed)
        free = [access.container(h) for h in targets if not h.is_fixed]
        fixed = [access.container(h) for h in targets if h.is_fixed]
        if free or (fixed and reached):
            path = ", ".join(holder.path for holder in targets)
            yield DistinctGuard(path, (*free, *fixed), tuple(reached), pinned)


def _passed_once(call: Call) -> Iterable[Guard]:
    """Guard that lists and dicts passed as several arguments are several: ``a is b`` tells."""
    passed = [item for item, _ in call.containers if isinstance(item.value, (list, dict))]
    items = list({id(item.value): item for item in passed}.values())
    if len(items) > 1:
        path = ", ".join(item.path for item in items)
        yield DistinctGuard(path, tuple(item.access for item in items), (), frozenset())


_WRITTEN = (list, dict, set)


def _tensor_guard(access: str, entry: Input, fake: torch.Tensor) -> TensorGuard:
    is_same = tensor_guard([entry.tensor], [fake])
    return TensorGuard(entry.path, access, tensor_facts(entry.tensor, fake), is_same)


def _ties(inputs: Sequence[Input], access: Access) -> Iterable[Guard]:
    for entry in inputs:
        first, *others = entry.places
        for other in others:
            yield SameObjectGuard(other.path, access.of(other), first.path, access.of(first))


def _overlap(
    inputs: Sequence[Input], tensors: Sequence[TensorGuard], written: Sequence[int]
) -> Iterable[Guard]:
    if written and len(tensors) > 1:
        path = ", ".join(inputs[position].path for position in written)
        others = [guard.access for i, guard in enumerate(tensors) if i not in written]
        yield NoOverlapGuard(path, tuple(tensors[i].access for i in written), tuple(others))
