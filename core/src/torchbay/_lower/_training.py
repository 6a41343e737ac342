"""What autograd is told about a call, and what its backward needs to run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from torchbay._lower._halves import is_tangent
from torchbay._lower._places import LAST, Source, View, places_of
from torchbay._torch_symbols import concrete, is_number

__all__ = ["BackwardHalf", "Given", "Taken", "Training", "arranged"]


@attrs.frozen(eq=False)
class Given:
    """Where a backward half has one of its inputs from.

    Attributes:
        kind: What it is: saved by the forward, a tangent, or a number.
        index: Its position among those.
        view: How the input lies in the memory of what was saved, if that is not the input itself.
        is_state: Whether it is a parameter, a buffer or the like.
        layout: The memory format of a tangent.
    """

    kind: str
    index: int
    view: View | None = None
    is_state: bool = False
    layout: torch.memory_format = torch.contiguous_format


@attrs.frozen(eq=False)
class BackwardHalf:
    """The graph of a backward, and where its inputs come from.

    Attributes:
        graph: Takes state first, then other tensors, tangents and numbers. Returns the gradients.
        given: Where each of its inputs comes from.
        reached: The tangents that each gradient depends on; without any of them it is None.
    """

    graph: GraphModule
    given: tuple[Given, ...]
    reached: tuple[frozenset[int], ...]


@attrs.frozen(eq=False)
class Training:
    """What surrounds the forward half of a call whose result needs gradients.

    Attributes:
        roots: Where the tensors stand that autograd differentiates.
        saved: What the backward needs besides roots.
        saved_roots: The roots that it needs.
        numbers: The numbers that it needs.
        written: The inputs that get a root as their new value, with its position.
        wanted: The inputs that get gradients.
        backward: The backward half.
        saved_bytes: How much memory that takes which is no input, as in the observed call.
        scalars: The roots that are scalars, as a loss is.
        groups: The roots that go together: a backward of one lets go of what the others need.
        private: The outputs of the last graph that only the backward takes.
    """

    roots: tuple[Source, ...]
    saved: tuple[Source, ...]
    saved_roots: tuple[int, ...]
    numbers: tuple[Source, ...]
    written: tuple[tuple[int, int], ...]
    wanted: tuple[int, ...]
    backward: BackwardHalf
    saved_bytes: int
    scalars: frozenset[int]
    groups: tuple[frozenset[int], ...]
    private: frozenset[int] = frozenset()

    def hiding(self, shown: Iterable[Source]) -> Training:
        """Return the same, given what else of the last graph's outputs is used."""
        used = {*_outputs_in(shown), *_outputs_in(self.roots), *_outputs_in(self.numbers)}
        return attrs.evolve(self, private=frozenset(_outputs_in(self.saved)) - used)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is found before autograd is told."""
        return (*self.roots, *self.saved, *self.numbers)


def _outputs_in(sources: Iterable[Source]) -> list[int]:
    places = (place for source in sources for place in places_of(source))
    return [place.index for place in places if place.level == LAST]


@attrs.define(eq=False)
class Taken:
    """Collects what a backward half takes from its forward half."""

    saved: list[Source] = attrs.field(factory=list)
    roots: list[int] = attrs.field(factory=list)
    numbers: list[Source] = attrs.field(factory=list)
    bytes: int = 0

    def tensor(self, source: Source, node: Node | None = None, *, is_state: bool = False) -> Given:
        """Take a tensor; one that is no input takes memory that is kept for it."""
        self.saved.append(source)
        self.bytes += bytes_of(node.meta["val"]) if node is not None else 0
        return Given("saved", len(self.saved) - 1, is_state=is_state)

    def root(self, number: int, view: View | None) -> Given:
        """Take a root, or a view of one."""
        if number not in self.roots:
            self.roots.append(number)
        return Given("root", self.roots.index(number), view)

    def located(self, given: Sequence[Given]) -> tuple[Given, ...]:
        """Return where inputs come from, once everything has been taken: roots are saved last."""
        first = len(self.saved)
        return tuple(
            attrs.evolve(g, kind="saved", index=first + g.index) if g.kind == "root" else g
            for g in given
        )

    def number(self, source: Source) -> Given:
        """Take a number."""
        self.numbers.append(source)
        return Given("number", len(self.numbers) - 1)


def arranged(half: GraphModule, given: Mapping[Node, Given]) -> tuple[GraphModule, list[Given]]:
    """Return a backward half with its inputs in the order that backends are promised.

    Args:
        half: The half as it was split off.
        given: Where each of its inputs comes from that are no tangents.
    """
    inputs = list(half.graph.find_nodes(op="placeholder"))
    tangents = [node for node in inputs if is_tangent(node)]
    origins = {**given, **{node: _tangent(node, i) for i, node in enumerate(tangents)}}
    used = [node for node in inputs if node.users]
    used.sort(key=lambda node: _rank(node, origins[node]))
    graph, copies = Graph(), {}
    for node in used:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in half.graph.nodes:
        if node.op == "output":
            graph.output(tuple(copies[gradient] for gradient in node.args[0]))
        elif node not in copies and node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return GraphModule(half, graph), [origins[node] for node in used]


def _tangent(node: Node, index: int) -> Given:
    is_contiguous = node.meta["val"].is_contiguous()
    layout = torch.contiguous_format if is_contiguous else torch.channels_last
    return Given("tangent", index, layout=layout)


def bytes_of(value: torch.Tensor) -> int:
    """Return how many bytes the elements of a fake take, with the sizes of the observed call."""
    elements: int = math.prod(concrete(size) or 1 for size in value.shape)
    return elements * value.element_size()


def _rank(node: Node, given: Given) -> int:
    if is_number(node.meta["val"]):
        return 4
    return 3 if given.kind == "tangent" else int(not given.is_state)
