"""Where tensors and numbers are found while a call is served.

Results that are views are made by the core, since a backend's outputs are memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch.fx import Graph, Node

from torchbay._torch_compat import OpOverload, storage_id
from torchbay._torch_symbols import READS, is_number, number_source, size_source

__all__ = [
    "INPUTS",
    "LAST",
    "ROOTS",
    "Number",
    "Place",
    "Route",
    "Source",
    "View",
    "base_of",
    "defining_nodes",
    "is_alike",
    "places_of",
    "remake",
    "symbols_of_view",
    "view_between",
]

INPUTS = 0
"""The level of the trace's inputs; stages count from 1."""

LAST = -1
"""The level of what the last part of a graph computes."""


ROOTS = -2
"""The level of what autograd differentiates, once it has been told."""


class Route(Protocol):
    """How emitted code reaches things."""

    def place(self, place: Place) -> str:
        """Return an expression for what stands in a place."""

    def name(self, value: Any) -> str:
        """Return the name of a function or an object."""

    @property
    def symbols(self) -> Mapping[Any, str]:
        """Expressions for the symbols of sizes."""


@attrs.frozen
class Place:
    """Where a tensor stands.

    Attributes:
        level: `INPUTS`, the number of a stage, `LAST` or `ROOTS`.
        index: The position among the inputs, the operator's number within its stage, or the
            position among the outputs of the last part or among the roots.
    """

    level: int
    index: int

    def source(self, route: Route) -> str:
        """Return an expression for the tensor."""
        return route.place(self)


@attrs.frozen(eq=False)
class View:
    """A tensor that lies in the memory of another.

    Attributes:
        base: Where that one stands.
        sizes: Its own sizes, in elements.
        strides: Its strides, in elements.
        offset: Where it begins, in elements after the beginning of its base.
        numbers: How the numbers read from data are found that these are computed from, by symbol.
        is_detached: Whether it needs no gradient although its base does.
    """

    base: Place
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    numbers: Mapping[Any, Source]
    is_detached: bool

    def source(self, route: Route) -> str:
        """Return an expression that makes the view."""
        numbers = {symbol: number.source(route) for symbol, number in self.numbers.items()}
        symbols = {**route.symbols, **numbers}

        def sizes(values: Sequence[Any]) -> str:
            return f"({''.join(size_source(value, symbols) + ', ' for value in values)})"

        geometry = (
            f"{sizes(self.sizes)}, {sizes(self.strides)}, {size_source(self.offset, symbols)}"
        )
        base = f"{route.place(self.base)}{'.detach()' if self.is_detached else ''}"
        return f"{route.name(remake)}({base}, {geometry})"


@attrs.frozen(eq=False)
class Number:
    """A number that is computed from inputs and tensor data, as the program computed it.

    Attributes:
        node: The node of the graph that computes it.
        tensors: Where the tensors and the inputs stand that it is computed from.
    """

    node: Node
    tensors: Mapping[Node, Source]

    def source(self, route: Route) -> str:
        """Return an expression that computes it."""
        return number_source(self.node, lambda node: self.tensors[node].source(route), route.name)


Source = Place | View | Number
"""Something that emitted code can make."""


def places_of(source: Source) -> tuple[Place, ...]:
    """Return the places that something is made from."""
    if isinstance(source, Place):
        return (source,)
    if isinstance(source, View):
        return (source.base, *_places_among(source.numbers.values()))
    return _places_among(source.tensors.values())


def _places_among(sources: Iterable[Source]) -> tuple[Place, ...]:
    return tuple(place for source in sources for place in places_of(source))


def remake(
    base: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a view that begins ``offset`` elements after its base does."""
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def view_between(
    base: torch.Tensor, result: torch.Tensor, place: Place, numbers: Mapping[Any, Source]
) -> View:
    """Describe one fake tensor as a view of another with the same storage."""
    offset = result.storage_offset() - base.storage_offset()
    is_detached = base.requires_grad and not result.requires_grad
    return View(place, tuple(result.shape), tuple(result.stride()), offset, numbers, is_detached)


def defining_nodes(graph: Graph) -> dict[Any, Node]:
    """Return, for each symbol of a graph that is read from data, the node that reads it."""
    reads = (node for node in graph.nodes if node.target in READS)
    values = ((node, node.meta["val"]) for node in reads if is_number(node.meta["val"]))
    return {value.node.expr: node for node, value in values}


def symbols_of_view(value: torch.Tensor) -> set[Any]:
    """Return the symbols in the sizes and strides of a fake tensor."""
    geometry = (*value.shape, *value.stride(), value.storage_offset())
    return {
        symbol for size in geometry if is_number(size) for symbol in size.node.expr.free_symbols
    }


def base_of(node: Node) -> Node:
    """Return the node whose memory a node is a view of, through views alone.

    A view whose size depends on data is its own base: only its operator knows how large it is.
    """
    while _is_view(node):
        source = node.args[0]
        if not isinstance(source, Node) or not is_alike(source.meta["val"], node.meta["val"]):
            break
        node = source
    return node


def _is_view(node: Node) -> bool:
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    return is_view and not node.meta.get("unbacked_bindings")


def is_alike(base: Any, view: Any) -> bool:
    """Whether strides alone lead from one tensor to the other."""
    return (
        isinstance(base, torch.Tensor)
        and isinstance(view, torch.Tensor)
        and base.dtype == view.dtype
        and base.is_conj() == view.is_conj()
        and base.is_neg() == view.is_neg()
        and storage_id(base) == storage_id(view)
    )
