"""What a compiled object holds, readable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from torchbay._compile import Dispatcher
from torchbay._compiled import dispatcher_of
from torchbay._dynamo import DynamoDispatcher, FramePart
from torchbay._specialization import EagerRoute, Specialization
from torchbay._tree import Leaf

__all__ = ["EagerReport", "Explanation", "SpecializationReport", "explain"]


@attrs.frozen
class SpecializationReport:
    """One specialization.

    Attributes:
        backend: The backend that compiled it; several, for a graph that was cut up.
        parts: For a graph that was cut up, each part's backend and operators, in order.
        graph: The graph it compiled, as Python source; empty when nothing is computed.
        guards: The function that decides whether a call is served here, as Python source.
        run: What runs when it is: gates, graph, epilogue and result, as Python source.
        gates: The data-dependent reads that must come out as they did.
        calls: How many calls it served.
        compile_seconds: From the end of the observed call to the executable.
        where: Which part of the program it is, where that is not the whole call: the code that
            Dynamo compiled, and why the graph ends before that code does.
    """

    backend: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    graph: str
    guards: str
    run: str
    gates: tuple[str, ...]
    calls: int
    compile_seconds: float
    where: str = ""

    def __str__(self) -> str:
        gates = f"\n  of {self.where}" if self.where else ""
        gates += "".join(f"\n  branch on data: {gate}" for gate in self.gates)
        if len(self.parts) > 1:
            gates += "".join(f"\n  part for {name}: {', '.join(ops)}" for name, ops in self.parts)
        served = _counted(self.calls, "call")
        head = f"compiled by {self.backend} in {self.compile_seconds:.2f} s, served {served}"
        return (
            f"{head}{gates}\n\n{self.guards}\n{self.run}\n{self.graph or '(nothing is computed)'}"
        )


@attrs.frozen
class EagerReport:
    """Calls of one kind that run eagerly, and why."""

    reason: str
    guards: str
    calls: int

    def __str__(self) -> str:
        return f"served {_counted(self.calls, 'call')} eagerly: {self.reason}"


@attrs.frozen
class Explanation:
    """What `torchbay.explain` returns; print it.

    Attributes:
        name: What messages call the compiled object.
        specializations: Those compiled, the one used last first. Eager fallbacks are not among them.
        eager: The kinds of calls that run eagerly.
        recompiles: For every specialization after the first, what the call that needed it differed
            in from the one used last: path, value compiled for, value seen.
        calls: How many calls were served from a graph (``"graph"``) and how many ran eagerly
            (``"eager"``). The call a graph is captured from runs eagerly. With
            ``tracer="dynamo"``, a call counts as served from a graph if any compiled graph ran.
        note: Who owns guards and dispatch, if torchbay does not.
    """

    name: str
    specializations: tuple[SpecializationReport, ...]
    eager: tuple[EagerReport, ...]
    recompiles: tuple[tuple[str, ...], ...]
    calls: Mapping[str, int]
    note: str = ""

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
        made = _counted(len(self.specializations), "specialization")
        parts = [f"{self.name}: {made}; calls: {served}"]
        parts += [self.note] if self.note else []
        parts += [f"specialization {i}: {s}" for i, s in enumerate(self.specializations)]
        parts += map(str, self.eager)
        parts += [f"recompile {i}: {'; '.join(why)}" for i, why in enumerate(self.recompiles)]
        return "\n\n".join(parts)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


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
        tuple(report for entry in graphs for report in _reports(entry)),
        tuple(EagerReport(str(e.reason), e.guards.source, e.calls) for e in routes),
        tuple(dispatcher.recompiles),
        _calls(dispatcher, graphs, routes),
    )


def _calls(
    dispatcher: Dispatcher, graphs: list[Specialization], routes: list[EagerRoute]
) -> Mapping[str, int]:
    eager = dispatcher.eager_calls + sum(entry.calls for entry in routes)
    return {"graph": sum(entry.calls for entry in graphs), "eager": eager}


def _specialization_report(
    leaf: Leaf, guards: str, calls: int, where: str = ""
) -> SpecializationReport:
    sources = [*(fork.source for fork in leaf.forks), leaf.source]
    return SpecializationReport(
        ", ".join(dict.fromkeys(name for name, _ in leaf.parts)),
        leaf.parts,
        "\n".join(graph.print_readable(print_output=False) for graph in leaf.graphs),
        guards,
        "\n".join(sources),
        leaf.gates,
        calls,
        leaf.compile_seconds,
        where,
    )


def _reports(entry: Specialization) -> Iterator[SpecializationReport]:
    for leaf in entry.leaves:
        calls = leaf.calls if leaf.forks else entry.calls
        yield _specialization_report(leaf, entry.guards.source, calls)


def _explain_dynamo(dispatcher: DynamoDispatcher) -> Explanation:
    parts = dispatcher.parts[::-1]
    eager = [part for part in parts if part.reason is not None]
    return Explanation(
        dispatcher.name,
        tuple(_part_report(part, part.leaf) for part in parts if part.leaf is not None),
        tuple(EagerReport(f"{p.where}: {p.reason}", p.guards, p.eager_runs) for p in eager),
        tuple(dispatcher.recompiles),
        dict(dispatcher.calls),
        "Dynamo owns the guards and the dispatch: torchbay compiled the graphs that it captured",
    )


def _part_report(part: FramePart, leaf: Leaf) -> SpecializationReport:
    end = f", up to a graph break: {part.broken}" if part.broken else ""
    calls = part.calls - part.eager_runs
    return _specialization_report(leaf, part.guards, calls, f"{part.where}{end}")
