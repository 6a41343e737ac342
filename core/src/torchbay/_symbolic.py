"""Which sizes and numbers of a call become symbols, so that others need no other graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch

from torchbay._call import Item, Place

__all__ = ["SizeHistory", "Symbolic"]


@attrs.frozen
class Symbolic:
    """What of a call its graph leaves open.

    Attributes:
        dims: The dimensions whose sizes are symbols, by the tensor's path.
        numbers: The paths of int and float arguments that are symbols.
        reads: Whether numbers read from tensor data are symbols.
    """

    dims: Mapping[str, frozenset[int]] = attrs.field(factory=dict)
    numbers: frozenset[str] = frozenset()
    reads: bool = False

    @property
    def is_static(self) -> bool:
        """Whether every size and number that the call was given is fixed."""
        return not (self.numbers or self.dims)


class SizeHistory:
    """Remembers the sizes and numbers one callable was called with, and which of them change."""

    def __init__(self, dynamic: bool | None) -> None:  # noqa: FBT001 - as torch.compile names it
        self._dynamic = dynamic
        self._sizes: dict[tuple[str, int], torch.Size] = {}
        self._changing: dict[tuple[str, int], frozenset[int]] = {}
        self._numbers: dict[str, float] = {}
        self._changing_numbers: set[str] = set()

    def symbolic(
        self, given: Iterable[Item], state: Iterable[Place], numbers: Iterable[Item]
    ) -> Symbolic:
        """Return what to leave open in a call with these tensors and numbers, and remember them.

        A size is a symbol from the second value on that is seen of it; with ``dynamic=True`` those
        of the call's own tensors are from the first, and with ``dynamic=False`` none is.
        """
        if self._dynamic is False:
            return Symbolic(reads=True)
        given, numbers = list(given), list(numbers)
        dims = {place.path: self._seen(place) for place in (*state, *given)}
        if self._dynamic:
            dims |= {item.path: frozenset(range(item.value.dim())) for item in given}
        changing = frozenset(item.path for item in numbers if self._is_open(item))
        return Symbolic(
            {path: found for path, found in dims.items() if found}, changing, reads=True
        )

    def _seen(self, place: Place) -> frozenset[int]:
        """Note a tensor's sizes; return the dimensions in which they have changed so far."""
        sizes = place.value.shape
        key = (place.path, len(sizes))
        before = self._sizes.setdefault(key, sizes)
        changed = {dim for dim, size in enumerate(sizes) if size != before[dim]}
        found = self._changing.get(key, frozenset()) | changed
        self._changing[key] = found
        return found

    def _is_open(self, item: Item) -> bool:
        before = self._numbers.setdefault(item.path, item.value)
        if type(before) is type(item.value) and before != item.value:
            self._changing_numbers.add(item.path)
        return bool(self._dynamic) or item.path in self._changing_numbers
