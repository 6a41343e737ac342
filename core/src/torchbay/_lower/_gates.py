"""The part of a graph that decides whether the rest may run."""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule, Node

from torchbay._lower._prune import is_random, prune
from torchbay._observe import Gate
from torchbay._reason import CannotServe
from torchbay._structure import same_value

__all__ = ["GateMiss", "gate_graph"]


class GateMiss(Exception):
    """A data-dependent read came out otherwise than when the graph was captured."""

    def __init__(self, gate: Gate, seen: object) -> None:
        self.gate = gate
        self.seen = seen
        super().__init__(f"compiled for {gate}, seen {seen!r}")


class _Check(torch.nn.Module):
    """Reads a gate again and raises `GateMiss` when it comes out otherwise."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def forward(self, *tensors: torch.Tensor) -> None:
        seen = self._gate.read(*tensors)
        if not same_value(seen, self._gate.value):
            raise GateMiss(self._gate, seen)


def gate_graph(
    graph: GraphModule, gates: tuple[Gate, ...], widths: tuple[int, ...], first: int
) -> GraphModule:
    """Return a graph that computes the gates and checks each as soon as it is known.

    Args:
        graph: A functional graph whose outputs from ``first`` on are what the gates read.
        gates: The gates, in order.
        widths: How many outputs each of them reads.
        first: Position of the first gate's output.

    Raises:
        CannotServe: A gate depends on random numbers, which a replay would draw again.
    """
    module = copy.deepcopy(graph)
    reads = iter(module.graph.output_node().args[0][first:])  # type: ignore[index,arg-type]
    for position, (gate, width) in enumerate(zip(gates, widths, strict=True)):
        tensors = [next(reads) for _ in range(width)]
        name = f"gate_{position}"
        module.add_submodule(name, _Check(gate))
        with module.graph.inserting_after(max(tensors, key=list(module.graph.nodes).index)):
            module.graph.call_module(name, tuple(tensors))
    _drop_writes(module)
    module.graph.output_node().args = ((),)
    prune(module.graph)
    _refuse_random(module, gates)
    module.recompile()
    return module


def _drop_writes(module: GraphModule) -> None:
    for node in reversed(list(module.graph.nodes)):
        if node.target is torch.ops.aten.copy_.default:
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)


def _refuse_random(module: GraphModule, gates: tuple[Gate, ...]) -> None:
    if any(_is_needed(node) for node in module.graph.nodes if is_random(node)):
        raise CannotServe("a branch depends on random numbers", where=gates[0].where)
    for node in reversed(list(module.graph.nodes)):
        if is_random(node):
            module.graph.erase_node(node)
    prune(module.graph)


def _is_needed(node: Node) -> bool:
    return bool(node.users)
