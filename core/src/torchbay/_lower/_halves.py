"""A joint graph becomes a forward and a backward half."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from torchbay._control_flow import operators_in
from torchbay._lower._checkpoints import keep_boundaries
from torchbay._lower._functional import writes
from torchbay._lower._prune import has_effect, is_random, prune
from torchbay._reason import CannotServe
from torchbay._torch_autograd import Partitioner, partitioned

__all__ = ["Halves", "is_tangent", "split"]

aten = torch.ops.aten
_TANGENT = "tangents_"


@attrs.frozen(eq=False)
class Halves:
    """Both halves of a joint graph.

    Attributes:
        forward: Returns what the joint graph returned before the gradients, then what the backward
            half takes. Ends in the copies into inputs that the joint graph ended in.
        backward: Takes that, then the tangents; returns the gradients.
    """

    forward: GraphModule
    backward: GraphModule


def is_tangent(node: Node) -> bool:
    """Whether a node is an input for the gradient of a loss by a root."""
    return node.op == "placeholder" and str(node.target).startswith(_TANGENT)


def split(
    joint: GraphModule, states: Sequence[bool], gradients: int, partitioner: Partitioner
) -> Halves:
    """Split a functional joint graph.

    Args:
        joint: The graph; it is changed.
        states: Whether each of its inputs before the tangents is a parameter, a buffer or the like.
        gradients: How many gradients it returns last.
        partitioner: How to choose what is saved.

    Raises:
        CannotServe: The halves cannot do what the joint graph does.
    """
    for node in operators_in(joint):
        raise CannotServe(f"gradients through {node.target} are not served from a graph yet")
    graph = joint.graph
    keep_boundaries(graph)
    for number, node in enumerate(graph.find_nodes(op="placeholder")[len(states) :]):
        node.name = node.target = f"{_TANGENT}{number}"
    copies = _without_copies(joint)
    returned: list[Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    end = len(returned) - gradients
    # What must run although nobody needs it has to be asked for.
    wanted = [*returned[:end], *copies.values(), *_effects_before_tangents(graph)]
    names, targets = [node.name for node in wanted], [target.name for target in copies]
    graph.output_node().args = ((*wanted, *returned[end:]),)
    forward, backward = partitioned(
        joint, len(wanted), partitioner, [i for i, is_state in enumerate(states) if is_state]
    )
    _prune_backward(backward.graph)
    _finish_forward(forward, backward, names, end, targets)
    return Halves(forward, backward)


def _without_copies(joint: GraphModule) -> dict[Node, Node]:
    """Take the last copies into inputs out of a graph; return the value that each was to have."""
    values: dict[Node, Node] = {}
    for target, node in writes(joint).items():
        values[target] = node.args[1]  # type: ignore[assignment]
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
        joint.graph.erase_node(node)
    return values


def _effects_before_tangents(graph: Graph) -> list[Node]:
    """Return the operators with an effect that the forward half has to run."""
    behind: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return [n for n in graph.nodes if n.op == "call_function" and has_effect(n) and n not in behind]


def _prune_backward(graph: Graph) -> None:
    """Take out of a backward half what the forward half runs for its effect."""
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users and not is_tangent(node):
            graph.erase_node(node)
    for node in graph.nodes:
        if is_random(node):
            raise CannotServe(f"its backward would draw random numbers again, by {node.target}")


def _finish_forward(
    forward: GraphModule, backward: GraphModule, names: Sequence[str], end: int, targets: list[str]
) -> None:
    """Let a forward half end as the joint graph did, and return what its backward half takes."""
    graph = forward.graph
    returned: list[Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    results = _unshared(graph, returned[:end], names)
    by_name = {node.name: node for node in graph.nodes}
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    saved = [by_name[node.name] for node in taken]
    with graph.inserting_before(graph.output_node()):
        for name, value in zip(targets, returned[end : end + len(targets)], strict=True):
            written = graph.call_function(aten.copy_.default, (by_name[name], value))
            written.meta = dict(value.meta)
    graph.output_node().args = ((*results, *saved),)
    graph.output_node().meta.pop("desc", None)
    prune(graph)
    forward.recompile()


def _unshared(graph: Graph, returned: Sequence[Node], names: Sequence[str]) -> list[Node]:
    """Return results, each in memory of its own: the partitioner computes equal ones once."""
    owner: dict[Node, str] = {}
    copies: dict[str, Node] = {}
    results = []
    for node, name in zip(returned, names, strict=False):
        if owner.setdefault(node, name) == name or not isinstance(node.meta["val"], torch.Tensor):
            results.append(node)
            continue
        if name not in copies:
            with graph.inserting_before(graph.output_node()):
                copies[name] = graph.call_function(aten.clone.default, (node,))
            copies[name].meta = {**node.meta, "val": node.meta["val"].clone()}
        results.append(copies[name])
    return results
