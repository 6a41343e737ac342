"""What remains of a backward half when a loss depends on some roots only."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from torchbay._lower._places import INPUTS, LAST, Place, Source, base_of, view_between
from torchbay._lower._training import BackwardHalf, Given

__all__ = ["BackwardPart", "present"]

aten = torch.ops.aten


@attrs.frozen(eq=False)
class BackwardPart:
    """A backward half without what absent tangents would be needed for.

    Attributes:
        graph: What has to be compiled.
        given: Where its inputs come from, then where the gradients come from that are among them.
        gradients: How each gradient is found, or None where eager gives none.
    """

    graph: GraphModule
    given: tuple[Given, ...]
    gradients: tuple[Source | None, ...]


def present(half: BackwardHalf, wanted: frozenset[int]) -> BackwardPart:
    """Return what computes the gradients of a loss that depends on these roots.

    Like autograd, it computes nothing from gradients that are not there: multiplied by an infinite
    value, a zero in their place would give NaN. Where an operator takes one that is there and one
    that is not, as a concatenation does, the latter is computed from a tangent of zeros.
    """
    module = copy.deepcopy(half.graph)
    graph = module.graph
    given = dict(zip(graph.find_nodes(op="placeholder"), half.given, strict=True))
    _leave_out(graph, given, wanted)
    returned: Sequence[Node] = graph.output_node().args[0]  # type: ignore[assignment]
    gradients = [
        node if reached & wanted else None
        for node, reached in zip(returned, half.reached, strict=True)
    ]
    outputs, passed = _outputs(gradients)
    bases = {node: base_of(node) for node in gradients if node is not None}
    graph.output_node().args = (tuple(outputs),)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    kept = [node for node in given if node.users]
    inputs = [*kept, *(node for node in passed if not node.users)]
    places = {node: Place(INPUTS, i) for i, node in enumerate(inputs)}
    places |= {node: Place(LAST, i) for i, node in enumerate(outputs)}
    sources = tuple(
        _source(node, bases[node], places) if node is not None else None for node in gradients
    )
    for node in [node for node in given if not node.users]:
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return BackwardPart(module, tuple(given[node] for node in inputs), sources)


def _leave_out(graph: Graph, given: Mapping[Node, Given], wanted: frozenset[int]) -> None:
    """Let sums go on without what autograd would not compute."""
    behind: set[Node] = set()
    absent: set[Node] = set()
    for node in list(graph.nodes):
        taken = [used for used in node.all_input_nodes if used in behind]
        missing = [used for used in taken if used in absent]
        if node in given and given[node].kind == "tangent":
            behind.add(node)
            if given[node].index not in wanted:
                absent.add(node)
        elif taken and node.op != "output":
            behind.add(node)
            if len(missing) == len(taken):
                absent.add(node)
            elif missing and (left := _other_summand(node, missing)) is not None:
                node.replace_all_uses_with(left)


def _other_summand(node: Node, missing: Sequence[Node]) -> Node | None:
    """Return what a sum is without the summand that is missing, if that is all it is."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    left = node.args[1] if node.args[0] in missing else node.args[0]
    if not isinstance(left, Node):
        return None
    value, whole = left.meta["val"], node.meta["val"]
    return left if (value.dtype, value.shape) == (whole.dtype, whole.shape) else None


def _outputs(gradients: Sequence[Node | None]) -> tuple[list[Node], list[Node]]:
    """Return what a graph must return for these gradients, and the inputs that are gradients."""
    nodes = dict.fromkeys(node for node in gradients if node is not None)
    sharing: dict[Node, list[Node]] = collections.defaultdict(list)
    for node in nodes:
        sharing[base_of(node)].append(node)
    inputs = [base for base in sharing if base.op == "placeholder"]
    outputs = [
        base if len(users) > 1 else users[0]
        for base, users in sharing.items()
        if base.op != "placeholder"
    ]
    return outputs, inputs


def _source(node: Node, base: Node, places: Mapping[Node, Place]) -> Source:
    if (place := places.get(node)) is not None:
        return place
    return view_between(base.meta["val"], node.meta["val"], places[base], {})
