"""From a graph as traced to a functional one in the operators a backend takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchbay._control_flow import with_subgraphs
from torchbay._lower._prune import is_random, is_write
from torchbay._reason import CannotServe
from torchbay._torch_compat import functionalized, plain_execution, trace_to_graph, writes_of
from torchbay._trace import refuse_captured

__all__ = ["functional", "writes"]

aten = torch.ops.aten


def functional(
    graph: GraphModule, fakes: tuple[Any, ...], mode: Any, decompositions: Any
) -> GraphModule:
    """Return the graph without in-place operators but a last ``copy_`` into each changed input.

    A graph that changes nothing and needs no decomposition is returned as it is.

    Raises:
        CannotServe: A second trace is not possible.
    """
    if decompositions is None and not any(is_write(node) for node in graph.graph.nodes):
        return graph
    _draw_in_memory_order(graph)
    # Numbers that were read of the inputs are read anew, so that they get symbols of their own.
    mode.epoch += 1
    try:
        with plain_execution(), mode, mode.shape_env.ignore_fresh_unbacked_symbols():
            traced = trace_to_graph(functionalized(graph, mode), fakes, decompositions)
    except CannotServe:
        raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise CannotServe(f"functionalization raised {type(error).__name__}: {line}") from error
    refuse_captured(traced)
    return traced


def _draw_in_memory_order(module: GraphModule) -> None:
    """Let random in-place operators see their target contiguous, whatever its strides.

    They draw in the order of memory. Their functional forms draw into a new, contiguous tensor, so
    on a transposed target they would give each element another number.
    """
    for graph in with_subgraphs(module):
        for node in list(graph.graph.nodes):
            if is_random(node) and writes_of(node.target):
                _draw_into_contiguous(graph.graph, node)
        graph.recompile()


def _draw_into_contiguous(graph: Graph, node: Node) -> None:
    target: Any = node.args[0]
    strides = target.meta["val"].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    if order != list(range(len(strides))):
        with graph.inserting_before(node):
            view = graph.call_function(aten.permute.default, (target, order))
        view.meta = {**target.meta, "val": target.meta["val"].permute(order)}
        node.args = (view, *node.args[1:])
        node.replace_all_uses_with(target)


def writes(graph: GraphModule) -> dict[Node, Node]:
    """Return, for each input that a functional graph changes, the last copy into it.

    Raises:
        CannotServe: The graph changes something else.
    """
    found: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_write(node):
            target = node.args[0]
            if node.target is not aten.copy_.default or target.op != "placeholder":
                raise CannotServe(f"{node.target} changes a tensor in a way no epilogue can repeat")
            found[target] = node
    return found
