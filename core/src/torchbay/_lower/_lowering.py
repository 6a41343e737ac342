"""A functional graph is taken apart into what is computed and what surrounds it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._lower._functional import writes
from torchbay._lower._halves import Halves
from torchbay._lower._places import (
    INPUTS,
    LAST,
    ROOTS,
    Number,
    Place,
    Source,
    View,
    base_of,
    is_alike,
    symbols_of_view,
    view_between,
)
from torchbay._lower._prune import has_effect, prune
from torchbay._lower._stages import Part, Stage, Stages, without_unused_inputs
from torchbay._lower._training import BackwardHalf, Given, Taken, Training, arranged
from torchbay._reason import CannotServe
from torchbay._torch_compat import storage_id
from torchbay._torch_symbols import is_number, number_leaves
from torchbay._trace import Trace
from torchbay.plugin import Capabilities

__all__ = ["Lowered", "Lowering"]

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Lowered:
    """What is left to compile, and what surrounds it on every call.

    Attributes:
        stages: What runs first, each up to a branch on data.
        last: The graph that runs once every branch is taken, or None when nothing is computed.
        outputs: The fakes of what that graph returns.
        results: How each tensor or number of the result is found.
        written: The inputs a call changes and where their values are found, in the order of the
            epilogue. Empty if the last graph writes them itself.
        mutated: The inputs that the last graph writes itself.
        training: What else surrounds it if the result needs gradients.
    """

    stages: tuple[Stage, ...]
    last: Part | None
    outputs: tuple[torch.Tensor, ...]
    results: tuple[Source, ...]
    written: tuple[tuple[int, Place], ...]
    mutated: frozenset[int]
    training: Training | None = None

    @property
    def changed(self) -> tuple[int, ...]:
        """The inputs that a call changes."""
        by_autograd = self.training.written if self.training is not None else ()
        found = [*self.written, *by_autograd]
        return (*(position for position, _ in found), *sorted(self.mutated))


class Lowering:
    """Takes a functional graph apart into what is computed and what surrounds it."""

    def __init__(
        self,
        trace: Trace,
        graph: GraphModule,
        capabilities: Capabilities,
        halves: Halves | None = None,
    ) -> None:
        self._trace = trace
        self._graph = graph
        self._halves = halves
        self._roots: dict[Node, int] = {}
        self._outputs: list[Node] = []
        self._handed_out: set[Place] = set()
        inputs = graph.graph.find_nodes(op="placeholder")
        self._position = {node: i for i, node in enumerate(inputs)}
        copies = writes(graph)
        is_writing = capabilities.mutation and not _swaps(copies)
        self._refuse_shared_memory(copies)
        self._written = {target: self._position[target] for target in copies}
        by_autograd = trace.joint.written if trace.joint is not None else {}
        if by_autograd:
            copies, is_writing = self._without_those(copies, by_autograd), False
        returned = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        self._returned = returned[: trace.result_count]
        rest = iter(returned[trace.result_count :])
        self._reads = [[_original(next(rest)) for _ in gate.reads] for gate in trace.gates]
        self._differentiated = list(rest)
        self._kept = list(copies.values()) if is_writing else []
        self._values = {} if is_writing else self._without_copies(copies)
        self._mutated = [self._position[target] for target in copies] if is_writing else []
        self._stages = Stages(graph, trace.inputs)

    def lowered(self) -> Lowered:
        """Return the parts."""
        for gate, nodes in zip(self._trace.gates, self._reads, strict=True):
            self._stages.add(gate, nodes)
        training = self._training()
        results = self._results()
        written = tuple((i, self._value(node)) for i, node in self._values.items())
        outputs = (node for node in self._outputs if node.op != "placeholder")
        rest = list(dict.fromkeys([*self._stages.rest(), *outputs, *self._kept]))
        is_needed = bool(rest) and (self._outputs or self._kept or any(map(has_effect, rest)))
        last = self._stages.part(rest, self._outputs) if is_needed else None
        if last is not None:
            prune(last.graph.graph)
            last = without_unused_inputs(last)
        found = [*results, *(place for _, place in written)]
        if training is not None:
            training = training.hiding(found)
            found += training.sources
        return Lowered(
            self._stages.stages(last, found),
            last,
            tuple(node.meta["val"] for node in self._outputs),
            results,
            written,
            frozenset(self._mutated),
            training,
        )

    def _results(self) -> tuple[Source, ...]:
        """Return where each result is found.

        A result that eager would return as a view of an input or of another result is made from
        that.
        """
        captured = list(self._trace.graph.graph.output_node().args[0])  # type: ignore[arg-type]
        fakes = self._trace.fakes[: len(self._trace.inputs)]
        inputs = {storage_id(fake): i for i, fake in enumerate(fakes)}
        tensors = [n.meta["val"] for n in self._returned if not is_number(n.meta["val"])]
        times = collections.Counter(map(storage_id, tensors))
        found = []
        for index, (before, node) in enumerate(zip(captured, self._returned, strict=False)):
            value = before.meta["val"]
            if is_number(value):
                found.append(self._number(node))
            elif (place := _input_of(value, inputs, fakes)) is not None:
                view = self._view(fakes[place.index], value, place)
                needs_gradient = index in self._trace.differentiable
                found.append(attrs.evolve(view, is_detached=not needs_gradient))
            elif (root := self._root_among(index, node)) is not None:
                found.append(root)
            else:
                found.append(self._result(node, times))
        return tuple(found)

    def _root_among(self, index: int, node: Node) -> Source | None:
        """Return how a result is found that is, or is a view of, what autograd differentiates."""
        joint = self._trace.joint
        if joint is not None and (number := joint.root_of.get(index)) is not None:
            root = self._differentiated[number]
            place = Place(ROOTS, number)
            return place if node is root else self._view(root.meta["val"], node.meta["val"], place)
        if (shared := self._sharing_root(node)) is None:
            return None
        number, view = shared
        # What needs no gradient must not get one from what it shares memory with.
        view = view or self._view(node.meta["val"], node.meta["val"], Place(ROOTS, number))
        return attrs.evolve(view, is_detached=True)

    def _sharing_root(self, node: Node) -> tuple[int, View | None] | None:
        """Return the root whose memory a node lies in, if any, and how unless it is the root."""
        value = node.meta["val"]
        for root, number in self._roots.items():
            base = root.meta["val"]
            if node is root:
                return number, None
            if storage_id(base) == storage_id(value) and is_alike(base, value):
                return number, self._view(base, value, Place(ROOTS, number))
        return None

    def _training(self) -> Training | None:
        """Return what autograd is told, and what its backward takes."""
        joint, halves = self._trace.joint, self._halves
        if joint is None or halves is None:
            return None
        count = len(joint.roots)
        nodes, saved = self._differentiated[:count], self._differentiated[count:]
        roots = tuple(map(self._root, nodes))
        self._roots = {node: number for number, node in enumerate(nodes)}
        taken = Taken()
        placeholders = (n for n in halves.backward.graph.nodes if n.op == "placeholder")
        given = {
            n: self._given(n, node, taken) for n, node in zip(placeholders, saved, strict=False)
        }
        graph, arranged_given = arranged(halves.backward, given)
        return Training(
            roots,
            tuple(taken.saved),
            tuple(taken.roots),
            tuple(taken.numbers),
            tuple(joint.written.items()),
            joint.wanted,
            BackwardHalf(graph, taken.located(arranged_given), joint.reached),
            taken.bytes,
            frozenset(number for number, fake in enumerate(joint.roots) if fake.dim() == 0),
            joint.groups,
        )

    def _root(self, node: Node) -> Place:
        """Return where a root stands, in memory that is not handed out otherwise."""
        base, place = base_of(node), self._stages.place(node)
        if place is not None and node.op != "placeholder":
            return place
        is_own = base.op != "placeholder" and self._stages.place(base) is None
        return Place(LAST, self._output(node if is_own else self._copied(node)))

    def _given(self, taking: Node, node: Node, taken: Taken) -> Given:
        """Return where an input of the backward half has a value of the forward half from."""
        if is_number(node.meta["val"]):
            return taken.number(self._number(node))
        if (shared := self._sharing_root(node)) is not None:
            return taken.root(*shared)
        base = base_of(node)
        if node.op == "placeholder" and node not in self._written and _is_convolved(taking):
            # Handed through, so that a backend which lays it out anew does so once.
            return taken.tensor(Place(LAST, self._output(node)))
        if base.op == "placeholder" and base not in self._written:
            place = Place(INPUTS, self._position[base])
            view = self._as_view(base, node, place)
            if isinstance(view, View) and not symbols_of_view(node.meta["val"]):
                # Made when it is needed: most backwards want weights transposed.
                return attrs.evolve(taken.tensor(place), view=view)
            return taken.tensor(view, is_state=self._is_state(place) and node is base)
        if (stage := self._stages.place(base)) is not None and base.op != "placeholder":
            return taken.tensor(self._as_view(base, node, stage), node)
        node = self._copied(node) if base.op == "placeholder" else node
        return taken.tensor(Place(LAST, self._output(node)), node)

    def _as_view(self, base: Node, node: Node, place: Place) -> Source:
        return place if node is base else self._view(base.meta["val"], node.meta["val"], place)

    def _is_state(self, place: Place) -> bool:
        inputs = self._trace.inputs
        return place.index < len(inputs) and inputs[place.index].is_state

    def _number(self, node: Node) -> Source:
        leaves = number_leaves(node)
        return Number(node, {leaf: self._tensor(leaf) for leaf in leaves})

    def _tensor(self, node: Node) -> Source:
        """Return where a tensor is found that a number is read from."""
        base = base_of(node)
        if self._stages.place(base) is not None:
            return self._stages.locate(node)
        return Place(LAST, self._output(node))

    def _result(self, node: Node, times: Mapping[int, int]) -> Source:
        base = base_of(node)
        if base.op == "placeholder":
            # Of another dtype or the like than the input, hence no view of it by strides.
            return Place(LAST, self._output(self._copied(node)))
        if (place := self._stages.place(base)) is not None:
            is_first = place not in self._handed_out and base is node
            self._handed_out.add(place)
            return place if is_first else self._view(base.meta["val"], node.meta["val"], place)
        if times[storage_id(node.meta["val"])] == 1:
            base = node
        is_new = base not in self._outputs
        place = Place(LAST, self._output(base))
        if base is node and is_new:
            return place
        return self._view(base.meta["val"], node.meta["val"], place)

    def _view(self, base: torch.Tensor, value: torch.Tensor, place: Place) -> View:
        return view_between(base, value, place, self._stages.numbers_in(value, self._number))

    def _output(self, node: Node) -> int:
        """Return the position of a node among the outputs, to which it is added."""
        if node not in self._outputs:
            self._outputs.append(node)
        return self._outputs.index(node)

    def _value(self, node: Node) -> Place:
        """Return where the value is found that an input is to have."""
        if (place := self._stages.place(node)) is not None and node.op != "placeholder":
            return place
        is_computed = base_of(node).op != "placeholder"
        return Place(LAST, self._output(node if is_computed else self._copied(node)))

    def _copied(self, node: Node) -> Node:
        """Return a copy of a node: an output that is an input would alias it."""
        graph = self._graph.graph
        # Before anything is written: what is copied is what the inputs held.
        end = self._kept[0] if self._kept else graph.output_node()
        with graph.inserting_before(end):
            clone = graph.call_function(aten.clone.default, (node,))
        clone.meta = {**node.meta, "val": node.meta["val"].clone()}
        self._stages.renumber()
        return clone

    def _without_those(
        self, copies: dict[Node, Node], positions: Mapping[int, int]
    ) -> dict[Node, Node]:
        """Take the copies into these inputs out of the graph; return the others."""
        left = {}
        for target, node in copies.items():
            if self._position[target] in positions:
                self._graph.graph.erase_node(node)
            else:
                left[target] = node
        return left

    def _without_copies(self, copies: dict[Node, Node]) -> dict[int, Node]:
        """Take the last copies out of the graph; return the value each input is to have."""
        values: dict[int, Node] = {}
        for target, node in copies.items():
            values[self._position[target]] = node.args[1]  # type: ignore[assignment]
            node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
            self._graph.graph.erase_node(node)
        return values

    def _refuse_shared_memory(self, copies: dict[Node, Node]) -> None:
        """Refuse a changed input that shares memory with another input."""
        storages = [storage_id(entry.tensor) for entry in self._trace.inputs]
        for target in copies:
            position = self._position[target]
            if storages.count(storages[position]) > 1:
                path = self._trace.inputs[position].path
                raise CannotServe(f"{path} is changed and shares memory with another tensor")


def _is_convolved(node: Node) -> bool:
    return any(user.target is aten.convolution_backward.default for user in node.users)


def _swaps(copies: dict[Node, Node]) -> bool:
    """Whether an input is to get what another changed input held.

    The core writes those: compilers take the copy in between for one that does nothing.
    """
    sources = {target: _copied_from(node.args[1]) for target, node in copies.items()}
    return any(source in copies and source is not target for target, source in sources.items())


def _copied_from(value: Any) -> Any:
    """Return the node whose elements a node holds, in whatever memory."""
    while base_of(value) is not value or value.target in _COPYING:
        value = value.args[_COPYING.get(value.target, 0)]
    return value


_COPYING = {
    aten.clone.default: 0,
    aten._to_copy.default: 0,  # noqa: SLF001 - an operator's name
    aten.copy.default: 1,
}
"""Operators that only copy, with the position of what they copy."""


def _original(read: Node) -> Node:
    """Return what a gate's copy was made of, which nothing changes in a functional graph."""
    if read.target is aten.clone.default and read.args[0].op != "get_attr":  # type: ignore[union-attr]
        return read.args[0]  # type: ignore[return-value]
    return read


def _input_of(value: Any, inputs: Mapping[int, int], fakes: Sequence[Any]) -> Place | None:
    """Return the input in whose memory a fake lies, if strides alone lead to it."""
    position = inputs.get(storage_id(value))
    if position is None or not is_alike(fakes[position], value):
        return None
    return Place(INPUTS, position)
