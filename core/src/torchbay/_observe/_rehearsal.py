"""Running a call whose effects are undone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchbay._observe._ops import BATCH_NORMS
from torchbay._torch_compat import (
    ObservingDispatchMode,
    lazy_signs_resolved,
    storage_id,
    writes_of,
)

__all__ = [
    "WriteUndo",
    "generator_states",
    "python_randomness_kept",
    "restore_generators",
    "unmoved_generators",
    "written",
]


class WriteUndo(ObservingDispatchMode):
    """Copies what an operator is about to overwrite, once for each storage."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for tensor in written(func, args, kwargs or {}):
            self._keep(tensor)
        with lazy_signs_resolved():
            return func(*args, **(kwargs or {}))

    def _keep(self, tensor: torch.Tensor) -> None:
        if (key := storage_id(tensor)) not in self._copies:
            # A view of the whole storage: other views of it may be written later.
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._copies[key] = (whole, whole.clone())

    def undo(self) -> None:
        """Put back what every storage held when it was first written."""
        with torch.no_grad():
            for whole, before in self._copies.values():
                whole.copy_(before)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors an operator's schema says it writes."""
    hidden = ((3, "running_mean"), (4, "running_var")) if func in BATCH_NORMS else ()
    for position, name in (*writes_of(func), *hidden):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                yield tensor


@contextmanager
def unmoved_generators() -> Iterator[None]:
    """Leave the random generators of the CPU and of every CUDA device in use where they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def python_randomness_kept() -> Iterator[None]:
    """Leave the generators of Python and NumPy where they were."""
    numpy = sys.modules.get("numpy.random")
    before, numpy_before = random.getstate(), numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(numpy_before)


def generator_states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the states of PyTorch's default generators, of the CPU and of each CUDA device."""
    has_cuda = torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if has_cuda else []


def restore_generators(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Put the generators back to where `generator_states` found them."""
    cpu, devices = states
    torch.set_rng_state(cpu)
    if devices:
        torch.cuda.set_rng_state_all(devices)
