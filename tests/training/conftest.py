"""A backend that trains and watches memory, and models to train."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import torchbay
from torchbay.plugin import Capabilities, CompileRequest, NoOptions


@attrs.frozen(eq=False)
class Runner:
    """Runs a graph with plain PyTorch, and tells the backend what memory it saw."""

    request: CompileRequest
    backend: TrainingBackend

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        self.backend.watch(values)
        outputs = self.request.graph(*values)
        self.backend.watch(outputs)
        return outputs


@attrs.define(eq=False)
class TrainingBackend:
    """Claims training and, unless told so, nothing else.

    Attributes:
        capabilities: What it claims.
        requests: Everything it was asked to compile.
        seen: The memory of what its graphs were given and returned.
    """

    capabilities: Capabilities = attrs.field(factory=lambda: Capabilities(training=True))
    requests: list[CompileRequest] = attrs.field(factory=list)
    seen: list[weakref.ref[Any]] = attrs.field(factory=list)
    name: str = "training"
    api_version: int = 1
    options: type[Any] = NoOptions

    def fingerprint(self) -> dict[str, str]:
        return {}

    def compile(self, request: CompileRequest) -> Runner:
        self.requests.append(request)
        return Runner(request, self)

    @property
    def sides(self) -> list[str]:
        return [request.side for request in self.requests]

    def watch(self, values: Sequence[Any]) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.seen += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

    def alive(self, *besides: torch.Tensor | nn.Module | None) -> int:
        """Return how many pieces of memory still live, besides those of tensors and modules."""
        known = {tensor.untyped_storage()._cdata for tensor in _held(besides)}
        return len({s._cdata for ref in self.seen if (s := ref()) is not None} - known)


def _held(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.buffers()
            yield from (grad for p in value.parameters() if (grad := p.grad) is not None)
            yield from value.parameters()
        elif value is not None:
            yield value


@pytest.fixture
def training() -> TrainingBackend:
    return TrainingBackend()


@pytest.fixture
def inferring() -> TrainingBackend:
    """Claims no training."""
    return TrainingBackend(Capabilities(), name="inferring")


@pytest.fixture
def training_with() -> Callable[..., TrainingBackend]:
    return lambda **claims: TrainingBackend(Capabilities(training=True, **claims))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return perceptron()


@pytest.fixture(params=[perceptron, dropping])
def any_net(request) -> nn.Module:
    torch.manual_seed(0)
    return request.param()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Leave reference cycles alone, so that what only a cycle keeps is found alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _warm(compiled: Any, *args: Any) -> None:
    for _ in range(3):
        compiled(*args).sum().backward()


@pytest.fixture
def served() -> Callable[..., Any]:
    """Compile a program and train it until calls like this one are served from a graph."""

    def serve(program: Any, *args: Any, backend: Any = "eager", **settings: Any) -> Any:
        compiled = torchbay.compile(program, backend=backend, fullgraph=True, **settings)
        _warm(compiled, *args)
        assert torchbay.explain(compiled).calls["graph"] == 2
        for tensor in [*getattr(program, "parameters", list)(), *args]:
            tensor.grad = None
        return compiled

    return serve


@pytest.fixture
def gradients() -> Callable[..., list[torch.Tensor | None]]:
    """Return the gradients that plain PyTorch gives the parameters of a module, and its result."""

    def of(module: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Any:
        twin = copy.deepcopy(module)
        twin.zero_grad()
        loss(twin).backward()
        return [parameter.grad for parameter in twin.parameters()]

    return of


@pytest.fixture
def counted() -> Callable[[Any], contextlib.AbstractContextManager[None]]:
    """Assert that what happens inside is served from a graph, every call of it."""

    @contextlib.contextmanager
    def only_graphs(compiled: Any) -> Iterator[None]:
        before = dict(torchbay.explain(compiled).calls)
        yield
        after = torchbay.explain(compiled).calls
        assert after["eager"] == before["eager"]
        assert after["graph"] > before["graph"]

    return only_graphs
