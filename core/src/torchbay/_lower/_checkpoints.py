"""What a backward computes again because the program says so."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Graph, Node

from torchbay._lower._prune import prune
from torchbay._torch_autograd import is_in_backward
from torchbay._torch_checkpoint import is_recomputed, keep, region_of

__all__ = ["compute_again", "keep_boundaries"]


def keep_boundaries(graph: Graph) -> None:
    """Keep what goes into a checkpoint, and what is computed from what comes out of one.

    Otherwise a partitioner that saves as little as it can computes one checkpoint from another,
    all of them at the same time.
    """
    forward = [n for n in graph.nodes if n.op == "call_function" and not is_in_backward(n)]
    recomputed = set(filter(is_recomputed, forward))
    for node in forward:
        into = {user for user in node.users if user in recomputed}
        if any(region_of(user) != region_of(node) for user in into):
            for kept in _sources(node):
                keep(kept)
        elif region_of(node) is None and recomputed.intersection(map(_base, node.all_input_nodes)):
            keep(node)


def compute_again(graph: Graph) -> None:
    """Let the part of a graph that a backward did compute again what it takes from checkpoints."""
    if not any(is_in_backward(node) for node in graph.nodes):
        return
    keep_boundaries(graph)
    copies: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if is_in_backward(node):
            with graph.inserting_before(node):
                for used in node.all_input_nodes:
                    node.replace_input_with(used, _recomputed(used, copies))
    prune(graph)


def _recomputed(node: Node, copies: dict[Node, Node]) -> Node:
    """Return a copy of what computes a node from what is kept; one that is kept is itself."""
    if not is_recomputed(node) or is_in_backward(node):
        return node
    if node not in copies:
        given = {used: _recomputed(used, copies) for used in node.all_input_nodes}
        copies[node] = node.graph.node_copy(node, given.__getitem__)
    return copies[node]


def _sources(node: Node) -> Iterator[Node]:
    """Yield a node, and what it is a view or an element of: those are cheap, and not kept."""
    while node.op == "call_function":
        yield node
        if node.target is operator.getitem:
            yield from node.args[0].users  # type: ignore[union-attr]
        if not _is_cheap(node):
            return
        node = node.args[0]  # type: ignore[assignment]


def _base(node: Node) -> Node:
    while _is_cheap(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_cheap(node: Node) -> bool:
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))
