"""A compiled model behind the calling convention of torchbay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import openvino as ov
import torch
from torch.fx import Graph, GraphModule

from ._convert import selection
from ._memory import borrowed
from ._outputs import views

__all__ = ["OpenVinoExecutable"]


@attrs.frozen
class IndexBound:
    """An input that selects rows of a table; OpenVINO does not mind when there is none."""

    position: int
    size: int

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise IndexError, as PyTorch does, where a row does not exist."""
        index = inputs[self.position]
        if index.numel():
            low, high = index.aminmax()
            if int(low) < 0 or int(high) >= self.size:
                raise IndexError(f"index out of range: {int(low)} to {int(high)} of {self.size}")


class OpenVinoExecutable:
    """Runs a compiled model on PyTorch's own memory, inputs and outputs alike.

    State stays bound by its address from call to call: an address is enough to run, keeps nothing
    alive, and is compared before it is used again.
    """

    def __init__(self, compiled: ov.CompiledModel, graph: GraphModule, state_count: int) -> None:
        self.compiled = compiled
        self._request = compiled.create_infer_request()
        self._bounds = _bounds(graph.graph)
        made, self._views = views(graph.graph)
        self._made = [_Made.like(node.meta["val"]) for node in made]
        self._addresses: list[int | None] = [None] * state_count

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the model once and return its outputs in memory of their own."""
        for bound in self._bounds:
            bound.check(inputs)
        bases = [*inputs, *self._infer(inputs)]
        inputs.clear()
        return [view.of(bases) for view in self._views]

    def _infer(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Held until the request is done, for it borrows their memory.
        given = [tensor.contiguous() for tensor in inputs]
        made = [torch.empty(spec.sizes, dtype=spec.dtype) for spec in self._made]
        for position, tensor in enumerate(given):
            self._bind(position, tensor)
        for position, tensor in enumerate(made):
            self._request.set_output_tensor(position, borrowed(tensor))
        self._request.infer()
        return [spec.laid_out(tensor) for spec, tensor in zip(self._made, made, strict=True)]

    def _bind(self, position: int, tensor: torch.Tensor) -> None:
        if position < len(self._addresses):
            address = tensor.data_ptr()
            if address == self._addresses[position]:
                return
            self._addresses[position] = address
        self._request.set_input_tensor(position, borrowed(tensor))


@attrs.frozen
class _Made:
    """A tensor that OpenVINO makes, row by row, and how PyTorch lays it out."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, fake: torch.Tensor) -> _Made:
        return cls(tuple(fake.shape), fake.stride(), fake.dtype)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() == self.strides:
            return tensor
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype).copy_(tensor)


def _bounds(graph: Graph) -> list[IndexBound]:
    inputs = graph.find_nodes(op="placeholder")
    selections = filter(None, map(selection, graph.nodes))
    return [IndexBound(inputs.index(index), size) for index, size in selections]
