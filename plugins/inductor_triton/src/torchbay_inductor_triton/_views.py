"""Outputs that are views of inputs, made outside the generated code.

On CUDA that code may read copies of its inputs, for alignment or inside CUDA graphs, and a view
made in there would be a view of the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from torchbay.plugin import UnsupportedGraph

__all__ = ["InputView", "making_views", "split_views", "viewed"]

_Run = Callable[[list[Any]], Sequence[Any]]


@attrs.frozen
class InputView:
    """A view of one input, as sizes, strides and the distance from where the input starts."""

    position: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the view of the input that is given now."""
        source = inputs[self.position]
        start = source.storage_offset() + self.shift
        return source.as_strided(self.sizes, self.strides, start)


def split_views(
    module: GraphModule, kept: AbstractSet[int] = frozenset()
) -> tuple[GraphModule, Mapping[int, InputView]]:
    """Return the graph without outputs that are views of inputs, and those by position.

    Args:
        module: The graph.
        kept: The positions of outputs that may be copies.
    """
    graph = Graph()
    outputs: Any = graph.graph_copy(module.graph, {})
    inputs = graph.find_nodes(op="placeholder")
    views = {
        position: _view(output, source, inputs.index(source))
        for position, output in enumerate(outputs)
        if position not in kept and (source := viewed(output)).op == "placeholder"
    }
    graph.output(tuple(node for at, node in enumerate(outputs) if at not in views))
    return GraphModule(module, graph), views


def making_views(run: _Run, views: Mapping[int, InputView]) -> _Run:
    """Return ``run`` with the views put back between its outputs."""
    if not views:
        return run

    def run_and_view(inputs: list[Any]) -> Sequence[Any]:
        made = [(position, view.of(inputs)) for position, view in views.items()]
        outputs = list(run(inputs))
        inputs.clear()
        for position, output in made:
            outputs.insert(position, output)
        return outputs

    return run_and_view


def viewed(node: Node) -> Node:
    """Return the node whose memory ``node`` is in: itself, unless it is a view."""
    while node.target is operator.getitem or getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _view(output: Node, source: Node, position: int) -> InputView:
    made, whole = output.meta["val"], source.meta["val"]
    if made.dtype != whole.dtype or made.is_conj() != whole.is_conj():
        raise UnsupportedGraph(
            f"'{output.name}' is a view of an input as another type of number",
            account="torchbay-inductor-triton",
            remedy="Return a copy of it, or use backend='eager' for this function.",
        )
    shift = made.storage_offset() - whole.storage_offset()
    return InputView(position, tuple(made.shape), made.stride(), shift)
