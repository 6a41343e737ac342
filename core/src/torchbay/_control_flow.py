"""Operators that take functions: which of them a graph may hold, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from torchbay._torch_compat import HigherOrderOperator

__all__ = ["is_control_flow", "is_kept", "node_line", "operators_in", "subgraphs", "with_subgraphs"]

_KEPT = frozenset({"cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention"})


def is_control_flow(operator: Any) -> bool:
    """Whether an operator takes functions."""
    return isinstance(operator, HigherOrderOperator)


def is_kept(operator: Any) -> bool:
    """Whether a graph may hold an operator that takes functions; the others are refused by name."""
    return isinstance(operator, HigherOrderOperator) and operator.name() in _KEPT


def subgraphs(node: Node) -> list[GraphModule]:
    """Return the graphs an operator is given."""
    if not is_control_flow(node.target):
        return []
    owner = node.graph.owning_module
    given = [n for n in node.all_input_nodes if n.op == "get_attr"]
    found = (getattr(owner, str(attribute.target), None) for attribute in given)
    return [graph for graph in found if isinstance(graph, GraphModule)]


def with_subgraphs(module: GraphModule) -> Iterator[GraphModule]:
    """Yield a graph and, at any depth, the graphs its operators are given."""
    yield module
    for node in module.graph.nodes:
        for inner in subgraphs(node):
            yield from with_subgraphs(inner)


def operators_in(module: GraphModule) -> list[Node]:
    """Return the nodes, at the top of a graph, whose operators take functions."""
    return [node for node in module.graph.nodes if is_control_flow(node.target)]


def node_line(node: Node) -> str:
    """Return ``file:line`` of the user's code that a node comes from, or an empty string."""
    found = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else ""
