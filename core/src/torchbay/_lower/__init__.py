"""Fourth stage: the graph becomes what one backend declared it takes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from torchbay._lower._checkpoints import compute_again
from torchbay._lower._composites import kernels_of, recompose
from torchbay._lower._functional import functional
from torchbay._lower._halves import split
from torchbay._lower._lowering import Lowered, Lowering
from torchbay._lower._norms import with_precise_statistics
from torchbay._lower._places import INPUTS, LAST, ROOTS, Place, Route, Source
from torchbay._lower._present import BackwardPart, present
from torchbay._lower._prune import named_arguments, prune, with_outputs
from torchbay._lower._regions import Region, cut
from torchbay._lower._stages import Part, Stage
from torchbay._lower._training import BackwardHalf, Given, Training
from torchbay._torch_autograd import Partitioner
from torchbay._trace import Trace
from torchbay.plugin import Capabilities, Decompositions

__all__ = [
    "INPUTS",
    "LAST",
    "ROOTS",
    "BackwardHalf",
    "BackwardPart",
    "Given",
    "Lowered",
    "Part",
    "Place",
    "Region",
    "Route",
    "Source",
    "Stage",
    "Training",
    "cut",
    "lower",
    "lower_region",
    "named_arguments",
    "present",
]


def lower(trace: Trace, capabilities: Capabilities, partitioner: Partitioner) -> Lowered:
    """Lower a trace for a backend with these capabilities.

    Raises:
        CannotServe: The graph changes tensors in a way that cannot be expressed.
    """
    table = _table(capabilities.decompositions)
    if table is not None and capabilities.keep:
        kept = kernels_of(capabilities.keep)
        table = {target: rule for target, rule in table.items() if target not in kept}
    tangents = trace.joint.tangents if trace.joint is not None else ()
    graph = functional(trace.graph, (*trace.fakes, *tangents), trace.mode, table)
    trace.check(trace.mode)
    graph = copy.deepcopy(graph) if graph is trace.graph else graph
    prune(graph.graph)
    if trace.joint is not None:
        numbers = [False] * (len(trace.fakes) - len(trace.inputs))
        states = [*(given.is_state for given in trace.inputs), *numbers]
        halves = split(graph, states, len(trace.joint.wanted), partitioner)
        return Lowering(trace, halves.forward, capabilities, halves).lowered()
    compute_again(graph.graph)
    recompose(graph, capabilities.keep)
    return Lowering(trace, graph, capabilities).lowered()


def lower_region(region: Region, mode: Any, capabilities: Capabilities) -> GraphModule:
    """Lower a region once more, for the backend that gets what another one left."""
    fakes = tuple(node.meta["val"] for node in region.takes)
    graph = functional(region.graph, fakes, mode, _table(capabilities.decompositions))
    return with_outputs(graph, list(graph.graph.output_node().args[0]))  # type: ignore[arg-type]


@functools.cache
def _table(decompositions: Callable[[], Decompositions] | None) -> Decompositions | None:
    return with_precise_statistics(decompositions()) if decompositions is not None else None
