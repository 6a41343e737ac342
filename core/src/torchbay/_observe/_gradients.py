"""The gradients that tensors hold, before and after a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from torchbay._call import Item, Place
from torchbay._observe._reach import Reading

__all__ = ["Gradient", "GradientPlace", "Gradients"]


@attrs.frozen(eq=False)
class GradientPlace:
    """The gradient that a tensor held before the call, as a place of its own.

    Attributes:
        owner: Where the tensor stands.
        value: The gradient.
    """

    owner: Item | Reading
    value: torch.Tensor

    @property
    def path(self) -> str:
        """How a user would write it."""
        return f"{self.owner.path}.grad"


@attrs.frozen(eq=False)
class Gradient:
    """What a leaf held as its gradient before a call and after it."""

    tensor: torch.Tensor
    before: torch.Tensor | None
    after: torch.Tensor | None
    is_written: bool

    @property
    def is_changed(self) -> bool:
        """Whether the call left another gradient there, or wrote the one it found."""
        return self.before is not self.after or self.is_written


class Gradients:
    """The gradients of a call's tensors before it."""

    def __init__(self, places: Iterable[Place]) -> None:
        leaves = {id(place.value): place.value for place in places if place.value.is_leaf}
        # Kept, so that no other gradient gets the identity of one of these.
        self._before = [(leaf, leaf.grad, _version(leaf.grad)) for leaf in leaves.values()]

    def after(self, used: frozenset[int], *, is_asked: bool) -> Sequence[Gradient]:
        """Return the gradient of every leaf, if the call had to do with any.

        Args:
            used: Identities of the tensors that its operators were given.
            is_asked: Whether code ran that may ask tensors for their gradients.
        """
        found = [
            Gradient(leaf, before, leaf.grad, _version(before) != version)
            for leaf, before, version in self._before
        ]
        is_concerned = is_asked or any(g.is_changed or id(g.before) in used for g in found)
        return found if is_concerned else ()


def _version(gradient: torch.Tensor | None) -> int | None:
    is_counted = gradient is not None and not gradient.is_inference()
    return gradient._version if gradient is not None and is_counted else None  # noqa: SLF001 - documented
