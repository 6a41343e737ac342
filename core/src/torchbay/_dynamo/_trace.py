"""From Dynamo's graph to the trace that the later stages take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
)
from torchbay._reason import CannotServe
from torchbay._source import Names
from torchbay._torch_compat import is_fake, storage_id, trace_to_graph
from torchbay._torch_symbols import assumptions_of, is_number
from torchbay._trace import RESERVED, Input, Trace

__all__ = ["DynamoTrace", "trace_dynamo_graph"]

_STATE = ("._parameters[", "._buffers[")


@attrs.frozen(eq=False)
class DynamoTrace:
    """A trace of Dynamo's graph.

    Attributes:
        trace: What the later stages take; its result is what Dynamo's graph returns.
        positions: Which of the graph's inputs each input of the trace is.
    """

    trace: Trace
    positions: tuple[int, ...]


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
        fakes = tuple(_own(mode, example_of(nodes[position])) for position in positions)
        flat = _Flat(graph, positions, fakes)
        before = list(map(_form, fakes))
        traced = _traced(flat, fakes, mode)
    if list(map(_form, fakes)) != before:
        raise CannotServe("it changes the form or the memory of an input")
    found = [nodes[position] for position in positions]
    items = [Item(source_of(n), n.name, fake) for n, fake in zip(found, fakes, strict=True)]
    tensors = [item for item in items if not is_number(item.value)]
    trace = Trace(
        graph=traced,
        inputs=tuple(Input(item.value, (item,), _is_state(item.path)) for item in tensors),
        numbers=tuple(items[len(tensors) :]),
        fakes=fakes,
        result=flat.result,
        effects=(),
        result_count=len(flat.results),
        gates=(),
        is_inference=_is_inference(graph, flat, tensors),
        mode=mode,
        sizes={},
        names=Names(*RESERVED),
        check=_nothing_new(mode),
    )
    return DynamoTrace(trace, positions)


def _nothing_new(mode: Any) -> Callable[[Any], None]:
    """Return what refuses assumptions about numbers which Dynamo's graph does not assert."""
    asserted = frozenset(map(str, assumptions_of(mode)))

    def check(mode: Any) -> None:
        for assumption in assumptions_of(mode):
            if str(assumption) not in asserted:
                raise CannotServe(f"that {assumption} cannot be checked")

    return check


def _order(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Return the positions of the inputs in the order of a trace: state, tensors, numbers."""

    def rank(position: int) -> int:
        node = nodes[position]
        return 2 if is_number(example_of(node)) else int(not _is_state(source_of(node)))

    return tuple(sorted(range(len(nodes)), key=rank))


def _is_state(path: str) -> bool:
    return path.startswith("G[") or any(mark in path for mark in _STATE)


def _own(mode: Any, example: Any) -> Any:
    """Return what stands for an input of Dynamo's, so that Dynamo's own fake is not changed."""
    return example if is_number(example) else detached(mode, example)


class _Flat:
    """Dynamo's graph as a function of the flat inputs of a trace.

    Attributes:
        values: What the graph returned.
        results: The tensors and numbers among them that are no inputs.
        result: An expression over ``out`` and ``inputs`` that makes what the graph returns.
    """

    def __init__(self, graph: GraphModule, positions: Sequence[int], fakes: Sequence[Any]) -> None:
        self.values: Sequence[Any] = ()
        self.results: list[Any] = []
        self.result = ""
        self._interpreter = Interpreter(graph)
        self._positions = positions
        self._inputs = {id(fake): position for position, fake in enumerate(fakes)}

    def __call__(self, *given: Any) -> list[Any]:
        by_position = dict(zip(self._positions, given, strict=True))
        self.values = self._interpreter.run(*(by_position[i] for i in range(len(given))))
        self.results = []
        self.result = f"({''.join(self._source(value) + ', ' for value in self.values)})"
        return self.results

    def _source(self, value: Any) -> str:
        if isinstance(value, int):
            return repr(value)
        if not (isinstance(value, torch.Tensor) or is_number(value)):
            raise CannotServe(f"it returns a {type(value).__qualname__}")
        if (position := self._inputs.get(id(value))) is not None:
            return f"inputs[{position}]"
        found = [i for i, other in enumerate(self.results) if other is value]
        if not found:
            self.results.append(value)
        return f"out[{found[0] if found else len(self.results) - 1}]"


def _traced(flat: _Flat, fakes: Sequence[Any], mode: Any) -> GraphModule:
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


def _form(fake: Any) -> Any:
    if is_number(fake):
        return None
    return tuple(fake.shape), fake.stride(), storage_id(fake), fake.dtype


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


def _is_inference(graph: GraphModule, flat: _Flat, inputs: Sequence[Item]) -> bool:
    """Whether the results are made in an inference mode that the graph enters itself.

    Raises:
        CannotServe: Some are, some are not.
    """
    inside = inference_nodes(graph)
    # A view of an input is like the input, wherever it was made.
    known = {storage_id(item.value) for item in inputs}
    kinds = {
        node in inside
        for node, value in zip(_result_nodes(graph), flat.values, strict=True)
        if isinstance(value, torch.Tensor) and storage_id(value) not in known
    }
    if len(kinds) > 1:
        raise CannotServe("its result holds tensors made in inference mode and others")
    return True in kinds and not torch.is_inference_mode_enabled()
