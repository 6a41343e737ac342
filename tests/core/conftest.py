"""Backends that only record, decline or crash, so that these tests are about the core alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from torchbay.plugin import Capabilities, CompileRequest, NoOptions, UnsupportedGraph


@attrs.frozen(eq=False)
class GraphRunner:
    """Runs a graph with plain PyTorch."""

    graph: torch.fx.GraphModule

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        return self.graph(*values)


@attrs.define(eq=False)
class RecordingBackend:
    """Keeps every request, and runs the graph as it is."""

    capabilities: Capabilities = attrs.field(factory=lambda: Capabilities(eager_random=True))
    requests: list[CompileRequest] = attrs.field(factory=list)
    name: str = "recording"
    api_version: int = 1
    options: type[Any] = NoOptions

    def fingerprint(self) -> dict[str, str]:
        return {}

    def compile(self, request: CompileRequest) -> GraphRunner:
        self.requests.append(request)
        return GraphRunner(request.graph)


class DecliningBackend(RecordingBackend):
    """Declines every graph."""

    def compile(self, request: CompileRequest) -> GraphRunner:
        self.requests.append(request)
        raise UnsupportedGraph("no kernel for anything")


class CrashingBackend(RecordingBackend):
    """Raises something that is not a refusal."""

    def compile(self, request: CompileRequest) -> GraphRunner:
        self.requests.append(request)
        raise ZeroDivisionError("codegen bug")


@pytest.fixture
def recording() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def writing() -> RecordingBackend:
    """Claims mutation: its graphs end in copies onto the inputs they change."""
    return RecordingBackend(Capabilities(mutation=True, eager_random=True))


@pytest.fixture
def declining() -> DecliningBackend:
    return DecliningBackend()


@pytest.fixture
def crashing() -> CrashingBackend:
    return CrashingBackend()


@pytest.fixture(autouse=True)
def inference():
    """Nearly every test here is about inference; those about gradients enable them."""
    with torch.no_grad():
        yield
