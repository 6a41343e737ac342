"""Fifth stage: a lowered graph becomes something callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._claims import complaint
from torchbay._lower import (
    INPUTS,
    Part,
    Place,
    Region,
    cut,
    lower_region,
    named_arguments,
)
from torchbay._observe import unmoved_generators
from torchbay._options import read as read_options
from torchbay._registry import account
from torchbay._torch_compat import compiler_flag
from torchbay._torch_symbols import is_number
from torchbay._trace import Trace
from torchbay.errors import BackendFailed
from torchbay.plugin import (
    Backend,
    CompileRequest,
    Executable,
    GuardedExecutable,
    PartialBackend,
    UnsupportedGraph,
)

__all__ = ["Builder", "Built"]


@attrs.frozen(eq=False)
class Built:
    """A part of a graph and what runs it.

    Attributes:
        part: The graph, and where its inputs stand.
        executable: What runs it.
        parts: The backends that compiled it, each with the operators it got; of a graph that was
            not cut for backends, the operators are left out.
    """

    part: Part
    executable: Executable
    parts: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def refuses(self) -> Callable[[Sequence[Any]], str | None] | None:
        """The executable's own guard, if it has one."""
        return self.executable.refuses if isinstance(self.executable, GuardedExecutable) else None


@attrs.define(eq=False)
class Builder:
    """Compiles the parts of one lowered trace; equal parts, such as rounds of a loop, once.

    Attributes:
        trace: The trace.
        backend: The backend that compiles them.
        options: An instance of its options class.
        fallback: The backend for what a partial backend does not support, if there is one.
        name: What the caller calls the compiled object.
        count: How many graphs were handed to a backend.
    """

    trace: Trace
    backend: Backend
    options: Any
    fallback: Backend | None
    name: str
    count: int = 0
    _known: dict[str, Built] = attrs.field(factory=dict)

    def __call__(self, part: Part, mutated: frozenset[int]) -> Built:
        """Compile a part that changes these inputs of the trace.

        Raises:
            UnsupportedGraph: The backend declines it, or does not claim what it needs.
            BackendFailed: The backend raised anything else, or made something that cannot run.
        """
        key = _text_of(part.graph)
        if (known := self._known.get(key)) is not None and not mutated:
            return attrs.evolve(known, part=part)
        self.count += 1
        is_partial = isinstance(self.backend, PartialBackend)
        made = self._in_regions(part) if is_partial else self._whole(part, mutated)
        return self._known.setdefault(key, made)

    def _whole(self, part: Part, mutated: frozenset[int] = frozenset()) -> Built:
        request = CompileRequest(
            graph=part.graph,
            example_inputs=_examples(part.graph.graph.find_nodes(op="placeholder")),
            state_count=sum(map(self._is_state, part.takes)),
            mutated=frozenset(
                position
                for position, place in enumerate(part.takes)
                if place.level == INPUTS and place.index in mutated
            ),
            device=_device(part.graph),
            options=self.options,
            name=self.name,
        )
        return Built(part, _compiled(self.backend, request), ((self.backend.name, ()),))

    def _in_regions(self, part: Part) -> Built:
        """Compile what a partial backend supports with it, and the rest with its fallback."""
        backend = self.backend
        assert isinstance(backend, PartialBackend)
        state = self._state_nodes(part)
        regions = cut(part.graph, backend.supports, state)
        left = [region for region in regions if not region.is_supported]
        if not left:
            return self._whole(part)
        if self.fallback is None:
            operators = sorted({target for region in left for target in region.operators})
            raise UnsupportedGraph(
                f"it does not support {', '.join(operators)}", account=account(backend)
            )
        makers = [backend if region.is_supported else self.fallback for region in regions]
        pairs = list(zip(makers, regions, strict=True))
        executables = [
            _compiled(maker, self._region_request(region, maker, state)) for maker, region in pairs
        ]
        chain = _chain(part.graph, regions, executables)
        return Built(part, chain, tuple((maker.name, r.operators) for maker, r in pairs))

    def _region_request(
        self, region: Region, maker: Backend, state: frozenset[Node]
    ) -> CompileRequest:
        is_own = maker is self.backend
        capabilities = maker.capabilities
        graph = region.graph if is_own else lower_region(region, self.trace.mode, capabilities)
        return CompileRequest(
            graph=graph,
            example_inputs=_examples(region.takes),
            state_count=sum(node in state for node in region.takes),
            device=_device(graph),
            options=self.options if is_own else read_options(maker, None, None),
            name=self.name,
        )

    def _state_nodes(self, part: Part) -> frozenset[Node]:
        placeholders = part.graph.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, part.takes, strict=True)
        return frozenset(node for node, place in pairs if self._is_state(place))

    def _is_state(self, place: Place) -> bool:
        inputs = self.trace.inputs
        return place.level == INPUTS and place.index < len(inputs) and inputs[place.index].is_state


def _examples(nodes: Sequence[Node]) -> list[Any]:
    return [node.meta["val"] for node in nodes]


def _text_of(graph: GraphModule) -> str:
    """Return a text that is equal for graphs that compute the same from inputs that are alike."""
    names = {node: f"n{i}" for i, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        what = _likeness(node.meta["val"]) if node.op == "placeholder" else str(node.target)
        if node.op == "get_attr":
            what = f"literal {id(getattr(graph, str(node.target)))}"
        args, kwargs = named_arguments(node, names)
        lines.append(f"{node.op} {what} {args} {kwargs}")
    return "\n".join(lines)


def _likeness(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    layout = f"{tuple(value.shape)} {value.stride()} {value.storage_offset()}"
    return f"{value.dtype} {value.device} {layout} {value.is_conj()} {value.is_neg()}"


def _compiled(backend: Backend, request: CompileRequest) -> Executable:
    problem = complaint(backend.capabilities, _tensors(request.graph))
    if problem is None and not backend.capabilities.dynamic_shapes and _is_symbolic(request.graph):
        problem = "it takes no sizes or numbers that are known only when it runs"
    if problem is not None:
        raise UnsupportedGraph(problem, account=account(backend))
    try:
        # Compilers set the flag too. Under ours, none of them finds it raised by another thread's
        # call and raises it again when that call is long over.
        with torch.no_grad(), unmoved_generators(), compiler_flag():
            executable = backend.compile(request)
    except (UnsupportedGraph, BackendFailed):
        raise
    except Exception as error:
        raise BackendFailed(
            f"compiling {request.name} raised {error!r}",
            account=account(backend),
            remedy="Report it to the backend's authors with the graph that explain() prints, "
            "or choose another backend",
        ) from error
    if not callable(getattr(executable, "run", None)):
        raise BackendFailed(
            f"compiling {request.name} returned {executable!r}, which has no run(inputs)",
            account=account(backend),
            remedy="A backend's compile() returns an Executable",
        )
    return executable


def _tensors(graph: GraphModule) -> Iterator[torch.Tensor]:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, torch.Tensor):
                yield part


def _is_symbolic(graph: GraphModule) -> bool:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(is_number(value) for value in values) or any(
        is_number(size) for tensor in _tensors(graph) for size in tensor.shape
    )


def _device(graph: GraphModule) -> torch.device:
    """Return the first device other than the CPU, or the CPU."""
    devices = (tensor.device for tensor in _tensors(graph))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


@attrs.frozen(eq=False)
class _Step:
    executable: Executable
    takes: tuple[Node, ...]
    gives: tuple[Node, ...]
    last_use: tuple[Node, ...]


@attrs.frozen(eq=False)
class _Chain:
    """Regions that run one after the other, each value let go after its last use."""

    inputs: tuple[Node, ...]
    steps: tuple[_Step, ...]
    outputs: tuple[Node, ...]

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run every region."""
        values = dict(zip(self.inputs, inputs, strict=True))
        inputs.clear()
        for step in self.steps:
            taken = [values[node] for node in step.takes]
            for node in step.last_use:
                del values[node]
            values.update(zip(step.gives, step.executable.run(taken), strict=True))
        return [values[node] for node in self.outputs]


def _chain(graph: GraphModule, regions: list[Region], executables: list[Executable]) -> _Chain:
    outputs = tuple(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    last: dict[Node, int] = {node: i for i, region in enumerate(regions) for node in region.takes}
    steps = tuple(
        _Step(
            executable,
            region.takes,
            region.gives,
            tuple(n for n in region.takes if last[n] == position and n not in outputs),
        )
        for position, (region, executable) in enumerate(zip(regions, executables, strict=True))
    )
    return _Chain(tuple(graph.graph.find_nodes(op="placeholder")), steps, outputs)
