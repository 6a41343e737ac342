"""Fifth stage: a lowered graph becomes something callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._claims import complaint
from torchbay._control_flow import is_control_flow, node_line, operators_in, with_subgraphs
from torchbay._lower import Lowered, Region, cut, lower_region
from torchbay._observe import unmoved_generators
from torchbay._options import read as read_options
from torchbay._registry import account
from torchbay._torch_compat import compiler_flag
from torchbay._trace import Trace
from torchbay.errors import BackendFailed
from torchbay.plugin import (
    Backend,
    CompileRequest,
    Executable,
    PartialBackend,
    UnsupportedGraph,
)

__all__ = ["Built", "build", "build_in_regions"]


@attrs.frozen(eq=False)
class Built:
    """A graph and what runs it.

    Attributes:
        lowered: The graph, and what surrounds it.
        executable: What runs it, or None when nothing is computed.
        parts: The backends that compiled it, each with the operators of its part; of a graph that
            was not cut, the operators are left out.
    """

    lowered: Lowered
    executable: Executable | None
    parts: tuple[tuple[str, tuple[str, ...]], ...]


def build(lowered: Lowered, trace: Trace, backend: Backend, options: Any, name: str) -> Executable:
    """Compile a graph with a backend.

    Raises:
        UnsupportedGraph: The backend declines it, or does not claim its device or dtypes.
        BackendFailed: The backend raised anything else, or made something that cannot run.
    """
    assert lowered.graph is not None
    written = set(lowered.written) if lowered.by_backend else set()
    request = CompileRequest(
        graph=lowered.graph,
        example_inputs=[trace.fakes[i] for i in lowered.inputs],
        state_count=sum(trace.inputs[i].is_state for i in lowered.inputs),
        mutated=frozenset(p for p, i in enumerate(lowered.inputs) if i in written),
        device=_device(lowered.graph),
        options=options,
        name=name,
    )
    return _compiled(backend, request)


def _compiled(backend: Backend, request: CompileRequest) -> Executable:
    if (problem := complaint(backend.capabilities, _tensors(request.graph))) is not None:
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


def build_in_regions(
    lowered: Lowered,
    trace: Trace,
    backend: PartialBackend,
    options: Any,
    fallback: Backend | None,
    name: str,
) -> tuple[Executable, tuple[tuple[str, tuple[str, ...]], ...]]:
    """Compile what a partial backend supports with it, and the rest with its fallback.

    Returns the executable, and for each region the backend that got it and its operators.

    Raises:
        UnsupportedGraph: Something is left and there is no fallback, or a backend declines.
        BackendFailed: As `build` says.
    """
    assert lowered.graph is not None
    state = _state_nodes(lowered, trace)
    regions = cut(lowered.graph, _supports(backend), state)
    left = [region for region in regions if not region.is_supported]
    if not left:
        executable = build(lowered, trace, backend, options, name)
        return executable, ((backend.name, ()),)
    if fallback is None:
        operators = sorted({target for region in left for target in region.operators})
        raise UnsupportedGraph(
            f"it does not support {', '.join(operators)}", account=account(backend)
        )
    state = _state_nodes(lowered, trace)
    makers = [backend if region.is_supported else fallback for region in regions]
    executables = [
        _compiled(maker, _region_request(region, maker, backend, options, trace, state, name))
        for maker, region in zip(makers, regions, strict=True)
    ]
    chain = _chain(lowered.graph, regions, executables)
    pairs = zip(makers, regions, strict=True)
    return chain, tuple((maker.name, region.operators) for maker, region in pairs)


def _supports(backend: PartialBackend) -> Callable[[Node], bool]:
    """Return what a backend takes: control flow only if it claims that."""
    if backend.capabilities.control_flow:
        return backend.supports
    return lambda node: not is_control_flow(node.target) and backend.supports(node)


def _state_nodes(lowered: Lowered, trace: Trace) -> frozenset[Node]:
    assert lowered.graph is not None
    placeholders = lowered.graph.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, lowered.inputs, strict=True)
    return frozenset(node for node, position in pairs if trace.inputs[position].is_state)


def _region_request(  # noqa: PLR0917 - what a request is made of
    region: Region,
    maker: Backend,
    backend: Backend,
    options: Any,
    trace: Trace,
    state: frozenset[Node],
    name: str,
) -> CompileRequest:
    is_own = maker is backend
    graph = region.graph if is_own else lower_region(region, trace.fake_mode, maker.capabilities)
    return CompileRequest(
        graph=graph,
        example_inputs=[node.meta["val"] for node in region.takes],
        state_count=sum(node in state for node in region.takes),
        device=_device(graph),
        options=options if is_own else read_options(maker, None, None),
        name=name,
    )


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
