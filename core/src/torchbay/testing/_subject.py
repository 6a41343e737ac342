"""The backend under test, and the ways to reach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

import torchbay
from torchbay._registry import choose
from torchbay.plugin import Backend, Capabilities, CompileRequest, Executable, NoOptions

__all__ = ["Recorder", "Subject", "tensors_in"]


@attrs.frozen(eq=False)
class Subject:
    """A backend on one device.

    Attributes:
        backend: What is tested.
        expected_name: The name it is asked for by.
        device: Where the tensors of the tests are.
        known_failures: Name of a test, with or without parameters -> link that explains it.
    """

    backend: Backend
    expected_name: str
    device: torch.device
    known_failures: Mapping[str, str]

    @property
    def claims(self) -> Capabilities:
        """What the backend says it takes."""
        return self.backend.capabilities

    @property
    def is_installed(self) -> bool:
        """Whether a distribution brings it, so that other processes find it too."""
        names = {listing.name for listing in torchbay.backends()}
        return self.expected_name in names and choose(self.expected_name) is self.backend

    @property
    def version(self) -> str:
        """The version of the distribution that brings it, empty if none does."""
        if not self.is_installed:
            return ""
        return next(each.version for each in torchbay.backends() if each.name == self.expected_name)

    def compile(self, function: Callable[..., Any], **settings: Any) -> Any:
        """Compile as a user does who accepts nothing but this backend."""
        chosen = {"backend": self.backend, "fullgraph": True, "fallback": None} | settings
        return torchbay.compile(function, **chosen)

    def request(self, function: Callable[..., Any], *inputs: torch.Tensor) -> CompileRequest:
        """Return the request that the core makes for a call."""
        recorder = Recorder(self.backend.capabilities)
        compiled: Any = torchbay.compile(function, backend=recorder, fullgraph=True)
        with torch.no_grad():
            compiled.warmup(*inputs)
        [request] = recorder.requests
        return attrs.evolve(request, options=self.backend.options())

    def build(self, request: CompileRequest) -> Executable:
        """Have a request compiled, without the core's precautions."""
        with torch.no_grad():
            return self.backend.compile(request)

    def randn(self, *sizes: int, seed: int = 0) -> torch.Tensor:
        """Return normally distributed numbers, the same on every device."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(*sizes, generator=draw).to(self.device)


@attrs.define(eq=False)
class Recorder:
    """A backend that takes what another one takes and keeps the requests."""

    capabilities: Capabilities
    requests: list[CompileRequest] = attrs.field(factory=list)
    name: str = "recorder"
    api_version: int = 1
    options: type[NoOptions] = NoOptions

    def fingerprint(self) -> Mapping[str, str]:
        """Name nothing: what is recorded is kept nowhere else."""
        return {}

    def compile(self, request: CompileRequest) -> Executable:
        """Keep the request; its graph runs as it is."""
        self.requests.append(request)
        return _GraphRunner(request.graph)


@attrs.frozen(eq=False)
class _GraphRunner:
    """Runs a graph as it is."""

    graph: torch.fx.GraphModule

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = self.graph(*inputs)
        return outputs


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [t for part in value for t in tensors_in(part)] if isinstance(value, (tuple, list)) else []
    )
