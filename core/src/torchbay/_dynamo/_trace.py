"""From Dynamo's graph to the trace that the later stages take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Interpreter, Node

from torchbay._call import Item
from torchbay._dynamo_compat import (
    detached,
    example_of,
    hidden_from_dynamo,
    higher_order_name,
    inference_nodes,
    source_of,
    symbol_of,
)
from torchbay._reason import CannotServe
from torchbay._source import Names
from torchbay._torch_compat import is_fake, storage_id, trace_to_graph
from torchbay._trace import Input, Trace

__all__ = ["DynamoTrace", "Output", "trace_dynamo_graph"]

_STATE = ("._parameters[", "._buffers[")


@attrs.frozen(eq=False)
class Output:
    """What one output of Dynamo's graph is: an input, a result of the trace, or a size."""

    kind: str
    value: Any


@attrs.frozen(eq=False)
class DynamoTrace:
    """A trace of Dynamo's graph, and how its flat inputs and outputs lie in the graph's own.

    Attributes:
        trace: What the later stages take.
        positions: Which of the graph's inputs each input of the trace is.
        outputs: What the graph's outputs are, in order.
    """

    trace: Trace
    positions: tuple[int, ...]
    outputs: tuple[Output, ...]


def trace_dynamo_graph(graph: GraphModule) -> DynamoTrace:
    """Trace a graph of Dynamo's below autograd.

    Raises:
        CannotServe: It holds something no graph of ours can, or its results need gradients.
    """
    nodes = list(graph.graph.find_nodes(op="placeholder"))
    _refuse_unusable(graph, nodes)
    positions = _order(nodes)
    mode = _fake_mode(graph)
    with hidden_from_dynamo(mode):
        fakes = tuple(detached(mode, example_of(nodes[position])) for position in positions)
        flat = _Flat(graph, nodes, positions, fakes)
        before = list(map(_form, fakes))
        traced = _traced(flat, fakes, mode)
    if list(map(_form, fakes)) != before:
        raise CannotServe("it changes the form or the memory of an input")
    inputs = tuple(
        _input(nodes[position], fake) for position, fake in zip(positions, fakes, strict=True)
    )
    trace = Trace(
        traced,
        inputs,
        fakes,
        "out",
        len(flat.results),
        (),
        (),
        _is_inference(graph, flat, fakes),
        mode,
        Names(),
    )
    return DynamoTrace(trace, positions, flat.outputs)


def _order(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Return the positions of the tensors among the inputs, state first."""
    tensors = [i for i, node in enumerate(nodes) if isinstance(example_of(node), torch.Tensor)]
    return tuple(sorted(tensors, key=lambda position: not _is_state(nodes[position])))


def _is_state(node: Node) -> bool:
    source = source_of(node)
    return source.startswith("G[") or any(mark in source for mark in _STATE)


def _input(node: Node, fake: torch.Tensor) -> Input:
    path = source_of(node)
    return Input(fake, (Item(path, path, fake),), _is_state(node))


class _Flat:
    """Dynamo's graph as a function of the flat inputs of a trace."""

    def __init__(
        self,
        graph: GraphModule,
        nodes: Sequence[Node],
        positions: Sequence[int],
        fakes: Sequence[torch.Tensor],
    ) -> None:
        self.results: list[torch.Tensor] = []
        self.outputs: tuple[Output, ...] = ()
        self._interpreter = Interpreter(graph)
        known = {symbol_of(s) for f in fakes for s in f.shape if isinstance(s, torch.SymInt)}
        self._given = [_settled(example_of(node), known) for node in nodes]
        self._positions = positions
        self._inputs = {id(fake): position for position, fake in enumerate(fakes)}

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        given = list(self._given)
        for position, tensor in zip(self._positions, tensors, strict=True):
            given[position] = tensor
        values = self._interpreter.run(*given)
        self.results = []
        self.outputs = tuple(self._output(value) for value in values)
        return self.results

    def _output(self, value: Any) -> Output:
        if isinstance(value, (int, torch.SymInt)):
            return Output("size", value)
        if not isinstance(value, torch.Tensor):
            raise CannotServe(f"it returns a {type(value).__qualname__}")
        if (position := self._inputs.get(id(value))) is not None:
            return Output("input", position)
        found = [i for i, other in enumerate(self.results) if other is value]
        if not found:
            self.results.append(value)
        return Output("result", found[0] if found else len(self.results) - 1)


def _settled(value: Any, known: set[Any]) -> Any:
    """Return a symbolic number that is no tensor's size as the number: Dynamo guards it then."""
    is_free = isinstance(value, torch.SymInt) and symbol_of(value) not in known
    return int(value) if is_free else value


def _traced(flat: _Flat, fakes: Sequence[torch.Tensor], mode: Any) -> GraphModule:
    try:
        with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
            return trace_to_graph(flat, fakes)
    except CannotServe:
        raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise CannotServe(f"tracing raised {type(error).__name__}: {line}") from error


def _result_nodes(graph: GraphModule) -> Sequence[Any]:
    (results,) = graph.graph.output_node().args
    return results  # type: ignore[return-value]


def _needs_gradients(graph: GraphModule) -> bool:
    examples = (example_of(node) for node in _result_nodes(graph) if isinstance(node, Node))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in examples)


def _fake_mode(graph: GraphModule) -> Any:
    """Return the mode that made the fakes in a graph."""
    examples = map(example_of, graph.graph.nodes)
    modes = (example.fake_mode for example in examples if is_fake(example))
    if (mode := next(modes, None)) is None:
        raise CannotServe("it computes no tensor")
    return mode


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), storage_id(tensor), tensor.dtype


def _refuse_unusable(graph: GraphModule, nodes: Sequence[Node]) -> None:
    if (name := higher_order_name(graph)) is not None:
        raise CannotServe(f"it calls the higher-order operator {name}")
    for node in graph.graph.nodes:
        # A parameter here would be a constant, whatever became of it later.
        if node.op in {"call_module", "get_attr"}:
            raise CannotServe(f"it holds {node.target} as a constant")
    for node in nodes:
        _refuse_input(source_of(node), example_of(node))
    if _needs_gradients(graph):
        raise CannotServe(
            "its result needs gradients, and training is not served from a graph yet",
            remedy="Call it under torch.no_grad() or torch.inference_mode() for inference",
        )


def _refuse_input(path: str, value: Any) -> None:
    if isinstance(value, torch.SymInt):
        return
    if not isinstance(value, torch.Tensor):
        raise CannotServe(f"{path} is a {type(value).__qualname__}")
    if not is_fake(value):
        raise CannotServe(f"{path} is a tensor subclass")
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        raise CannotServe(f"{path} is sparse, nested or quantized")


def _is_inference(graph: GraphModule, flat: _Flat, fakes: Sequence[torch.Tensor]) -> bool:
    """Whether the results are made in an inference mode that the graph enters itself.

    Raises:
        CannotServe: Some are, some are not.
    """
    inside = inference_nodes(graph)
    # A view of an input is like the input, wherever it was made.
    known = {storage_id(fake) for fake in fakes}
    kinds = {
        node in inside
        for node, output in zip(_result_nodes(graph), flat.outputs, strict=True)
        if output.kind == "result" and storage_id(flat.results[output.value]) not in known
    }
    if len(kinds) > 1:
        raise CannotServe("its result holds tensors made in inference mode and others")
    return True in kinds and not torch.is_inference_mode_enabled()
