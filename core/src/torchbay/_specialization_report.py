"""One specialization, readable: its graph, its guards, and how it was used."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import attrs
from torch.fx import GraphModule

from torchbay._counted import counted
from torchbay._guard_report import GuardReport, differences, reports_of
from torchbay._specialization import Specialization
from torchbay._tree import Leaf

__all__ = ["GuardsReport", "SpecializationReport", "leaf_report", "specialization_report"]

Mismatches = Callable[[tuple[Any, ...], dict[str, Any]], list[str]]


@attrs.frozen
class GuardsReport:
    """What stands in front of a specialization.

    Attributes:
        source: The function that decides whether a call is served, as Python source.
        guards: The guards as data, in the order they are checked.
        mismatches: Returns why a call would not pass.
    """

    source: str
    guards: tuple[GuardReport, ...]
    mismatches: Mismatches


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
        operators: How many operators run after the last gate.
        guard_list: The guards as data, in the order they are checked; of Dynamo's, the lines it
            tells, which leave out what it compares of a tensor.
        where: Which part of the program it is, where that is not the whole call: the code that
            Dynamo compiled, and why the graph ends before that code does.
        backward: The graphs that compute gradients, as Python source: one for each set of results
            that a loss was seen to depend on. None if the result needs no gradients.
        saved_bytes: How much memory a call keeps for its backward besides its inputs, with the
            sizes of the call it was captured from.
    """

    backend: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    graph: str
    guards: str
    run: str
    gates: tuple[str, ...]
    calls: int
    compile_seconds: float
    operators: int
    guard_list: tuple[GuardReport, ...]
    where: str
    backward: tuple[str, ...] | None
    saved_bytes: int
    _mismatches: Mismatches = attrs.field(repr=False, eq=False)

    def __str__(self) -> str:
        gates = f"\n  of {self.where}" if self.where else ""
        gates += "".join(f"\n  branch on data: {gate}" for gate in self.gates)
        if len(self.parts) > 1:
            gates += "".join(f"\n  part for {name}: {', '.join(ops)}" for name, ops in self.parts)
        if self.backward is not None:
            gates += f"\n  keeps {self.saved_bytes:,} bytes for its backward"
        served = counted(self.calls, "call")
        head = f"compiled by {self.backend} in {self.compile_seconds:.2f} s, served {served}"
        graphs = [self.graph or "(nothing is computed)", *(self.backward or ())]
        return "\n".join([f"{head}{gates}\n", self.guards, self.run, *graphs])

    def mismatches(self, /, *args: Any, **kwargs: Any) -> list[str]:
        """Return why a call with these arguments would not pass the guards; empty if it would.

        Nothing runs: what branches on data decide is not among the reasons. Where Dynamo owns the
        guards, that is all it says.
        """
        return self._mismatches(args, kwargs)

    def guard_differences(self, other: SpecializationReport) -> list[str]:
        """Return what is guarded here in another way than there, one line for each path."""
        return differences(self.guard_list, other.guard_list)

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain data, ready for JSON."""
        return {
            "backend": self.backend,
            "parts": [[name, list(operators)] for name, operators in self.parts],
            "graph": self.graph,
            "guards": self.guards,
            "run": self.run,
            "gates": list(self.gates),
            "calls": self.calls,
            "compile_seconds": self.compile_seconds,
            "operators": self.operators,
            "guard_list": [guard.as_dict() for guard in self.guard_list],
            "where": self.where,
            "backward": None if self.backward is None else list(self.backward),
            "saved_bytes": self.saved_bytes,
        }


def specialization_report(
    entry: Specialization, leaf: Leaf, leading: Callable[[], tuple[Any, ...]]
) -> SpecializationReport:
    """Describe a leaf of a specialization.

    Args:
        entry: The specialization; the report does not keep it.
        leaf: The leaf.
        leading: Returns the arguments that stand before those of a call.
    """
    calls = leaf.calls if leaf.forks else entry.calls
    mismatches = functools.partial(_mismatches, weakref.ref(entry), leading)
    guards = GuardsReport(entry.guards.source, reports_of(entry.guards), mismatches)
    return leaf_report(leaf, guards, calls)


def leaf_report(
    leaf: Leaf, guards: GuardsReport, calls: int, where: str = ""
) -> SpecializationReport:
    """Describe a leaf, whichever front-end guards it.

    Args:
        leaf: The leaf.
        guards: What stands in front of it.
        calls: How many calls it served.
        where: Which part of the program it is, where that is not the whole call.
    """
    backward = leaf.backward
    sources = [*(fork.source for fork in leaf.forks), leaf.source]
    return SpecializationReport(
        ", ".join(dict.fromkeys(name for name, _ in leaf.parts)),
        leaf.parts,
        "\n".join(map(_readable, leaf.graphs)),
        guards.source,
        "\n".join(sources),
        leaf.gates,
        calls,
        leaf.compile_seconds,
        leaf.operators,
        guards.guards,
        where,
        None if backward is None else tuple(_readable(b.part.graph) for b in backward.compiled),
        backward.training.saved_bytes if backward is not None else 0,
        guards.mismatches,
    )


def _readable(graph: GraphModule) -> str:
    source: str = graph.print_readable(print_output=False)
    return source


def _mismatches(
    entry: Callable[[], Specialization | None],
    leading: Callable[[], tuple[Any, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[str]:
    if (specialization := entry()) is None:
        return ["the specialization was dropped"]
    found = specialization.guards.mismatches((*leading(), *args), kwargs)
    return [str(mismatch) for mismatch in found]
