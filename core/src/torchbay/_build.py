"""Fifth stage: a lowered graph becomes something callable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._claims import complaint
from torchbay._control_flow import is_control_flow, node_line, operators_in, with_subgraphs
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
from torchbay.errors import BackendFailed
from torchbay.plugin import (
    Backend,
    CompileRequest,
    Executable,
    GuardedExecutable,
    PartialBackend,
    UnsupportedGraph,
)

__all__ = ["Builder", "Built", "compiling"]

Side = Literal["inference", "forward", "backward"]
Parts = tuple[tuple[str, tuple[str, ...]], ...]

compiling = threading.RLock()
"""Held while a graph is made; not while a call is observed, since a forward may wait for another
thread that compiles."""


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
    parts: Parts

    @property
    def refuses(self) -> Callable[[Sequence[Any]], str | None] | None:
        """The executable's own guard, if it has one."""
        return self.executable.refuses if isinstance(self.executable, GuardedExecutable) else None


@attrs.define(eq=False)
class Builder:
    """Compiles the parts of one lowered trace; equal parts, such as rounds of a loop, once.

    Attributes:
        mode: The mode of the trace, which knows the symbols of its fakes.
        states: Of each tensor among the trace's inputs, whether it is state.
        backend: The backend that compiles them.
        options: An instance of its options class.
        fallback: The backend for what a partial backend does not support, if there is one.
        name: What the caller calls the compiled object.
        is_training: Whether what is compiled is a half of a training step.
        count: How many graphs were handed to a backend.
    """

    mode: Any
    states: tuple[bool, ...]
    backend: Backend
    options: Any
    fallback: Backend | None
    name: str
    is_training: bool = False
    count: int = 0
    _known: dict[str, Built] = attrs.field(factory=dict)

    def __call__(
        self, part: Part, mutated: frozenset[int], private: frozenset[int] = frozenset()
    ) -> Built:
        """Compile a part.

        Args:
            part: The part.
            mutated: The inputs of the trace that it changes.
            private: The positions of outputs that only its backward half takes.

        Raises:
            UnsupportedGraph: The backend declines it, or does not claim what it needs.
            BackendFailed: The backend raised anything else, or made something that cannot run.
        """
        key = f"{_text_of(part.graph)} {sorted(private)}"
        if (known := self._known.get(key)) is not None and not mutated:
            return attrs.evolve(known, part=part)
        positions = frozenset(
            position
            for position, place in enumerate(part.takes)
            if place.level == INPUTS and place.index in mutated
        )
        side: Side = "forward" if self.is_training else "inference"
        states = tuple(map(self._is_state, part.takes))
        executable, parts = self._compiled(part.graph, states, side, positions, private)
        return self._known.setdefault(key, Built(part, executable, parts))

    def backward(self, graph: GraphModule, states: Sequence[bool]) -> Built:
        """Compile a backward half, some of whose inputs are state.

        Raises:
            UnsupportedGraph, BackendFailed: As for the forward half.
        """
        executable, parts = self._compiled(graph, states, "backward")
        return Built(Part(graph, ()), executable, parts)

    def _compiled(
        self,
        graph: GraphModule,
        states: Sequence[bool],
        side: Side,
        mutated: frozenset[int] = frozenset(),
        private: frozenset[int] = frozenset(),
    ) -> tuple[Executable, Parts]:
        self.count += 1
        if isinstance(self.backend, PartialBackend):
            return self._in_regions(graph, states, side)
        return self._whole(graph, states, side, mutated, private)

    def _whole(
        self,
        graph: GraphModule,
        states: Sequence[bool],
        side: Side,
        mutated: frozenset[int] = frozenset(),
        private: frozenset[int] = frozenset(),
    ) -> tuple[Executable, Parts]:
        request = CompileRequest(
            graph=graph,
            example_inputs=_examples(graph.graph.find_nodes(op="placeholder")),
            state_count=sum(states),
            mutated=mutated,
            device=_device(graph),
            options=self.options,
            side=side,
            free_strides=private,
            name=self.name,
        )
        return _compiled(self.backend, request), ((self.backend.name, ()),)

    def _in_regions(
        self, graph: GraphModule, states: Sequence[bool], side: Side
    ) -> tuple[Executable, Parts]:
        """Compile what a partial backend supports with it, and the rest with its fallback."""
        backend = self.backend
        assert isinstance(backend, PartialBackend)
        inputs = graph.graph.find_nodes(op="placeholder")
        state = frozenset(node for node, is_state in zip(inputs, states, strict=True) if is_state)
        regions = cut(graph, _supports(backend), state)
        left = [region for region in regions if not region.is_supported]
        if not left:
            return self._whole(graph, states, side)
        if self.fallback is None:
            operators = sorted({target for region in left for target in region.operators})
            raise UnsupportedGraph(
                f"it does not support {', '.join(operators)}", account=account(backend)
            )
        makers = [backend if region.is_supported else self.fallback for region in regions]
        pairs = list(zip(makers, regions, strict=True))
        executables = [
            _compiled(maker, self._region_request(region, maker, state, side))
            for maker, region in pairs
        ]
        chain = _chain(graph, regions, executables)
        return chain, tuple((maker.name, r.operators) for maker, r in pairs)

    def _region_request(
        self, region: Region, maker: Backend, state: frozenset[Node], side: Side
    ) -> CompileRequest:
        is_own = maker is self.backend
        capabilities = maker.capabilities
        graph = region.graph if is_own else lower_region(region, self.mode, capabilities)
        return CompileRequest(
            graph=graph,
            example_inputs=_examples(region.takes),
            state_count=sum(node in state for node in region.takes),
            device=_device(graph),
            options=self.options if is_own else read_options(maker, None, None),
            side=side,
            name=self.name,
        )

    def _is_state(self, place: Place) -> bool:
        return place.level == INPUTS and place.index < len(self.states) and self.states[place.index]


def _examples(nodes: Sequence[Node]) -> list[Any]:
    return [node.meta["val"] for node in nodes]


def _text_of(graph: GraphModule) -> str:
    """Return a text that is equal for graphs that compute the same from inputs that are alike."""
    names = {node: f"n{i}" for i, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        what = _likeness(node.meta.get("val")) if node.op == "placeholder" else str(node.target)
        if node.op == "get_attr":
            what = _text_of_literal(getattr(graph, str(node.target)))
        args, kwargs = named_arguments(node, names)
        lines.append(f"{node.op} {what} {args} {kwargs}")
    return "\n".join(lines)


def _text_of_literal(value: Any) -> str:
    is_function = isinstance(value, GraphModule)
    return f"{{{_text_of(value)}}}" if is_function else f"literal {id(value)}"


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
    _refuse_unclaimed(backend, request.graph)
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


def _refuse_unclaimed(backend: Backend, graph: GraphModule) -> None:
    """Raise UnsupportedGraph for operators that take functions, if the backend claims none."""
    if not backend.capabilities.control_flow:
        for node in operators_in(graph):
            where = node_line(node)
            raise UnsupportedGraph(
                f"{node.target}{where and ' at '}{where} is control flow, which it does not claim",
                account=account(backend),
            )


def _tensors(module: GraphModule) -> Iterator[torch.Tensor]:
    for node in (node for graph in with_subgraphs(module) for node in graph.graph.nodes):
        value = node.meta.get("val")
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, torch.Tensor):
                yield part


def _is_symbolic(graph: GraphModule) -> bool:
    graphs = with_subgraphs(graph)
    values = (node.meta.get("val") for inner in graphs for node in inner.graph.nodes)
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


def _supports(backend: PartialBackend) -> Callable[[Node], bool]:
    """Return what a backend takes: control flow only if it claims that."""
    if backend.capabilities.control_flow:
        return backend.supports
    return lambda node: not is_control_flow(node.target) and backend.supports(node)


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
