"""Packed sequences: how they are laid out depends on lengths, which gates have fixed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchbay._reason import CannotServe
from torchbay._source import user_line
from torchbay._torch_compat import untraced, writes_of

__all__ = ["KnownTensors", "pack", "pad"]

aten = torch.ops.aten


class KnownTensors:
    """Tensors whose elements follow from gates, computed for real while a call is traced."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self._lifted: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember a tensor as known."""
        self._known[id(tensor)] = tensor
        return tensor

    def __contains__(self, value: object) -> bool:
        return id(value) in self._known

    def decide(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether what an operator returns is known: every tensor it is given is, and one is."""
        if not self._known:
            return False
        given = list(_given((tuple(args), dict(kwargs))))
        return bool(given) and all(tensor in self for tensor in given)

    def refuse_writes(self, operator: Any, args: Sequence[Any]) -> None:
        """Raise CannotServe for an operator that changes a known tensor: others were made of it."""
        for position, _ in writes_of(operator):
            if position < len(args) and args[position] in self:
                raise CannotServe("the layout of a packed sequence is changed", where=user_line())

    def run(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute what an operator returns, which is known."""
        with untraced():
            result = operator(*args, **kwargs)
        return self.add(result) if isinstance(result, torch.Tensor) else result

    def lifted(self, value: Any) -> Any:
        """Return a value with its known tensors in the graph, as literals of a program are."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.lifted(item) for item in value)
        if value not in self:
            return value
        if id(value) not in self._lifted:
            self._lifted[id(value)] = aten.lift_fresh_copy.default(value)
        return self._lifted[id(value)]


def _given(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _given(item)
    elif isinstance(value, dict):
        yield from _given(list(value.values()))


def pack(
    padded: torch.Tensor,
    lengths: Sequence[int],
    batch_first: bool,  # noqa: FBT001 - as PyTorch's
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``aten._pack_padded_sequence`` does, in operators whose sizes are plain."""
    steps = padded.transpose(0, 1) if batch_first else padded
    batch_sizes = [sum(length > step for length in lengths) for step in range(lengths[0])]
    parts = [
        steps[first:last, :size].reshape(-1, *padded.shape[2:])
        for first, last, size in _runs(batch_sizes)
    ]
    with untraced():
        known = torch.tensor(batch_sizes)
    return torch.cat(parts), known


def pad(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,  # noqa: FBT001 - as PyTorch's
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``torch._VF._pad_packed_sequence`` does, which reads sizes past every mode."""
    with untraced():
        sizes = batch_sizes.tolist()
        lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    longest = max(total_length, len(sizes))
    padded = aten.full.default(
        [longest, sizes[0], *data.shape[1:]],
        padding_value,
        dtype=data.dtype,
        layout=data.layout,
        device=data.device,
    )
    # PyTorch fills this one with the lengths behind the back of every mode.
    aten.empty.memory_format(
        [sizes[0]], dtype=lengths.dtype, layout=lengths.layout, device=lengths.device
    )
    offset = 0
    for first, last, size in _runs(sizes):
        count = (last - first) * size
        part = data[offset : offset + count].view(last - first, size, *data.shape[1:])
        padded[first:last, :size].copy_(part)
        offset += count
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _runs(batch_sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first step, step after the last, and size of neighbouring steps of one size."""
    step = 0
    for size, steps in itertools.groupby(batch_sizes):
        first, step = step, step + len(list(steps))
        yield first, step, size
