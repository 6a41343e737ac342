"""Fourth stage: the graph becomes what one backend declared it takes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._lower._composites import kernels_of, recompose
from torchbay._lower._functional import functional, writes
from torchbay._lower._gates import GateMiss, gate_graph
from torchbay._lower._prune import has_compute, prune, with_outputs
from torchbay._lower._regions import Region, cut
from torchbay._reason import CannotServe
from torchbay._torch_compat import storage_id
from torchbay._trace import Trace
from torchbay.plugin import Capabilities, Decompositions

__all__ = ["GateMiss", "Lowered", "Region", "cut", "lower", "lower_region"]

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Lowered:
    """What is left to compile, and what surrounds it on every call.

    Attributes:
        graph: The functional graph for the backend, or None when nothing is computed.
        inputs: Which of the trace's inputs it takes, in order.
        written: The inputs a call changes, in the order of the epilogue.
        by_backend: Whether the graph itself writes them; else its last outputs are their values.
        gates: The graph that decides whether this one applies, or None.
        gate_inputs: Which of the trace's inputs that one takes.
    """

    graph: GraphModule | None
    inputs: tuple[int, ...]
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
        gates = gate_graph(
            functional(trace.graph, trace.fakes, trace.fake_mode, None),
            trace.gates,
            trace.gate_widths,
            trace.result_count,
        )
    graph = copy.deepcopy(graph) if graph is trace.graph else graph
    prune(graph.graph)
    recompose(graph, capabilities.keep)
    places = {node: i for i, node in enumerate(_placeholders(graph))}
    copies = writes(graph)
    written = tuple(places[target] for target in copies)
    _refuse_aliases(trace, written)
    results = list(graph.graph.output_node().args[0])[: trace.result_count]  # type: ignore[arg-type]
    if not capabilities.mutation:
        results += _as_outputs(graph, copies)
    graph = with_outputs(graph, results)
    return Lowered(
        graph if has_compute(graph.graph) else None,
        _drop_unused_inputs(graph),
        written,
        capabilities.mutation,
        gates,
        _drop_unused_inputs(gates) if gates is not None else (),
    )


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
    if value.op != "placeholder":
        return value
    with graph.graph.inserting_before(graph.graph.output_node()):
        clone = graph.graph.call_function(aten.clone.default, (value,))
    clone.meta["val"] = value.meta["val"]
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


def _refuse_aliases(trace: Trace, written: tuple[int, ...]) -> None:
    """Refuse a changed input that shares memory with another input or with a result."""
    storages = [storage_id(entry.tensor) for entry in trace.inputs]
    for position in written:
        path = trace.inputs[position].path
        if storages.count(storages[position]) > 1:
            raise CannotServe(f"{path} is changed and shares memory with another tensor")
        outputs = trace.graph.graph.output_node().args[0][: trace.result_count]  # type: ignore[index]
        changed = storage_id(trace.fakes[position])
        if any(storage_id(node.meta["val"]) == changed for node in outputs):  # type: ignore[union-attr]
            raise CannotServe(f"{path} is changed and a result is a view of it")
