"""Removing what nobody needs from a graph, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchbay._control_flow import is_kept, subgraphs
from torchbay._source import Symbol
from torchbay._torch_compat import OpOverload, draws, writes_of

__all__ = ["has_effect", "is_random", "is_write", "named_arguments", "prune", "with_outputs"]


def is_random(node: Node) -> bool:
    """Whether a node draws from a random generator."""
    target = node.target
    if any(is_random(inner) for graph in subgraphs(node) for inner in graph.graph.nodes):
        return True
    return draws(target, node.args, node.kwargs)


def is_write(node: Node) -> bool:
    """Whether a node changes one of its arguments, or calls anything that does."""
    inner = (is_write(each) for graph in subgraphs(node) for each in graph.graph.nodes)
    return bool(writes_of(node.target)) or any(inner)


def prune(graph: Graph) -> None:
    """Erase dead nodes that neither draw random numbers nor have an effect; inputs stay."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: Node) -> bool:
    """Whether a node must run although nobody uses what it returns."""
    if node.op == "get_attr":
        return False
    is_operator = isinstance(node.target, OpOverload) or is_kept(node.target)
    is_python = getattr(node.target, "__module__", "") == "_operator"
    return (
        is_random(node)
        or is_write(node)
        or node.is_impure()
        # Whatever else stands in a graph, nobody knows what it does.
        or not (is_operator or is_python)
    )


def named_arguments(node: Node, names: Mapping[Node, str]) -> tuple[Any, Any]:
    """Return a node's arguments, to be shown, with names in place of nodes."""
    given: Any = (node.args, node.kwargs)
    show: Any = lambda used: Symbol(names[used])  # noqa: E731 - fx types what arguments may be
    args, kwargs = map_arg(given, show)
    return args, kwargs


def with_outputs(module: GraphModule, outputs: Sequence[Node]) -> GraphModule:
    """Make a graph return these nodes and hold nothing else."""
    graph = module.graph
    graph.output_node().args = (tuple(outputs),)
    graph.output_node().meta.pop("val", None)
    prune(graph)
    graph.lint()
    module.recompile()
    return module
