"""Cutting a graph where data decides which way the program goes.

What a gate needs is computed by a stage; the rest of the graph comes last. A stage is the same for
every specialization that reaches it, and what it computed is handed on: nothing runs twice.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from torchbay._lower._places import (
    INPUTS,
    Number,
    Place,
    Route,
    Source,
    base_of,
    defining_nodes,
    places_of,
    symbols_of_view,
    view_between,
)
from torchbay._lower._prune import is_random, named_arguments
from torchbay._observe import Gate
from torchbay._torch_symbols import is_number, number_leaves, number_source
from torchbay._trace import Input, TracedGate

__all__ = ["Part", "Stage", "Stages", "without_unused_inputs"]


@attrs.frozen(eq=False)
class Part:
    """A graph to be compiled, and where its inputs stand."""

    graph: GraphModule
    takes: tuple[Place, ...]


@attrs.frozen(eq=False)
class Stage:
    """What has to be computed before a gate can be read, and the gate.

    Attributes:
        level: Its number; stages count from 1.
        needed: Which of its operators the gate and later parts need, by number.
        key: Equal for stages that compute the same from the same and read the same.
        gate: The gate.
        text: The gate as the graph computes it, readable.
        reads: What the gate reads.
        is_random: Whether it draws random numbers.
        values: The fake of what each of its operators computes.
        part: Returns the graph that computes these of its operators, or None if it has none.
    """

    level: int
    needed: frozenset[int]
    key: str
    gate: Gate
    text: str
    reads: tuple[Source, ...]
    is_random: bool
    values: tuple[Any, ...]
    part: Callable[[Sequence[int]], Part | None]

    def source(self, route: Route) -> str:
        """Return an expression that reads the gate."""
        values = ", ".join(read.source(route) for read in self.reads)
        if self.gate.is_condition:
            return values
        return f"{route.name(self.gate.read)}({values})"


class Stages:
    """Assigns the operators of a graph to stages, gate by gate, and makes graphs of them."""

    def __init__(self, module: GraphModule, inputs: Sequence[Input]) -> None:
        self._module = module
        self._order = {node: i for i, node in enumerate(module.graph.nodes)}
        self._inputs = inputs
        self._members: list[list[Node]] = []
        self._reads: list[tuple[TracedGate, Sequence[Node]]] = []
        self._definitions = defining_nodes(module.graph)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._places = {node: Place(INPUTS, i) for i, node in enumerate(placeholders)}

    def add(self, gate: TracedGate, reads: Sequence[Node]) -> None:
        """Begin a stage for what a gate reads and no earlier stage computes."""
        found = self._missing(leaf for read in reads for leaf in _leaves(read))
        drawn = [self._order[node] for node in found if is_random(node)]
        if drawn:
            # Random numbers are drawn in program order.
            found |= self._missing(
                n for n, i in self._order.items() if is_random(n) and i < max(drawn)
            )
        members = sorted(found, key=self._order.__getitem__)
        self._members.append(members)
        self._reads.append((gate, reads))
        for index, node in enumerate(members):
            self._places[node] = Place(len(self._members), index)

    def renumber(self) -> None:
        """Take up nodes that were added to the graph."""
        self._order = {node: i for i, node in enumerate(self._module.graph.nodes)}

    def place(self, node: Node) -> Place | None:
        """Return where a node stands that is an input or that a stage computes."""
        return self._places.get(node)

    def locate(self, node: Node) -> Source:
        """Return how emitted code gets at a node once the stages have run."""
        if (place := self._places.get(node)) is not None:
            return place
        if is_number(node.meta["val"]):
            return Number(node, {leaf: self.locate(leaf) for leaf in number_leaves(node)})
        base = base_of(node)
        value = node.meta["val"]
        numbers = self.numbers_in(value, self.locate)
        return view_between(base.meta["val"], value, self._places[base], numbers)

    def numbers_in(
        self, value: torch.Tensor, locate: Callable[[Node], Source]
    ) -> dict[Any, Source]:
        """Return how the numbers read from data are found that a view's sizes depend on."""
        symbols = symbols_of_view(value) & self._definitions.keys()
        return {symbol: locate(self._definitions[symbol]) for symbol in symbols}

    def rest(self) -> list[Node]:
        """Return the operators that no stage computes."""
        return [n for n in self._order if _is_heavy(n) and n not in self._places]

    def part(self, members: Sequence[Node], outputs: Sequence[Node]) -> Part:
        """Return a graph of these operators, which takes what stages computed as inputs."""
        inside, taken = self._closure([*members, *outputs], set(members))
        takes = sorted(taken, key=self._rank)
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in takes:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        graph.lint()
        return Part(GraphModule(self._module, graph), tuple(self._places[n] for n in takes))

    def stages(self, last: Part | None, results: Iterable[Source]) -> tuple[Stage, ...]:
        """Return the stages, given what follows them."""
        reads = [tuple(map(self.locate, nodes)) for _, nodes in self._reads]
        used = [*(last.takes if last is not None else ()), *_places_in(results)]
        used += [place for read in reads for place in _places_in(read)]
        used += [self._places[n] for group in self._members for n in self._closure(group)[1]]
        needed: dict[int, set[int]] = collections.defaultdict(set)
        for place in used:
            needed[place.level].add(place.index)
        return tuple(
            self._stage(level, read, frozenset(needed[level]))
            for level, read in enumerate(reads, start=1)
        )

    def _stage(self, level: int, reads: tuple[Source, ...], needed: frozenset[int]) -> Stage:
        members, (traced, nodes) = self._members[level - 1], self._reads[level - 1]

        def part(outputs: Sequence[int]) -> Part | None:
            return self.part(members, [members[i] for i in outputs]) if members else None

        text = ", ".join(number_source(node, str, _name) for node in nodes)
        key = self._key(members, nodes) + traced.gate.reads_as(text)
        return Stage(
            level,
            needed,
            key,
            traced.gate,
            text,
            reads,
            any(map(is_random, members)),
            tuple(node.meta.get("val") for node in members),
            part,
        )

    def _missing(self, wanted: Iterable[Node]) -> set[Node]:
        """Return the operators still to be computed before these nodes are there."""
        found: set[Node] = set()
        seen: set[Node] = set()
        pending = list(wanted)
        while pending:
            node = pending.pop()
            if node in seen or node in self._places:
                continue
            seen.add(node)
            pending += node.all_input_nodes
            if _is_heavy(node):
                found.add(node)
            if isinstance(node.meta.get("val"), (tuple, list)):
                # The parts of what an operator returned are handed on, never the whole.
                pending += [user for user in node.users if user.target is operator.getitem]
        return found

    def _closure(
        self, wanted: Iterable[Node], members: set[Node] | None = None
    ) -> tuple[list[Node], set[Node]]:
        """Return what has to be in a graph of these nodes, in order, and what it takes."""
        wanted = list(wanted)
        members = set(wanted) if members is None else members
        inside: set[Node] = set()
        taken: set[Node] = set()
        pending = list(wanted)
        while pending:
            node = pending.pop()
            if node in self._places and node not in members:
                taken.add(node)
            elif node not in inside:
                inside.add(node)
                pending += node.all_input_nodes
        return sorted(inside, key=self._order.__getitem__), taken

    def _rank(self, node: Node) -> tuple[int, int]:
        """Order inputs: state, the call's tensors, what stages computed, numbers."""
        place = self._places[node]
        if is_number(node.meta["val"]):
            return 3, self._order[node]
        if place.level != INPUTS:
            return 2, self._order[node]
        is_state = place.index < len(self._inputs) and self._inputs[place.index].is_state
        return int(not is_state), self._order[node]

    def _key(self, members: Sequence[Node], reads: Sequence[Node]) -> str:
        """Return a text that says what is computed, whatever the nodes are called."""
        inside, taken = self._closure([*members, *reads], set(members))
        names = {node: self._name_of(self._places[node]) for node in taken}
        lines = []
        for number, node in enumerate(inside):
            lines.append(_line(self._module, node, names))
            names[node] = f"<{number}>"
        return "\n".join([*lines, *(names[read] for read in reads)])

    def _name_of(self, place: Place) -> str:
        """Return a name for a place that two traces of one program agree on."""
        is_tensor = place.level == INPUTS and place.index < len(self._inputs)
        return f"<{self._inputs[place.index].key if is_tensor else place}>"


def without_unused_inputs(part: Part) -> Part:
    """Return a part that takes what its graph uses and no more."""
    takes = []
    for node, place in zip(part.graph.graph.find_nodes(op="placeholder"), part.takes, strict=True):
        if node.users:
            takes.append(place)
        else:
            part.graph.graph.erase_node(node)
    part.graph.recompile()
    return Part(part.graph, tuple(takes))


def _line(module: GraphModule, node: Node, names: Mapping[Node, str]) -> str:
    args, kwargs = named_arguments(node, names)
    target = _literal(module, node) if node.op == "get_attr" else node.target
    return f"{node.op if node.op in _ENDS else target} {args} {kwargs}"


_ENDS = ("placeholder", "output")


def _literal(module: GraphModule, node: Node) -> str:
    value = getattr(module, str(node.target))
    if isinstance(value, GraphModule):
        return _function(value)
    is_short = isinstance(value, torch.Tensor) and value.numel() <= _LONGEST
    return f"{value.dtype} {value.tolist()}" if is_short else f"object {id(value)}"


_LONGEST = 64


def _function(module: GraphModule) -> str:
    """Return a text that says what a function computes that an operator is given."""
    names = {node: f"<{number}>" for number, node in enumerate(module.graph.nodes)}
    return "\n".join(["{", *(_line(module, node, names) for node in names), "}"])


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _leaves(read: Node) -> Iterator[Node]:
    return iter(number_leaves(read)) if is_number(read.meta["val"]) else iter((read,))


def _places_in(sources: Iterable[Source]) -> Iterator[Place]:
    return (place for source in sources for place in places_of(source))


def _is_heavy(node: Node) -> bool:
    """Whether a node computes something worth handing on: no view, number or literal."""
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    if is_number(value) or isinstance(value, (int, float)):
        return False
    return base_of(node) is node
