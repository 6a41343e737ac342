"""The eager backend: a graph becomes the Python function that fx generates from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from torchbay.plugin import Capabilities, CompileRequest, NoOptions

from ._boxed import boxed_function

__all__ = ["EagerBackend", "EagerExecutable"]


@attrs.frozen
class EagerExecutable:
    """Calls the operators of a graph one by one and drops each value after its last use."""

    run: Callable[[list[Any]], Sequence[Any]]


@attrs.frozen
class EagerBackend:
    """Runs every graph on every device."""

    name: str = "eager"
    api_version: int = 1
    options: type[NoOptions] = NoOptions
    capabilities: Capabilities = attrs.field(
        factory=lambda: Capabilities(
            devices=_device_types(),
            dynamic_shapes=True,
            mutation=True,
            control_flow=True,
            eager_random=True,
            training=True,
            thread_safe=True,
        )
    )

    def fingerprint(self) -> Mapping[str, str]:
        """Name the PyTorch whose operators the graph calls."""
        return {"torch": torch.__version__}

    def compile(self, request: CompileRequest) -> EagerExecutable:
        """Generate the function; nothing is specialized to the request's sizes."""
        return EagerExecutable(boxed_function(request.graph))


def _device_types() -> frozenset[str]:
    """Return the types PyTorch ships, and the accelerator's own name where it brings one."""
    shipped = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu"})
    accelerator = torch.accelerator.current_accelerator()
    return shipped if accelerator is None else shipped | {accelerator.type}
