"""Cutting a graph into the parts a backend takes and the parts it leaves to another."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from torchbay._lower._prune import is_random, is_write

__all__ = ["Region", "cut"]


@attrs.frozen(eq=False)
class Region:
    """A part of a graph, to be compiled on its own.

    Attributes:
        graph: The part, with what it takes from the rest as inputs.
        takes: The nodes of the whole graph that it takes, in order.
        gives: The nodes of the whole graph that it computes for the rest, in order.
        is_supported: Whether the backend takes it.
        operators: The operators it calls, readable.
    """

    graph: GraphModule
    takes: tuple[Node, ...]
    gives: tuple[Node, ...]
    is_supported: bool
    operators: tuple[str, ...]


def cut(
    module: GraphModule, supports: Callable[[Node], bool], state: frozenset[Node]
) -> list[Region]:
    """Cut a graph into as few regions as its order allows, each all supported or all not.

    Each region takes what it needs of ``state`` first.
    Random operators and writes keep their order: unless everything is supported, none of them is
    in a supported region, and no region is moved past one.
    """
    compute = [node for node in module.graph.nodes if node.op == "call_function"]
    supported = {node for node in compute if _source(node) is node and supports(node)}
    is_whole = all(_source(node) in supported for node in compute)
    if not is_whole:
        supported -= {node for node in supported if is_random(node) or is_write(node)}
    supported |= {node for node in compute if _source(node) in supported}
    if is_whole:
        return [_region(module, compute, state, is_supported=True)]
    groups = _grouped(module, compute, supported)
    return [_region(module, nodes, state, is_supported=nodes[0] in supported) for nodes in groups]


def _source(node: Node) -> Node:
    """Return the node a ``getitem`` takes apart, or the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


class _Supported(OperatorSupportBase):
    def __init__(self, nodes: set[Node]) -> None:
        self._nodes = nodes

    def is_node_supported(self, _submodules: Mapping[str, Any], node: Node) -> bool:
        return node in self._nodes


def _grouped(module: GraphModule, compute: list[Node], supported: set[Node]) -> list[list[Node]]:
    """Put nodes into groups that can run one after the other."""
    partitioner = CapabilityBasedPartitioner(
        module, _Supported(supported), allows_single_node_partition=True
    )
    unit = {
        node: index
        for index, partition in enumerate(partitioner.propose_partitions())
        for node in partition.nodes
    }
    for node in compute:
        unit.setdefault(node, len(compute) + len(unit))
    needs = _needs_of_units(compute, unit)
    kind = {unit[node]: node in supported for node in compute}
    orders = [_order_of_units(needs, kind, start_with=first) for first in (True, False)]

    def runs_of(place: Mapping[int, int]) -> list[list[Node]]:
        return _runs(sorted(compute, key=lambda node: place[unit[node]]), supported)

    candidates = [runs_of(place) for place in orders if place is not None]
    # Without any, only the order of random numbers and writes stands against larger regions.
    return min(candidates, key=len, default=_runs(compute, supported))


def _needs_of_units(compute: list[Node], unit: Mapping[Node, int]) -> dict[int, set[int]]:
    """Return which units must run before each one."""
    needs: dict[int, set[int]] = {unit[node]: set() for node in compute}
    for node in compute:
        needs[unit[node]] |= {unit[n] for n in node.all_input_nodes if n in unit} - {unit[node]}
    ordered = [unit[node] for node in compute if is_random(node) or is_write(node)]
    for first, second in itertools.pairwise(ordered):
        needs[second] |= {first} - {second}
    return needs


def _order_of_units(
    needs: Mapping[int, set[int]], kind: Mapping[int, bool], *, start_with: bool
) -> dict[int, int] | None:
    """Place units after what they need, those of one kind together; None if that is a circle."""
    place: dict[int, int] = {}
    wanted = start_with
    while len(place) < len(needs):
        ready = [u for u, others in needs.items() if u not in place and others <= place.keys()]
        if not ready:
            return None
        chosen = next((u for u in ready if kind[u] == wanted), ready[0])
        wanted = kind[chosen]
        place[chosen] = len(place)
    return place


def _runs(nodes: Iterable[Node], supported: set[Node]) -> list[list[Node]]:
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and (groups[-1][0] in supported) == (node in supported):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _region(
    module: GraphModule, nodes: Sequence[Node], state: frozenset[Node], *, is_supported: bool
) -> Region:
    inside = set(nodes)
    literals = {n for node in nodes for n in node.all_input_nodes if n.op == "get_attr"}
    needed = (n for node in nodes for n in node.all_input_nodes)
    outside = dict.fromkeys(n for n in needed if n not in inside and n not in literals)
    takes = tuple(sorted(outside, key=lambda node: node not in state))
    gives = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in [n for n in module.graph.nodes if n in inside or n in literals]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in gives))
    graph.lint()
    operators = tuple(str(node.target) for node in nodes if node.target is not operator.getitem)
    return Region(GraphModule(module, graph), takes, gives, is_supported, operators)
