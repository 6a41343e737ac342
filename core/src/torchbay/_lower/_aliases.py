"""Results that are views: made by the core, since a backend's outputs are memory of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch.fx import Node

from torchbay._torch_compat import OpOverload, storage_id

__all__ = ["View", "base_of", "remake", "view_between", "view_of_input"]


@attrs.frozen
class View:
    """How a result lies in the memory of an input or of an output.

    Attributes:
        of_input: Whether ``base`` is an input of the trace, rather than an output of the graph.
        base: Its position.
        sizes: The result's sizes, in elements.
        strides: The result's strides, in elements.
        offset: Where the result begins, in elements after the beginning of its base.
    """

    of_input: bool
    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def source(self) -> str:
        """Return an expression that makes the view."""
        base = f"inputs[{self.base}]" if self.of_input else f"raw[{self.base}]"
        return f"remake({base}, {self.sizes!r}, {self.strides!r}, {self.offset})"


def remake(
    base: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a view that begins ``offset`` elements after its base does."""
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def view_between(
    base: torch.Tensor, result: torch.Tensor, position: int, *, of_input: bool
) -> View:
    """Describe one fake tensor as a view of another with the same storage."""
    return View(
        of_input,
        position,
        tuple(result.shape),
        tuple(result.stride()),
        int(result.storage_offset() - base.storage_offset()),
    )


def view_of_input(
    result: torch.Tensor, inputs: Mapping[int, int], fakes: Sequence[torch.Tensor]
) -> View | None:
    """Describe a result that lies in the memory of an input, or return None.

    Args:
        result: The fake of a result.
        inputs: The position of an input by the identity of its fake's storage.
        fakes: The fakes of the inputs.
    """
    position = inputs.get(storage_id(result))
    if position is None or not _is_alike(fakes[position], result):
        return None
    return view_between(fakes[position], result, position, of_input=True)


def base_of(node: Node) -> Node:
    """Return the node whose memory a node is a view of, through views alone."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        source = node.args[0]
        if not isinstance(source, Node) or not _is_alike(source.meta["val"], node.meta["val"]):
            break
        node = source
    return node


def _is_alike(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether strides alone lead from one tensor to the other."""
    return (
        base.dtype == view.dtype
        and base.is_conj() == view.is_conj()
        and base.is_neg() == view.is_neg()
        and storage_id(base) == storage_id(view)
    )
