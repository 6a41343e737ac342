"""What a compiled object holds, readable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from torchbay._compile import Dispatcher
from torchbay._compiled import dispatcher_of, leading_arguments
from torchbay._counted import counted
from torchbay._dynamo import DynamoDispatcher, FramePart
from torchbay._guard_report import GuardReport
from torchbay._specialization import EagerRoute, Specialization
from torchbay._specialization_report import (
    GuardsReport,
    SpecializationReport,
    leaf_report,
    specialization_report,
)
from torchbay._tree import Leaf
from torchbay._tree_report import ForkReport, TreeReport, tree_report

__all__ = ["EagerReport", "Explanation", "explain"]


@attrs.frozen
class EagerReport:
    """Calls of one kind that run eagerly, and why."""

    reason: str
    guards: str
    calls: int

    def __str__(self) -> str:
        return f"served {counted(self.calls, 'call')} eagerly: {self.reason}"


@attrs.frozen
class Explanation:
    """What `torchbay.explain` returns; print it.

    Attributes:
        name: What messages call the compiled object.
        trees: The sets of guards, the one used last first, each with the specializations that
            branches on data lead to. Each of Dynamo's graphs is a tree of one specialization, the
            one compiled last first.
        eager: The kinds of calls that run eagerly.
        recompiles: For every specialization after the first, what the call that needed it differed
            in from the one used last: path, value compiled for, value seen.
        calls: How many calls were served from a graph (``"graph"``) and how many ran eagerly
            (``"eager"``). The call a graph is captured from runs eagerly. With
            ``tracer="dynamo"``, a call counts as served from a graph if any compiled graph ran.
        note: Who owns guards and dispatch, if torchbay does not.
    """

    name: str
    trees: tuple[TreeReport, ...]
    eager: tuple[EagerReport, ...]
    recompiles: tuple[tuple[str, ...], ...]
    calls: Mapping[str, int]
    note: str = ""

    @property
    def specializations(self) -> tuple[SpecializationReport, ...]:
        """Those compiled, tree by tree. Eager fallbacks are not among them."""
        return tuple(leaf for tree in self.trees for leaf in tree.leaves)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The compiled graphs as Python source."""
        return tuple(report.graph for report in self.specializations)

    @property
    def guards(self) -> tuple[str, ...]:
        """The guard functions as Python source."""
        return tuple(report.guards for report in self.specializations)

    def __str__(self) -> str:
        served = ", ".join(f"{count} {way}" for way, count in self.calls.items())
        made = counted(len(self.specializations), "specialization")
        parts = [f"{self.name}: {made}; calls: {served}"]
        parts += [self.note] if self.note else []
        parts += [str(tree) for tree in self.trees if isinstance(tree.root, ForkReport)]
        parts += [f"specialization {i}: {s}" for i, s in enumerate(self.specializations)]
        parts += map(str, self.eager)
        parts += [f"recompile {i}: {'; '.join(why)}" for i, why in enumerate(self.recompiles)]
        return "\n\n".join(parts)


def explain(compiled: Any) -> Explanation:
    """Return what a compiled object holds: graphs, guards, recompiles, and how calls were served.

    Args:
        compiled: What `torchbay.compile` returned.

    Raises:
        InvalidArgument: It is something else.
    """
    dispatcher = dispatcher_of(compiled)
    if isinstance(dispatcher, DynamoDispatcher):
        return _explain_dynamo(dispatcher)
    entries = dispatcher.entries
    graphs = [entry for entry in entries if isinstance(entry, Specialization)]
    routes = [entry for entry in entries if isinstance(entry, EagerRoute)]
    return Explanation(
        dispatcher.name,
        tuple(_trees(graphs, leading_arguments(compiled))),
        tuple(EagerReport(str(e.reason), e.guards.source, e.calls) for e in routes),
        tuple(dispatcher.recompiles),
        _calls(dispatcher, graphs, routes),
    )


def _trees(
    entries: list[Specialization], leading: Callable[[], tuple[Any, ...]]
) -> Iterator[TreeReport]:
    first = 0
    for entry in entries:
        leaves = {leaf: specialization_report(entry, leaf, leading) for leaf in [*entry.leaves]}
        yield tree_report(entry.root, leaves, entry.guards.source, first, entry.calls)
        first += len(leaves)


def _calls(
    dispatcher: Dispatcher, graphs: list[Specialization], routes: list[EagerRoute]
) -> Mapping[str, int]:
    eager = dispatcher.eager_calls + sum(entry.calls for entry in routes)
    return {"graph": sum(entry.calls for entry in graphs), "eager": eager}


_DYNAMO_OWNS = "Dynamo owns the guards and the dispatch"


def _explain_dynamo(dispatcher: DynamoDispatcher) -> Explanation:
    parts = dispatcher.parts[::-1]
    served = [(part, part.leaf) for part in parts if part.leaf is not None]
    eager = [part for part in parts if part.reason is not None]
    return Explanation(
        dispatcher.name,
        tuple(_part_tree(part, leaf, number) for number, (part, leaf) in enumerate(served)),
        tuple(EagerReport(f"{p.where}: {p.reason}", p.guards, p.eager_runs) for p in eager),
        tuple(dispatcher.recompiles),
        dict(dispatcher.calls),
        f"{_DYNAMO_OWNS}: torchbay compiled the graphs that it captured",
    )


def _part_tree(part: FramePart, leaf: Leaf, number: int) -> TreeReport:
    end = f", up to a graph break: {part.broken}" if part.broken else ""
    calls = part.calls - part.eager_runs
    lines = part.guards.splitlines()
    guards = GuardsReport(
        part.guards,
        tuple(GuardReport("dynamo", line, "true", line) for line in lines),
        lambda args, kwargs: [f"{_DYNAMO_OWNS}: only a call tells"],  # noqa: ARG005
    )
    report = leaf_report(leaf, guards, calls, f"{part.where}{end}")
    return tree_report(leaf, {leaf: report}, part.guards, number, calls)
