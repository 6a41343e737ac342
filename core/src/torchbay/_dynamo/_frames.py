"""What serves a graph that Dynamo captured: a compiled graph, or the graph as it is."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import attrs
import torch
from torch.fx import GraphModule

from torchbay._dynamo._trace import trace_dynamo_graph
from torchbay._dynamo_compat import (
    example_of,
    frame_being_compiled,
    hidden_from_dynamo,
)
from torchbay._guards import GuardFunction
from torchbay._lower import Lowered
from torchbay._misses import take_miss
from torchbay._options import read as read_options
from torchbay._reason import CannotServe, Reason
from torchbay._registry import choose
from torchbay._settings import Settings
from torchbay._source import is_user_file
from torchbay._specialize import Specializer
from torchbay._torch_compat import storage_id
from torchbay._torch_symbols import has_symbols
from torchbay._tree import MISS, Leaf, Path, grow
from torchbay.errors import TorchbayError, TorchbayWarning
from torchbay.plugin import Backend

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
        leaf: What runs it, or None if that is Dynamo's graph as it is.
        reason: Why it runs eagerly, or None.
        guards: What Dynamo checks before it runs, readable.
        calls: How often it ran.
        eager_runs: How many of them ran eagerly.
    """

    code: CodeType | None
    where: str
    line: str
    broken: str
    leaf: Leaf | None = None
    reason: Reason | None = None
    guards: str = ""
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
        specializer = Specializer(self.settings, self.name)

        def served(maker: Backend, its_options: Any) -> _Served:
            lowered, build = specializer.lowered(captured.trace, maker, its_options)
            _refuse_written_gradients(graph, lowered)
            grown = grow(None, Path(captured.trace, lowered, _unguarded, 0), build)
            assert grown is not None, "a path always fits a tree of its own"
            return _Served(captured.positions, grown.leaf, lowered.changed)

        with hidden_from_dynamo(captured.trace.mode):
            found = specializer.or_fallback(served, backend, options)
        part.leaf = found.leaf
        specializer.report(found.leaf, started)
        return self._counted(found, graph, part)

    def _counted(self, served: _Served, graph: GraphModule, part: FramePart) -> Run:
        def run(*given: Any) -> Sequence[Any]:
            part.calls += 1
            try:
                result = served.run(given)
            except CannotServe as refusal:
                return self._run_as_it_is(graph, part, refusal.reason, given)
            self.on_run(True)
            return result

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
    return FramePart(code, where, _first_line(graph), frame.broken)


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
    return any(map(has_symbols, map(example_of, graph.graph.find_nodes(op="placeholder"))))


def _refuse_written_gradients(graph: GraphModule, lowered: Lowered) -> None:
    """Refuse to write inputs in grad mode where autograd would have to know of it."""
    if not lowered.changed or not _may_record(graph):
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


def _unguarded() -> GuardFunction:
    """Return the guards of a graph that Dynamo guards."""
    return GuardFunction((), "", lambda args, kwargs: None, {}, ())  # noqa: ARG005


@attrs.frozen(eq=False)
class _Served:
    """A compiled graph on the inputs of Dynamo's.

    Attributes:
        positions: Which of Dynamo's inputs each input of the trace is.
        leaf: What runs.
        changed: The inputs of the trace that it changes.
    """

    positions: tuple[int, ...]
    leaf: Leaf
    changed: tuple[int, ...]

    def run(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return what Dynamo's graph returns.

        Raises:
            CannotServe: These inputs must not be run; nothing has happened yet.
        """
        inputs = [given[position] for position in self.positions]
        if self.changed and _shares_memory(inputs, self.changed):
            raise CannotServe("an input that it changes shares memory with another")
        result: Any = self.leaf.run(inputs, (), {})
        if result is MISS:
            raise CannotServe(take_miss(self.leaf.nodes()) or "its executable refuses the inputs")
        return result  # type: ignore[no-any-return]


def _shares_memory(inputs: Sequence[Any], changed: Sequence[int]) -> bool:
    storages = [storage_id(value) for value in inputs if isinstance(value, torch.Tensor)]
    return any(storages.count(storages[position]) > 1 for position in changed)
