"""What serves a graph that Dynamo captured: a compiled graph, or the graph as it is."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import attrs
import torch
from torch.fx import GraphModule

from torchbay._build import Built
from torchbay._dynamo._trace import DynamoTrace, Output, trace_dynamo_graph
from torchbay._dynamo_compat import (
    example_of,
    frame_being_compiled,
    hidden_from_dynamo,
    size_of,
    symbol_of,
)
from torchbay._lower import View, remake
from torchbay._options import read as read_options
from torchbay._reason import CannotServe, Reason
from torchbay._registry import choose, notify
from torchbay._settings import Settings
from torchbay._source import is_user_file
from torchbay._specialize import Specializer
from torchbay._torch_compat import inference_execution, plain_execution, storage_id
from torchbay.errors import TorchbayError, TorchbayWarning
from torchbay.plugin import Backend, CompileReport, GuardedExecutable

__all__ = ["FramePart", "GraphServer", "Refused", "has_symbolic_sizes"]

Run = Callable[..., Sequence[Any]]


class Refused(Exception):
    """Leaves Dynamo when a graph cannot be served and the caller asked for nothing less."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(str(reason))


@attrs.define(eq=False)
class FramePart:
    """A graph that Dynamo captured: of a whole frame, or of a part between graph breaks.

    Attributes:
        code: The code it is of; after a graph break, code that Dynamo wrote.
        where: Its name and place, readable.
        line: Where in the user's code the graph begins, or an empty string.
        broken: Why it ends before the frame does, or an empty string.
        graph: What was compiled; Dynamo's own graph if nothing was.
        parts: The backends that compiled it, each with the operators of its part.
        reason: Why it runs eagerly, or None.
        guards: What Dynamo checks before it runs, readable.
        compile_seconds: From Dynamo's graph to the executable.
        calls: How often it ran.
        eager_runs: How many of them ran eagerly.
    """

    code: CodeType | None
    where: str
    line: str
    broken: str
    graph: str
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    reason: Reason | None = None
    guards: str = ""
    compile_seconds: float = 0.0
    calls: int = 0
    eager_runs: int = 0


@attrs.define(eq=False)
class GraphServer:
    """Turns Dynamo's graphs into what serves them.

    Attributes:
        settings: What the caller asked for.
        name: What messages call the compiled object.
        on_part: Told of every part as it is compiled.
        on_run: Told whenever a part runs, and whether that is in a compiled graph.
    """

    settings: Settings
    name: str
    on_part: Callable[[FramePart], None] = lambda part: None  # noqa: ARG005
    on_run: Callable[[bool], None] = lambda is_graph: None  # noqa: ARG005
    _warned: set[str] = attrs.field(factory=set)

    def __call__(self, graph: GraphModule, _example_inputs: Sequence[Any]) -> Run:
        """Compile a graph: what torch.compile calls a backend.

        Raises:
            Refused: It cannot be served, and ``fullgraph=True`` asked for nothing less.
            TorchbayError: The settings or the backend are at fault.
        """
        backend = choose(self.settings.backend)
        options = read_options(backend, self.settings.mode, self.settings.options)
        part = _part_of(graph)
        try:
            run = self._compiled(graph, part, backend, options)
        except CannotServe as refusal:
            run = self._eagerly(graph, part, refusal.reason)
        except TorchbayError:
            raise
        except Exception as error:  # noqa: BLE001 - the graph can be run, whatever broke here
            run = self._eagerly(graph, part, Reason(f"compiling it raised {error!r}"))
        self.on_part(part)
        return run

    def _compiled(self, graph: GraphModule, part: FramePart, backend: Backend, options: Any) -> Run:
        started = time.perf_counter()
        _refuse_sizes(graph, backend)
        captured = trace_dynamo_graph(graph)
        with hidden_from_dynamo(captured.trace.fake_mode):
            specializer = Specializer(self.settings, self.name)
            built = specializer.built_or_fallback(captured.trace, backend, options)
        _refuse_written_gradients(graph, built)
        if built.lowered.graph is not None:
            part.graph = built.lowered.graph.print_readable(print_output=False)
        part.parts, part.compile_seconds = built.parts, time.perf_counter() - started
        notify("torchbay_compiled", self._report(part, built))
        return self._counted(_Runner.of(graph, captured, built), graph, part)

    def _report(self, part: FramePart, built: Built) -> CompileReport:
        nodes = built.lowered.graph.graph.nodes if built.lowered.graph is not None else ()
        count = sum(node.op == "call_function" for node in nodes)
        return CompileReport(self.name, part.parts[0][0], part.compile_seconds, count)

    def _counted(self, runner: _Runner, graph: GraphModule, part: FramePart) -> Run:
        def run(*given: Any) -> Sequence[Any]:
            part.calls += 1
            if (problem := runner.refuses(given)) is not None:
                return self._run_as_it_is(graph, part, Reason(problem, where=part.line), given)
            self.on_run(True)
            return runner.run(given)

        return run

    def _eagerly(self, graph: GraphModule, part: FramePart, reason: Reason) -> Run:
        part.reason = reason = attrs.evolve(reason, where=reason.where or part.line)
        if self.settings.fullgraph:
            raise Refused(reason)

        def run(*given: Any) -> Sequence[Any]:
            part.calls += 1
            return self._run_as_it_is(graph, part, reason, given)

        return run

    def _run_as_it_is(
        self, graph: GraphModule, part: FramePart, reason: Reason, given: Sequence[Any]
    ) -> Sequence[Any]:
        part.eager_runs += 1
        self.on_run(False)
        self.warn(f"runs eagerly: {reason}")
        return graph(*given)  # type: ignore[no-any-return]

    def warn(self, text: str) -> None:
        """Say something once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{self.name} {text}", TorchbayWarning, stacklevel=4)


def _part_of(graph: GraphModule) -> FramePart:
    frame = frame_being_compiled()
    code = frame.code
    where = f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}" if code else "a graph"
    readable = graph.print_readable(print_output=False)
    return FramePart(code, where, _first_line(graph), frame.broken, readable)


def _first_line(graph: GraphModule) -> str:
    """Return ``file:line`` of the first line of the user's code that a graph is of."""
    stacks = (node.stack_trace or "" for node in graph.graph.nodes)
    places = (place for stack in stacks for place in re.findall(r'File "(.+)", line (\d+)', stack))
    return next((f"{name}:{line}" for name, line in places if is_user_file(name)), "")


def _refuse_sizes(graph: GraphModule, backend: Backend) -> None:
    """Refuse a graph with symbolic sizes for a backend that does not claim them."""
    if has_symbolic_sizes(graph) and not backend.capabilities.dynamic_shapes:
        raise CannotServe(
            f"backend {backend.name!r} does not take symbolic sizes",
            remedy="Pass dynamic=False to torch.compile",
        )


def has_symbolic_sizes(graph: GraphModule) -> bool:
    """Whether a size of an input of Dynamo's graph is a symbol."""
    return any(map(_is_symbolic, map(example_of, graph.graph.find_nodes(op="placeholder"))))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


def _refuse_written_gradients(graph: GraphModule, built: Built) -> None:
    """Refuse to write inputs in grad mode where autograd would have to know of it."""
    if not built.lowered.written or not _may_record(graph):
        return
    inputs = map(example_of, graph.graph.find_nodes(op="placeholder"))
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        raise CannotServe(
            "it changes an input while gradients are recorded",
            remedy="Call it under torch.no_grad() or torch.inference_mode() for inference",
        )


def _may_record(graph: GraphModule) -> bool:
    changes = any("grad_enabled" in str(node.target) for node in graph.graph.nodes)
    return torch.is_grad_enabled() or changes


@attrs.frozen(eq=False)
class _Runner:
    """Runs a compiled graph on the inputs of Dynamo's."""

    captured: DynamoTrace
    built: Built
    symbols: Mapping[Any, int]
    context: Callable[[], Any]

    @classmethod
    def of(cls, graph: GraphModule, captured: DynamoTrace, built: Built) -> _Runner:
        """Prepare what every run needs."""
        symbols = {
            symbol: position
            for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))
            if isinstance(size := example_of(node), torch.SymInt)
            and (symbol := symbol_of(size)) is not None
        }
        context = inference_execution if captured.trace.is_inference else plain_execution
        return cls(captured, built, symbols, context)

    def refuses(self, given: Sequence[Any]) -> str | None:
        """Return why these inputs must not be run, or None."""
        lowered = self.built.lowered
        inputs = [given[position] for position in self.captured.positions]
        if lowered.written and _shares_memory(inputs, lowered.written):
            return "an input that it changes shares memory with another"
        if isinstance(self.built.executable, GuardedExecutable):
            taken = [inputs[position] for position in lowered.inputs]
            return self.built.executable.refuses(taken)
        return None

    def run(self, given: Sequence[Any]) -> Sequence[Any]:
        """Run the graph, write what it changes, and return what Dynamo's graph returns."""
        inputs = [given[position] for position in self.captured.positions]
        sizes = {symbol: given[position] for symbol, position in self.symbols.items()}
        with self.context():
            raw = self._executed(inputs)
            results = [self._result(r, inputs, raw, sizes) for r in self.built.lowered.results]
        return tuple(_value(o, inputs, results, sizes) for o in self.captured.outputs)

    def _executed(self, inputs: list[Any]) -> Sequence[Any]:
        lowered, executable = self.built.lowered, self.built.executable
        taken = [inputs[position] for position in lowered.inputs]
        raw = executable.run(taken) if executable is not None else ()
        if not lowered.by_backend:
            for offset, position in enumerate(lowered.written):
                inputs[position].copy_(raw[lowered.result_count + offset])
        return raw

    @staticmethod
    def _result(
        place: int | View, inputs: Sequence[Any], raw: Sequence[Any], sizes: Mapping[Any, int]
    ) -> torch.Tensor:
        if isinstance(place, int):
            return raw[place]  # type: ignore[no-any-return]
        base = inputs[place.base] if place.of_input else raw[place.base]
        lengths = [size_of(size, sizes) for size in place.sizes]
        strides = [size_of(stride, sizes) for stride in place.strides]
        return remake(base, lengths, strides, size_of(place.offset, sizes))


def _value(
    output: Output, inputs: Sequence[Any], results: Sequence[Any], sizes: Mapping[Any, int]
) -> Any:
    if output.kind == "size":
        return size_of(output.value, sizes)
    return (inputs if output.kind == "input" else results)[output.value]


def _shares_memory(inputs: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    storages = [storage_id(tensor) for tensor in inputs]
    return any(storages.count(storages[position]) > 1 for position in written)
