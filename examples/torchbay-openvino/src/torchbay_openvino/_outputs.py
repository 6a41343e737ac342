"""Outputs that share memory with inputs or with each other, as they do in PyTorch.

Each output is a view, mostly of all of it, of a base: an input, or a tensor that OpenVINO makes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

__all__ = ["OutputView", "views"]


@attrs.frozen
class OutputView:
    """A view of a base, as sizes, strides and the distance from where the base starts."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int
    whole: bool

    def of(self, bases: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the view of the base that is given now."""
        base = bases[self.base]
        if self.whole:
            return base
        return base.as_strided(self.sizes, self.strides, base.storage_offset() + self.shift)


def views(graph: Graph) -> tuple[list[Node], list[OutputView]]:
    """Return the bases that OpenVINO makes, and each output as a view.

    Positions of bases count the graph's inputs first.
    """
    outputs: Any = graph.output_node().args[0]
    bases = [_base(output) for output in outputs]
    made = list(dict.fromkeys(base for base in bases if base.op != "placeholder"))
    positions = {node: at for at, node in enumerate([*graph.find_nodes(op="placeholder"), *made])}
    pairs = zip(outputs, bases, strict=True)
    return made, [_view(output, base, positions[base]) for output, base in pairs]


def _view(output: Node, base: Node, position: int) -> OutputView:
    seen, whole = output.meta["val"], base.meta["val"]
    shift = seen.storage_offset() - whole.storage_offset()
    return OutputView(position, tuple(seen.shape), seen.stride(), shift, output is base)


def _base(node: Node) -> Node:
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: Node) -> Node | None:
    producer = node.all_input_nodes[0] if node.target is operator.getitem else node
    return producer.all_input_nodes[0] if getattr(producer.target, "is_view", False) else None
