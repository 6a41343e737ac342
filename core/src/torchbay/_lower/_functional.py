"""From a graph as traced to a functional one in the operators a backend takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchbay._lower._prune import is_write
from torchbay._reason import CannotServe
from torchbay._torch_compat import functionalized, plain_execution, trace_to_graph

__all__ = ["functional", "writes"]

aten = torch.ops.aten


def functional(
    graph: GraphModule, fakes: tuple[torch.Tensor, ...], mode: Any, decompositions: Any
) -> GraphModule:
    """Return the graph without in-place operators but a last ``copy_`` into each changed input.

    A graph that changes nothing and needs no decomposition is returned as it is.

    Raises:
        CannotServe: Sizes that depend on data prevent a second trace.
    """
    if decompositions is None and not any(is_write(node) for node in graph.graph.nodes):
        return graph
    try:
        with plain_execution(), mode, mode.shape_env.ignore_fresh_unbacked_symbols():
            return trace_to_graph(functionalized(graph), fakes, decompositions)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise CannotServe(f"functionalization raised {type(error).__name__}: {line}") from error


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
