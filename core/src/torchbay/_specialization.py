"""One graph compiled under one set of guards, ready to be called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from torchbay._build import Built
from torchbay._call import Call
from torchbay._guards import GuardFunction, compile_source
from torchbay._lower import GateMiss, Lowered, View, remake
from torchbay._reason import Reason
from torchbay._torch_compat import inference_execution, plain_execution
from torchbay._trace import Trace
from torchbay.plugin import CompileReport, Executable, GuardedExecutable

__all__ = ["MISS", "EagerRoute", "Specialization", "specialization"]

MISS = object()
"""What a specialization returns when one of its gates comes out otherwise."""

_INDENT = "    "


def _watch(self: Any, call: Call, discard: weakref.WeakMethod[Callable[[Any], None]]) -> None:
    """Have this entry dropped as soon as an object it is about is gone.

    The guards keep the attributes of such objects, hence its weights, alive until then.
    """
    entry = weakref.ref(self)

    def gone(_: object) -> None:
        drop, dead = discard(), entry()
        if drop is not None and dead is not None:
            drop(dead)

    self.watched = tuple(
        weakref.ref(item.value, gone) for item in call.objects if hasattr(item.value, "__weakref__")
    )


@attrs.define(eq=False, kw_only=True)
class Specialization:
    """A graph, the guards it stands under, and how often it served.

    Attributes:
        guards: What must hold for a call to be served here.
        match: The guards as one function.
        graph: The graph that was compiled, or None when nothing is computed.
        parts: The backends that compiled it, with the operators of each part of a graph cut up.
        source: What runs after the guards held, as Python source.
        run: The same as a function of the graph's inputs and the call's arguments.
        gates: The data-dependent reads that must come out as they did, readable.
        refuses: The executable's own guard, if it has one.
        executable: What runs the graph; its ``run`` may not work once it is gone.
        compile_seconds: From the end of the observed call to the executable.
        group: Shared by the specializations that differ only in their gates.
        calls: How many calls it served.
        watched: Weak references to the objects it is about.
    """

    guards: GuardFunction
    match: Callable[..., Any]
    graph: torch.fx.GraphModule | None
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    source: str
    run: Callable[..., Any]
    gates: tuple[str, ...]
    refuses: Callable[[list[Any]], str | None] | None
    executable: Executable | None
    compile_seconds: float
    group: object = attrs.field(factory=object)
    calls: int = 0
    watched: tuple[Any, ...] = ()

    watch = _watch

    @property
    def may_refuse(self) -> bool:
        """Whether a call may be refused although the guards hold and the gates agree."""
        return self.refuses is not None

    def why_missed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return why a call for which the guards hold is not served here."""
        inputs = self.match(args, kwargs)
        if self.refuses is not None and (reason := self.refuses(inputs)) is not None:
            return f"{self.parts[0][0]} refuses the inputs: {reason}"
        return f"a branch on data went another way than {', '.join(self.gates)}"

    def report(self, name: str) -> CompileReport:
        """Return what observers are told."""
        nodes = self.graph.graph.nodes if self.graph is not None else ()
        count = sum(node.op == "call_function" for node in nodes)
        return CompileReport(name, self.parts[0][0], self.compile_seconds, count)


@attrs.define(eq=False, kw_only=True)
class EagerRoute:
    """Calls that cannot be served from a graph, recognized so that nobody tries again."""

    guards: GuardFunction
    match: Callable[..., Any]
    run: Callable[..., Any]
    reason: Reason
    gates: tuple[str, ...] = ()
    may_refuse: bool = False
    group: object = attrs.field(factory=object)
    calls: int = 0
    watched: tuple[Any, ...] = ()

    watch = _watch

    def why_missed(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> str:
        """Return why such calls run eagerly."""
        return str(self.reason)


def specialization(
    guards: GuardFunction, trace: Trace, built: Built, seconds: float
) -> Specialization:
    """Put a compiled graph behind its guards and around its epilogue."""
    refuses = _own_guard(built)
    source, run = _emit_run(trace, built, refuses)
    return Specialization(
        guards=guards,
        match=guards.match,
        graph=built.lowered.graph,
        parts=built.parts,
        source=source,
        run=run,
        gates=tuple(map(str, trace.gates)),
        refuses=refuses,
        executable=built.executable,
        compile_seconds=seconds,
    )


def _own_guard(built: Built) -> Callable[[list[Any]], str | None] | None:
    """Return an executable's guard as a function of all inputs of the trace."""
    if not isinstance(built.executable, GuardedExecutable):
        return None
    refuses, positions = built.executable.refuses, built.lowered.inputs
    return lambda inputs: refuses([inputs[position] for position in positions])


def _emit_run(
    trace: Trace, built: Built, refuses: Callable[[list[Any]], str | None] | None
) -> tuple[str, Callable[..., Any]]:
    """Emit what happens between the guards and the caller: gates, graph, epilogue, result."""
    lowered = built.lowered
    body = [*_gate_lines(lowered), *_graph_lines(trace, lowered), *_epilogue_lines(lowered)]
    body += trace.effects
    if refuses is not None:
        body = ["if refuses(inputs) is not None:", f"{_INDENT}return MISS", *body]
    if body and (context := _context(trace)) is not None:
        body = [f"with {context}():", *(_INDENT + line for line in body)]
    lines = ["def run(inputs, args, kwargs):", *(_INDENT + line for line in body)]
    source = "\n".join([*lines, f"{_INDENT}return {trace.result}", ""])
    variables = {
        **trace.names.values,
        "execute": built.executable.run if built.executable is not None else None,
        "gates": lowered.gates,
        "GateMiss": GateMiss,
        "MISS": MISS,
        "inference_execution": inference_execution,
        "plain_execution": plain_execution,
        "refuses": refuses,
        "remake": remake,
    }
    return source, compile_source(source, "run", variables)


def _context(trace: Trace) -> str | None:
    """Return the context the graph must run in, if the call's own will not do."""
    if trace.is_inference:
        return "inference_execution"
    has_autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return "plain_execution" if torch.is_grad_enabled() or has_autocast else None


def _gate_lines(lowered: Lowered) -> list[str]:
    if lowered.gates is None:
        return []
    values = ", ".join(f"inputs[{i}]" for i in lowered.gate_inputs)
    return ["try:", f"{_INDENT}gates({values})", "except GateMiss:", f"{_INDENT}return MISS"]


def _graph_lines(trace: Trace, lowered: Lowered) -> list[str]:
    if lowered.graph is None:
        return []
    if lowered.inputs != tuple(range(len(trace.inputs))):
        return [f"raw = execute([{', '.join(f'inputs[{i}]' for i in lowered.inputs)}])"]
    # The executable clears its list; what is needed afterwards must stand in another.
    has_views = any(isinstance(result, View) and result.of_input for result in lowered.results)
    is_read = any("inputs[" in source for source in (*trace.effects, trace.result))
    is_needed = is_read or has_views or _written_by_core(lowered)
    return [f"raw = execute({'inputs[:]' if is_needed else 'inputs'})"]


def _epilogue_lines(lowered: Lowered) -> list[str]:
    lines = [
        f"inputs[{position}].copy_(raw[{lowered.result_count + offset}])"
        for offset, position in enumerate(_written_by_core(lowered))
    ]
    if lowered.results == tuple(range(len(lowered.results))):
        return [*lines, "out = raw"] if lowered.results else lines
    results = (r.source() if isinstance(r, View) else f"raw[{r}]" for r in lowered.results)
    return [*lines, f"out = [{', '.join(results)}]"]


def _written_by_core(lowered: Lowered) -> tuple[int, ...]:
    return () if lowered.by_backend else lowered.written
