"""Checks of a call's inputs: machine code reads them as compiled for, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from torchbay.errors import InvalidArgument

from . import _torch_compat

__all__ = ["InputSpec", "checking", "copying_back", "specs_of"]

_Run = Callable[[list[Any]], Sequence[Any]]

# What AOTInductor's kernels for CUDA take for granted of a pointer.
_ALIGNMENT = 16


@attrs.frozen
class InputSpec:
    """The tensor that machine code was compiled for."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def mismatch(self, value: object) -> str:
        """Say what makes ``value`` unfit, or nothing."""
        if not _torch_compat.is_plain_tensor(value):
            return f"is a {type(value).__name__}, not a plain tensor"
        if value.layout is not torch.strided:
            return f"has layout {value.layout}"
        if _state_of(value) != self:
            return f"is {_state_of(value)}, compiled for {self}"
        if value.is_neg() or value.is_conj():
            return "is a lazy negation or conjugate"
        if value.untyped_storage().nbytes() < _bytes_needed(value):
            return "has a storage smaller than its sizes say"
        return ""

    def __str__(self) -> str:
        return f"{self.dtype}, {self.device}, sizes {self.sizes}, strides {self.strides}"


def specs_of(tensors: Iterable[torch.Tensor]) -> list[InputSpec]:
    """Return what each of these inputs must be like."""
    return [_state_of(tensor) for tensor in tensors]


def checking(run: _Run, specs: Sequence[InputSpec]) -> _Run:
    """Return ``run`` behind a check that refuses inputs before machine code reads them.

    The full check costs about a microsecond an input. What it accepted is remembered in a form
    that PyTorch compares in a tenth of that, and only what differs is checked in full again.
    """
    count, has_storage = len(specs), torch.Tensor.data_ptr
    accepted = _torch_compat.accept_nothing

    def run_checked(inputs: list[Any]) -> Sequence[Any]:
        nonlocal accepted
        if len(inputs) != count or not accepted(*inputs) or not all(map(has_storage, inputs)):
            _refuse_unfit(inputs, specs)
            accepted = _torch_compat.acceptance_of(inputs)
        return run(inputs)

    return run_checked


def _refuse_unfit(inputs: Sequence[Any], specs: Sequence[InputSpec]) -> None:
    if len(inputs) != len(specs):
        raise _unfit(f"takes {len(specs)} inputs, not {len(inputs)}")
    for position, (value, spec) in enumerate(zip(inputs, specs, strict=True)):
        if reason := spec.mismatch(value):
            raise _unfit(f"cannot take input {position}: it {reason}")


def _unfit(reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"the compiled code {reason}",
        account="backend 'aoti'",
        remedy="Call the compiled object rather than its executable; it compiles anew.",
    )


def copying_back(run: _Run, mutated: Sequence[int]) -> _Run:
    """Return ``run`` such that it writes to misaligned inputs as well.

    Packages for CUDA copy a misaligned input first, and would write to that copy.
    """

    def run_and_copy_back(inputs: list[Any]) -> Sequence[Any]:
        originals = {
            position: inputs[position]
            for position in mutated
            if inputs[position].data_ptr() % _ALIGNMENT
        }
        aligned = {position: _aligned_copy(tensor) for position, tensor in originals.items()}
        for position, tensor in aligned.items():
            inputs[position] = tensor
        outputs = run(inputs)
        for position, tensor in aligned.items():
            originals[position].copy_(tensor)
        return outputs

    return run_and_copy_back


def _aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _state_of(tensor: torch.Tensor) -> InputSpec:
    return InputSpec(tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())


def _bytes_needed(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()
