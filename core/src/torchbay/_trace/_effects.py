"""What a call left in containers, as statements that leave the same there after the graph ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import CellType
from typing import Any

import attrs
import torch

from torchbay._access import Access
from torchbay._call import Call
from torchbay._observe import ABSENT, Change, Effect, Holder, Observation, argument_holders, is_same
from torchbay._reason import CannotServe
from torchbay._source import Names
from torchbay._structure import key_source, same_keys

__all__ = ["EffectWriter", "Twins", "Write"]


@attrs.frozen(eq=False)
class Write:
    """One statement: a value between two pieces of source, or no value.

    Attributes:
        path: How a user would write what is written.
        head: Source before the value.
        observed: The value in the observed run.
        traced: The value in the traced run.
        tail: Source after it.
    """

    path: str
    head: str
    observed: Any = ABSENT
    traced: Any = ABSENT
    tail: str = ""


class Twins:
    """Which of a call's containers each of the traced call's arguments stands for."""

    def __init__(self, call: Call, again: Call) -> None:
        pairs = zip(argument_holders(again), argument_holders(call), strict=True)
        self.holders = {id(copy.container): holder for copy, holder in pairs}
        items = zip(again.holders, call.holders, strict=True)
        self._values = {id(copy.value): item.value for copy, item in items}

    def original(self, value: Any) -> Any:
        """Return what a container stands for, or what was given."""
        return self._values.get(id(value), value)


class EffectWriter:
    """Turns the effects that two runs of a call agree on into statements.

    Attributes:
        bindings: Statements that name the containers while the way to them is as it was.
    """

    def __init__(
        self,
        observation: Observation,
        positions: Mapping[int, int],
        access: Access,
        names: Names,
    ) -> None:
        self.bindings: list[str] = []
        self._observation = observation
        self._positions = positions
        self._access = access
        self._names = names
        self._bound: dict[str, str] = {}
        self._watched = {id(holder.container): holder for holder in observation.watched}

    def writes(self, traced: Sequence[Effect], twins: Twins) -> list[Write]:
        """Return the statements, in an order that leaves keys as the call left them.

        Raises:
            CannotServe: The runs changed different places, or one that no guard looks at.
        """
        # A call without effects may be seen to fill a memo with fake tensors, which is undone.
        if not self._observation.effects:
            return []
        found = {id(_original(e.holder, twins).container): e for e in traced}
        pairs = [(e, found.pop(id(e.holder.container), None)) for e in self._observation.effects]
        for effect, other in [*pairs, *((effect, None) for effect in found.values())]:
            self._check_same_places(effect, other, twins)
        return [w for effect, other in pairs if other for w in self._writes(effect, other)]

    def bound(self, source: str, hint: str) -> str:
        """Return a name for what an expression stands for before anything is written."""
        if source.isidentifier() or not self._observation.effects:
            return source
        if (name := self._bound.get(source)) is None:
            name = self._bound[source] = self._names.fresh(hint)
            self.bindings.append(f"{name} = {source}")
        return name

    def _writes(self, effect: Effect, other: Effect) -> list[Write]:
        holder = self._guarded(effect)
        if holder.is_namespace:
            name = self._names.of(holder.owner, holder.path)
            return [
                Write(c.path, f"{name}.{c.key} = ", c.after, other.after[c.key])
                for c in effect.changes
            ]
        target = self.bound(self._access.container(holder), holder.path)
        if isinstance(holder.container, CellType):
            return _cell_writes(target, effect, other)
        if isinstance(holder.container, list):
            return _list_writes(target, effect, other)
        if isinstance(holder.container, set):
            return _set_writes(target, effect)
        return self._mapping_writes(target, effect, other)

    def _guarded(self, effect: Effect) -> Holder:
        """Return the holder as guards know it: what it held before must have been looked at."""
        if effect.holder.access is not None:
            return effect.holder
        holder = self._watched.get(id(effect.holder.container))
        keys = {reading.key for reading in holder.readings} if holder is not None else set()
        for change in effect.changes:
            is_new = change.before is ABSENT and holder is not None and holder.is_whole
            is_about_all = change.key is ABSENT or isinstance(effect.holder.container, set)
            if holder is None or not (change.key in keys or is_new or is_about_all):
                raise CannotServe(f"{change.path} is changed in a way that is not looked at again")
        assert holder is not None, "an effect has changes"
        return holder

    def _check_same_places(self, effect: Effect, other: Effect | None, twins: Twins) -> None:
        """Raise CannotServe, naming the place, if one run changed what the other did not."""
        changed = {change.key: change.path for change in self._changes(effect, twins)}
        again = {c.key: c.path for c in self._changes(other, twins)} if other is not None else {}
        for key in changed.keys() ^ again.keys():
            path = changed.get(key) or again[key]
            raise CannotServe(f"{path} is changed in one run of the call and not in another")
        if changed and other is not None and not _has_same_keys(effect, other):
            raise CannotServe(f"{effect.holder.path} has other keys in a second run of the call")

    def _changes(self, effect: Effect, twins: Twins) -> Iterator[Change]:
        """Yield the changes, leaving out where something now stands for what was there before."""
        for change in effect.changes:
            position = self._positions.get(id(change.before))
            is_same_input = position is not None and position == self._positions.get(
                id(change.after)
            )
            if not is_same_input and twins.original(change.after) is not change.before:
                yield change

    def _mapping_writes(self, target: str, effect: Effect, other: Effect) -> list[Write]:
        path = effect.holder.path
        paths = {change.key: change.path for change in effect.changes}
        gone = [key for key in effect.before if key not in effect.after]
        writes = [Write(path, f"del {target}[{self._key(key)}]") for key in gone]
        for key, new in effect.after.items():
            if key in paths:
                head = f"{target}[{self._key(key)}] = "
                writes.append(Write(paths[key], head, new, other.after[key]))
        if effect.is_reordered:
            keys = ", ".join(map(self._key, effect.after))
            key = self._names.fresh("key")
            writes.append(
                Write(path, f"for {key} in ({keys},): {target}[{key}] = {target}.pop({key})")
            )
        return writes

    def _key(self, key: Any) -> str:
        """Return an expression for a key.

        Raises:
            CannotServe: It is a tensor that the call made, or was given.
        """
        if not isinstance(key, torch.Tensor):
            return key_source(key, self._names)
        if (position := self._positions.get(id(key))) is None:
            raise CannotServe("a dict gets a tensor as a key that the call computes")
        return f"inputs[{position}]"


def _original(holder: Holder, twins: Twins) -> Holder:
    return twins.holders.get(id(holder.container), holder)


def _has_same_keys(effect: Effect, other: Effect) -> bool:
    if isinstance(effect.holder.container, set):
        return effect.after.keys() == other.after.keys()
    return same_keys(effect.after, other.after)


def _cell_writes(target: str, effect: Effect, other: Effect) -> list[Write]:
    path, head = effect.holder.path, f"{target}.cell_contents"
    if not effect.after:
        return [Write(path, f"del {head}")]
    return [Write(path, f"{head} = ", effect.after[None], other.after[None])]


def _set_writes(target: str, effect: Effect) -> list[Write]:
    path = effect.holder.path
    added = [key for key in effect.after if key not in effect.before]
    gone = [key for key in effect.before if key not in effect.after]
    writes = [Write(path, f"{target}.difference_update(", gone, gone, ")")] if gone else []
    return [*writes, Write(path, f"{target}.update(", added, added, ")")] if added else writes


def _list_writes(target: str, effect: Effect, other: Effect) -> list[Write]:
    """Leave alone what stayed: an element is written, or all from the first that differs."""
    path, old, new = effect.holder.path, [*effect.before.values()], [*effect.after.values()]
    again = [*other.after.values()]
    moved = [i for i, pair in enumerate(zip(old, new, strict=False)) if not is_same(*pair)]
    if len(old) == len(new):
        return [Write(f"{path}[{i}]", f"{target}[{i}] = ", new[i], again[i]) for i in moved]
    first = moved[0] if moved else min(len(old), len(new))
    if first == len(new):
        return [Write(path, f"del {target}[{first}:]")]
    head, tail = (f"{target}.extend(", ")") if first == len(old) else (f"{target}[{first}:] = ", "")
    return [Write(path, head, new[first:], again[first:], tail)]
