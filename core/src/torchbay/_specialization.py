"""One graph compiled under one set of guards, ready to be called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import attrs
import torch

from torchbay._call import Call
from torchbay._guards import GuardFunction, compile_source
from torchbay._lower import GateMiss, Lowered
from torchbay._reason import Reason
from torchbay._torch_compat import plain_execution
from torchbay._trace import Trace
from torchbay.plugin import Executable

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
        graph: The graph the backend compiled, or None when nothing is computed.
        trace: The graph as captured, before lowering.
        backend: The name of the backend that compiled it.
        source: What runs after the guards held, as Python source.
        run: The same as a function of the graph's inputs and the call's arguments.
        gates: The data-dependent reads that must come out as they did, readable.
        group: Shared by the specializations that differ only in their gates.
        calls: How many calls it served.
    """

    guards: GuardFunction
    match: Callable[..., Any]
    graph: torch.fx.GraphModule | None
    captured: torch.fx.GraphModule
    backend: str
    source: str
    run: Callable[..., Any]
    gates: tuple[str, ...]
    compile_seconds: float = 0.0
    group: object = attrs.field(factory=object)
    calls: int = 0
    watched: tuple[Any, ...] = ()

    watch = _watch


@attrs.define(eq=False, kw_only=True)
class EagerRoute:
    """Calls that cannot be served from a graph, recognized so that nobody tries again."""

    guards: GuardFunction
    match: Callable[..., Any]
    run: Callable[..., Any]
    reason: Reason
    gates: tuple[str, ...] = ()
    group: object = attrs.field(factory=object)
    calls: int = 0
    watched: tuple[Any, ...] = ()

    watch = _watch


def specialization(
    guards: GuardFunction,
    trace: Trace,
    lowered: Lowered,
    executable: Executable | None,
    backend: str,
) -> Specialization:
    """Put a compiled graph behind its guards and around its epilogue."""
    source, run = _emit_run(trace, lowered, executable)
    return Specialization(
        guards=guards,
        match=guards.match,
        graph=lowered.graph,
        captured=trace.graph,
        backend=backend,
        source=source,
        run=run,
        gates=tuple(map(str, trace.gates)),
    )


def _emit_run(
    trace: Trace, lowered: Lowered, executable: Executable | None
) -> tuple[str, Callable[..., Any]]:
    """Emit what happens between the guards and the caller: gates, graph, epilogue, result."""
    body = [*_gate_lines(lowered), *_graph_lines(trace, lowered), *_epilogue_lines(trace, lowered)]
    if body and _needs_plain_execution():
        body = ["with plain_execution():", *(_INDENT + line for line in body)]
    lines = ["def run(inputs, args, kwargs):", *(_INDENT + line for line in body)]
    source = "\n".join([*lines, f"{_INDENT}return {trace.result}", ""])
    variables = {
        **trace.names.values,
        "execute": executable.run if executable is not None else None,
        "gates": lowered.gates,
        "GateMiss": GateMiss,
        "MISS": MISS,
        "plain_execution": plain_execution,
    }
    return source, compile_source(source, "run", variables)


def _needs_plain_execution() -> bool:
    autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled() or autocast


def _gate_lines(lowered: Lowered) -> list[str]:
    if lowered.gates is None:
        return []
    values = ", ".join(f"inputs[{i}]" for i in lowered.gate_inputs)
    return ["try:", f"{_INDENT}gates({values})", "except GateMiss:", f"{_INDENT}return MISS"]


def _graph_lines(trace: Trace, lowered: Lowered) -> list[str]:
    if lowered.graph is None:
        return []
    if lowered.inputs != tuple(range(len(trace.inputs))):
        return [f"out = execute([{', '.join(f'inputs[{i}]' for i in lowered.inputs)}])"]
    # The executable clears its list; what is needed afterwards must stand in another.
    is_needed_after = "inputs[" in trace.result or bool(_written_by_core(lowered))
    return [f"out = execute({'inputs[:]' if is_needed_after else 'inputs'})"]


def _epilogue_lines(trace: Trace, lowered: Lowered) -> list[str]:
    return [
        f"inputs[{position}].copy_(out[{trace.result_count + offset}])"
        for offset, position in enumerate(_written_by_core(lowered))
    ]


def _written_by_core(lowered: Lowered) -> tuple[int, ...]:
    return () if lowered.by_backend else lowered.written
