"""What torchbay and torch.compile make of a program, both with a backend that runs graphs as they are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch._dynamo
from programs import Program

import torchbay

__all__ = ["COLUMNS", "Ours", "Theirs", "cells", "ours", "theirs"]


@attrs.frozen
class Ours:
    """What became of a program's calls.

    Attributes:
        wrong: What differs from eager, if anything.
        gates: How many data-dependent reads each graph checks.
        calls: How many calls were served from a graph, and how many ran eagerly.
        reasons: Why calls run eagerly for good.
    """

    wrong: str | None
    gates: tuple[int, ...]
    calls: dict[str, int]
    reasons: tuple[str, ...]

    @property
    def graphs(self) -> int:
        """How many graphs serve all ways through the program."""
        return len(self.gates)


@attrs.frozen
class Theirs:
    """The same of torch.compile.

    Attributes:
        refusal: The first line of what it raises under ``fullgraph=True``, if it does.
        wrong: What differs from eager otherwise.
        graphs: How many graphs it compiles when it may break.
        operators: How many calls these graphs hold.
        breaks: How often it breaks.
    """

    refusal: str | None
    wrong: str | None
    graphs: int
    operators: int
    breaks: int


def ours(program: Program) -> Ours:
    """Call a program compiled by torchbay with all its inputs, twice."""
    with _quiet():
        original = program.fresh()
        compiled = torchbay.compile(original, backend="eager")
        wrong = _mistake(program, compiled, original)
    explanation = torchbay.explain(compiled)
    gates = tuple(len(report.gates) for report in explanation.specializations)
    reasons = tuple(report.reason for report in explanation.eager)
    return Ours(wrong, gates, dict(explanation.calls), reasons)


def theirs(program: Program) -> Theirs:
    """Call a program compiled by torch.compile with all its inputs, twice; whole, then in parts."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with _quiet(), _forgotten():
        refusal, wrong = _whole(program)
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        original = program.fresh()
        in_parts = _mistake(program, torch.compile(original, backend=backend), original)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    operators = sum(n.op.startswith("call") for g in graphs for n in g.graph.nodes)
    return Theirs(refusal, wrong or in_parts, len(graphs), operators, breaks)


def _whole(program: Program) -> tuple[str | None, str | None]:
    """Return how torch.compile refuses a program, or what it gets wrong."""
    original = program.fresh()
    compiled = torch.compile(original, backend="eager", fullgraph=True)
    try:
        return None, _mistake(program, compiled, original)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", None


def _mistake(
    program: Program, compiled: Callable[..., Any], original: Callable[..., Any]
) -> str | None:
    """Compare two rounds of calls with eager ones on a fresh copy: results, arguments and state."""
    expected = program.fresh()
    for call, given in enumerate([*program.sets(), *program.sets()]):
        mine, reference = copy.deepcopy(given), copy.deepcopy(given)
        found = compiled(*mine), mine, tensors_of(original)
        wanted = expected(*reference), reference, tensors_of(expected)
        try:
            torch.testing.assert_close(found, wanted, rtol=0, atol=program.tolerance)
        except AssertionError as error:
            return f"call {call}: {str(error).strip().splitlines()[0]}"
    return None


def tensors_of(program: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the tensors a program keeps: parameters, buffers and attributes."""
    if not isinstance(program, torch.nn.Module):
        return {}
    kept = {name: v for name, v in vars(program).items() if isinstance(v, torch.Tensor)}
    return {**program.state_dict(), **kept}


@contextmanager
def _quiet() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _forgotten() -> Iterator[None]:
    """Leave nothing behind in torch.compile's caches and counters."""
    try:
        yield
    finally:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()


COLUMNS = (
    "program",
    "graphs",
    "gates",
    "calls from a graph",
    "calls run eagerly",
    "right",
    "torch.compile, fullgraph=True",
    "its graphs with breaks allowed",
    "operators in them",
    "breaks",
)


def cells(program: Program, mine: Ours, other: Theirs) -> tuple[str, ...]:
    """Return a program's row."""
    return (
        program.title,
        str(mine.graphs),
        ", ".join(map(str, sorted(mine.gates))) or "-",
        str(mine.calls["graph"]),
        str(mine.calls["eager"]),
        "no" if mine.wrong else "yes",
        other.refusal or ("wrong results" if other.wrong else "1 graph"),
        str(other.graphs),
        str(other.operators),
        str(other.breaks),
    )
