"""Fourth stage: the graph becomes what one backend declared it takes."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._lower._aliases import View, base_of, remake, view_between, view_of_input
from torchbay._lower._composites import kernels_of, recompose
from torchbay._lower._functional import functional, writes
from torchbay._lower._gates import GateMiss, gate_graph
from torchbay._lower._prune import has_compute, prune, with_outputs
from torchbay._lower._regions import Region, cut
from torchbay._reason import CannotServe
from torchbay._torch_compat import storage_id
from torchbay._trace import Trace
from torchbay.plugin import Capabilities, Decompositions

__all__ = ["GateMiss", "Lowered", "Region", "View", "cut", "lower", "lower_region", "remake"]

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Lowered:
    """What is left to compile, and what surrounds it on every call.

    Attributes:
        graph: The functional graph for the backend, or None when nothing is computed.
        inputs: Which of the trace's inputs it takes, in order.
        results: For each tensor of the result, the output it is, or the view.
        result_count: How many of the outputs the results need.
        written: The inputs a call changes, in the order of the epilogue.
        by_backend: Whether the graph itself writes them; else its last outputs are their values.
        gates: The graph that decides whether this one applies, or None.
        gate_inputs: Which of the trace's inputs that one takes.
    """

    graph: GraphModule | None
    inputs: tuple[int, ...]
    results: tuple[int | View, ...]
    result_count: int
    written: tuple[int, ...]
    by_backend: bool
    gates: GraphModule | None
    gate_inputs: tuple[int, ...]


def lower(trace: Trace, capabilities: Capabilities) -> Lowered:
    """Lower a trace for a backend with these capabilities.

    Raises:
        CannotServe: The graph changes tensors in a way that cannot be expressed, or a gate depends
            on random numbers.
    """
    table = _table(capabilities.decompositions)
    if table is not None and capabilities.keep:
        kept = kernels_of(capabilities.keep)
        table = {target: rule for target, rule in table.items() if target not in kept}
    graph = functional(trace.graph, trace.fakes, trace.fake_mode, table)
    gates = None
    if trace.gates:
        # Gates run as plain PyTorch, whatever the backend wants decomposed.
        plain = (
            graph if table is None else functional(trace.graph, trace.fakes, trace.fake_mode, None)
        )
        gates = gate_graph(plain, trace.gates, trace.gate_widths, trace.result_count)
    graph = copy.deepcopy(graph) if graph is trace.graph else graph
    prune(graph.graph)
    recompose(graph, capabilities.keep)
    places = {node: i for i, node in enumerate(_placeholders(graph))}
    copies = writes(graph)
    written = tuple(places[target] for target in copies)
    _refuse_shared_memory(trace, written)
    results, outputs = _results(trace, graph)
    result_count = len(outputs)
    if not capabilities.mutation:
        outputs += _as_outputs(graph, copies)
    graph = with_outputs(graph, outputs)
    return Lowered(
        graph if has_compute(graph.graph) else None,
        _drop_unused_inputs(graph),
        results,
        result_count,
        written,
        capabilities.mutation,
        gates,
        _drop_unused_inputs(gates) if gates is not None else (),
    )


def _results(trace: Trace, graph: GraphModule) -> tuple[tuple[int | View, ...], list[Node]]:
    """Return where each result is found, and what the graph must return for it.

    A result that eager would return as a view of an input or of another result is made from that.
    """
    captured = list(trace.graph.graph.output_node().args[0])[: trace.result_count]  # type: ignore[arg-type]
    lowered = list(graph.graph.output_node().args[0])[: trace.result_count]  # type: ignore[arg-type]
    inputs = {storage_id(fake): i for i, fake in enumerate(trace.fakes)}
    times = collections.Counter(storage_id(node.meta["val"]) for node in lowered)
    outputs: list[Node] = []
    results: list[int | View] = []
    for before, node in zip(captured, lowered, strict=True):
        view = view_of_input(before.meta["val"], inputs, trace.fakes)
        results.append(view or _place(graph, node, outputs, times))
    return tuple(results), outputs


def _place(
    graph: GraphModule, node: Node, outputs: list[Node], times: Mapping[int, int]
) -> int | View:
    """Return where a result is found among the outputs, to which it is added."""
    base = base_of(node)
    if base.op == "placeholder":
        node = base = _copied(graph, node)
    elif times[storage_id(node.meta["val"])] == 1:
        base = node
    is_new = base not in outputs
    if is_new:
        outputs.append(base)
    position = outputs.index(base)
    if base is node and is_new:
        return position
    return view_between(base.meta["val"], node.meta["val"], position, of_input=False)


def lower_region(region: Region, mode: Any, capabilities: Capabilities) -> GraphModule:
    """Lower a region once more, for the backend that gets what another one left."""
    fakes = tuple(node.meta["val"] for node in region.takes)
    graph = functional(region.graph, fakes, mode, _table(capabilities.decompositions))
    return with_outputs(graph, list(graph.graph.output_node().args[0]))  # type: ignore[arg-type]


@functools.cache
def _table(decompositions: Callable[[], Decompositions] | None) -> Decompositions | None:
    return decompositions() if decompositions is not None else None


def _placeholders(graph: GraphModule) -> list[Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _as_outputs(graph: GraphModule, copies: dict[Node, Node]) -> list[Any]:
    """Turn each last copy into the value that was to be copied."""
    values = [_computed(graph, node.args[1]) for node in copies.values()]
    for node in copies.values():
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
        graph.graph.erase_node(node)
    return values


def _computed(graph: GraphModule, value: Any) -> Any:
    """Return a node that is no input: an output that is one would alias it."""
    return _copied(graph, value) if value.op == "placeholder" else value


def _copied(graph: GraphModule, node: Node) -> Node:
    with graph.graph.inserting_before(graph.graph.output_node()):
        clone = graph.graph.call_function(aten.clone.default, (node,))
    clone.meta = {**node.meta, "val": node.meta["val"].clone()}
    return clone


def _drop_unused_inputs(graph: GraphModule) -> tuple[int, ...]:
    """Erase placeholders nobody uses; return the positions of those that stay."""
    kept = []
    for position, node in enumerate(_placeholders(graph)):
        if node.users:
            kept.append(position)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return tuple(kept)


def _refuse_shared_memory(trace: Trace, written: tuple[int, ...]) -> None:
    """Refuse a changed input that shares memory with another input."""
    storages = [storage_id(entry.tensor) for entry in trace.inputs]
    for position in written:
        if storages.count(storages[position]) > 1:
            path = trace.inputs[position].path
            raise CannotServe(f"{path} is changed and shares memory with another tensor")
