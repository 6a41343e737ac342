"""Which sizes and numbers of a call become symbols, so that others need no other graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from torchbay._call import Item, Place

__all__ = ["Declarations", "Declared", "SizeHistory", "Symbolic"]


@attrs.frozen
class Declared:
    """What the caller says about one dimension of a tensor, or about a number.

    Attributes:
        is_open: Whether it is a symbol.
        by: Where the caller says so: ``dynamic_shapes``, ``mark_dynamic``, ...
        is_demanded: Whether it is an error if the program fixes it.
        low: The least size that is meant, or None.
        high: The greatest size that is meant, or None.
        same: Sizes with one name here follow from one another.
        derived: Computes the size from the one that ``same`` names; None where they are equal.
        serves_all: Whether 0 and 1 are sizes like any other, unless the program tells them apart.
        hint: The size that a backend is to tune for, or None.
    """

    is_open: bool
    by: str
    is_demanded: bool = False
    low: int | None = None
    high: int | None = None
    same: str = ""
    derived: Callable[[Any], Any] | None = None
    serves_all: bool = False
    hint: int | None = None

    def takes(self, size: float) -> bool:
        """Whether a size is within the range that is meant."""
        is_low = self.low is not None and size < self.low
        return not is_low and (self.high is None or size <= self.high)


Declarations = Mapping[tuple[str, int], Declared]
"""What the caller declared, by a tensor's path and the dimension; -1 stands for a number."""


@attrs.frozen
class Symbolic:
    """What of a call its graph leaves open.

    Attributes:
        dims: The dimensions whose sizes are symbols, by the tensor's path.
        numbers: The paths of int and float arguments that are symbols.
        reads: Whether numbers read from tensor data are symbols.
        in_python: Whether to use what PyTorch has in Python of its operators: in C++, some take
            no symbols, and others are taken apart in another way.
        declared: What the caller declared about the open dimensions.
    """

    dims: Mapping[str, frozenset[int]] = attrs.field(factory=dict)
    numbers: frozenset[str] = frozenset()
    reads: bool = False
    in_python: bool = False
    declared: Declarations = attrs.field(factory=dict)

    @property
    def is_static(self) -> bool:
        """Whether every size and number that the call was given is fixed."""
        return not (self.numbers or self.dims)

    @property
    def demanded(self) -> Declarations:
        """The open dimensions that the program must not fix."""
        return {key: said for key, said in self.declared.items() if said.is_demanded}


class SizeHistory:
    """Remembers the sizes and numbers one callable was called with, and which of them change."""

    def __init__(self, dynamic: bool | None) -> None:  # noqa: FBT001 - as torch.compile names it
        self._dynamic = dynamic
        self._sizes: dict[tuple[str, int], torch.Size] = {}
        self._changing: dict[tuple[str, int], frozenset[int]] = {}
        self._numbers: dict[str, float] = {}
        self._changing_numbers: set[str] = set()

    def symbolic(
        self,
        given: Iterable[Item],
        state: Iterable[Place],
        numbers: Iterable[Place],
        declared: Declarations,
    ) -> Symbolic:
        """Return what to leave open in a call with these tensors and numbers, and remember them.

        Numbers are the call's own and those found elsewhere.

        A size is a symbol from the second value on that is seen of it; with ``dynamic=True`` those
        of the call's own tensors are from the first, and with ``dynamic=False`` none is. What the
        caller declared comes before that, as long as the call is as declared.
        """
        given, state, numbers = list(given), list(state), list(numbers)
        dims = self._changed_dims(given, state)
        opened = frozenset(item.path for item in numbers if self._is_open(item))
        sizes: dict[tuple[str, int], float] = {(item.path, -1): item.value for item in numbers}
        for place in (*state, *given):
            sizes |= {(place.path, dim): size for dim, size in enumerate(place.value.shape)}
        said = _fitting({key: one for key, one in declared.items() if key in sizes}, sizes)
        for (path, dim), declaration in said.items():
            if dim >= 0:
                others = dims.get(path, frozenset()) - {dim}
                dims[path] = others | ({dim} if declaration.is_open else set())
            else:
                opened = opened - {path} | ({path} if declaration.is_open else set())
        found = {path: places for path, places in dims.items() if places}
        kept = {key: declaration for key, declaration in said.items() if declaration.is_open}
        return Symbolic(found, opened, reads=True, declared=kept)

    def _changed_dims(
        self, given: Iterable[Item], state: Iterable[Place]
    ) -> dict[str, frozenset[int]]:
        """Return the dimensions to leave open where the caller declared nothing."""
        if self._dynamic is False:
            return {}
        dims = {place.path: self._seen(place) for place in (*state, *given)}
        if self._dynamic:
            dims |= {item.path: frozenset(range(item.value.dim())) for item in given}
        return dims

    def _seen(self, place: Place) -> frozenset[int]:
        """Note a tensor's sizes; return the dimensions in which they have changed so far."""
        sizes = place.value.shape
        key = (place.path, len(sizes))
        before = self._sizes.setdefault(key, sizes)
        changed = {dim for dim, size in enumerate(sizes) if size != before[dim]}
        found = self._changing.get(key, frozenset()) | changed
        self._changing[key] = found
        return found

    def _is_open(self, item: Place) -> bool:
        if self._dynamic is False:
            return False
        before = self._numbers.setdefault(item.path, item.value)
        if type(before) is type(item.value) and before != item.value:
            self._changing_numbers.add(item.path)
        is_own = isinstance(item, Item)
        return bool(self._dynamic and is_own) or item.path in self._changing_numbers


def _fitting(declared: Declarations, sizes: Mapping[tuple[str, int], float]) -> Declarations:
    """Return the declarations that the sizes of a call agree with."""
    roots = {
        said.same: sizes[key]
        for key, said in declared.items()
        if said.same and said.derived is None
    }
    unrelated = {
        said.same
        for key, said in declared.items()
        if said.same and sizes[key] != _expected(said, roots[said.same])
    }
    return {
        key: said
        for key, said in declared.items()
        if said.same not in unrelated and said.takes(sizes[key])
    }


def _expected(said: Declared, root: float) -> float:
    return root if said.derived is None else said.derived(root)
