"""A graph of PyTorch's operators becomes a model of OpenVINO's."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset15
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchbay.plugin import UnsupportedGraph

from . import _operators, _torch_compat
from ._table import TABLE, Conversion, declined

__all__ = ["TYPES", "model", "refusal", "selection"]

TYPES = {
    torch.float32: ov.Type.f32,
    torch.bool: ov.Type.boolean,
    torch.int64: ov.Type.i64,
    torch.int32: ov.Type.i32,
}
_INDICES = frozenset({torch.int32, torch.int64})
_FAMILIES = _operators.__all__


def model(graph: Graph, results: Sequence[Node]) -> ov.Model:
    """Return a model with the graph's inputs that computes ``results``.

    Raises:
        UnsupportedGraph: A node has no conversion, or none for what it is given.
    """
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = _parameter(node)
        elif node.op != "output":
            values[node] = _converted(node, values)
    inputs = [values[node].get_node() for node in graph.find_nodes(op="placeholder")]
    return ov.Model([_result(values[node]) for node in results], inputs, "torchbay")


def _result(value: ov.Output) -> ov.Node:
    if value.get_node().get_type_name() == "Parameter":
        # A result that is a bare parameter is written into the memory of that input.
        sizes = np.array(value.get_shape(), dtype=np.int64)
        value = opset15.reshape(value, opset15.constant(sizes), special_zero=False)
    return opset15.result(value)


def refusal(node: Node) -> str:
    """Say why a node cannot be in a model, or nothing if it can.

    The answer is found by converting the node, alone, for inputs like its own.
    """
    producer = _producer(node)
    try:
        result = _converted(producer, {each: _parameter(each) for each in producer.all_input_nodes})
    except UnsupportedGraph as error:
        return error.what
    if isinstance(result, tuple):
        missing = [user for user in producer.users if result[_position(user)] is None]
        return f"OpenVINO makes no '{missing[0].name}'" if missing else ""
    return ""


def selection(node: Node) -> tuple[Node, int] | None:
    """Return the indices by which a node selects rows, and how many rows there are."""
    conversion = TABLE.get(node.target)
    if conversion is None or conversion.index is None:
        return None
    bound = _torch_compat.arguments(node)
    return bound[conversion.index], bound[0].meta["val"].shape[0]


def _producer(node: Node) -> Node:
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _position(user: Node) -> int:
    position: Any = user.args[1]
    return int(position)


def _parameter(node: Node) -> Any:
    fake = _fit(node)
    return opset15.parameter(list(fake.shape), TYPES[fake.dtype]).output(0)


def _fit(node: Node) -> torch.Tensor:
    """Return the fake of a tensor that OpenVINO can be given."""
    fake = node.meta.get("val")
    if node.op == "get_attr" or not isinstance(fake, torch.Tensor):
        raise declined(f"'{node.name}' is not a computed tensor")
    if fake.layout is not torch.strided or fake.is_neg() or fake.dtype not in TYPES:
        raise declined(f"'{node.name}' is no plain tensor of a type that OpenVINO is given")
    if fake.numel() == 0:
        # Some operators of OpenVINO end the process on them.
        raise declined(f"'{node.name}' has no elements")
    return fake


def _converted(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.target is operator.getitem:
        return values[node.all_input_nodes[0]][_position(node)]
    conversion = TABLE.get(node.target)
    if node.op != "call_function" or conversion is None:
        raise declined(f"OpenVINO is given no {node.target}")
    _refuse_operands(node, conversion)
    arguments: Any = map_arg(_torch_compat.arguments(node), values.__getitem__)
    try:
        result = conversion.build(*arguments)
    except RuntimeError as error:
        # OpenVINO checks shapes and types as an operator is made.
        raise declined(f"OpenVINO refuses '{node.name}': {error}") from error
    return _checked(node, result)


def _refuse_operands(node: Node, conversion: Conversion) -> None:
    index = None
    if conversion.index is not None:
        index = _torch_compat.arguments(node)[conversion.index]
    for operand in node.all_input_nodes:
        allowed = _INDICES if operand is index else conversion.operands
        if (dtype := _fit(operand).dtype) not in allowed:
            raise declined(f"OpenVINO is given no {node.target} of {dtype}")


def _checked(node: Node, result: Any) -> Any:
    """Return outputs as declared by the graph, or decline: then the conversion does not fit."""
    fakes = node.meta["val"]
    if isinstance(fakes, torch.Tensor):
        return _as_declared(node, result, fakes)
    pairs = zip(result, fakes, strict=False)
    return tuple(made and _as_declared(node, made, fake) for made, fake in pairs)


def _as_declared(node: Node, made: Any, fake: torch.Tensor) -> Any:
    output = made if isinstance(made, ov.Output) else made.output(0)
    found = output.get_element_type(), tuple(output.get_shape())
    if 0 in fake.shape or found != (TYPES.get(fake.dtype), tuple(fake.shape)):
        raise declined(f"OpenVINO makes {found} of '{node.name}'")
    return output
