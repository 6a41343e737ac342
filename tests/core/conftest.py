"""Backends that only record, decline or crash, so that these tests are about the core alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from textwrap import dedent
from typing import Any

import attrs
import pytest
import torch

from torchbay import _registry
from torchbay.plugin import (
    Capabilities,
    CompileRequest,
    Decompositions,
    NoOptions,
    UnsupportedGraph,
)


@attrs.frozen(eq=False)
class GraphRunner:
    """Runs a graph with plain PyTorch."""

    graph: torch.fx.GraphModule

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        return self.graph(*values)


class GuardedRunner(GraphRunner):
    """Runs a graph for inputs that are all positive."""

    def refuses(self, inputs: Sequence[Any]) -> str | None:
        return None if (inputs[0] > 0).all() else "an input is not positive"


@attrs.define(eq=False)
class RecordingBackend:
    """Keeps every request, and runs the graph as it is."""

    capabilities: Capabilities = attrs.field(
        factory=lambda: Capabilities(eager_random=True, dynamic_shapes=True)
    )
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
def guarded() -> type[GuardedRunner]:
    return GuardedRunner


@pytest.fixture
def writing() -> RecordingBackend:
    """Claims mutation: its graphs end in copies onto the inputs they change."""
    return RecordingBackend(Capabilities(mutation=True, eager_random=True, dynamic_shapes=True))


@pytest.fixture
def claiming() -> RecordingBackend:
    """Claims control flow: its graphs may hold ``torch.cond`` and its like."""
    return RecordingBackend(Capabilities(control_flow=True, eager_random=True, dynamic_shapes=True))


@pytest.fixture
def decomposing() -> RecordingBackend:
    """Claims control flow, in the operators that Inductor asks for."""
    return RecordingBackend(
        Capabilities(
            control_flow=True,
            eager_random=True,
            dynamic_shapes=True,
            decompositions=inductor_table,
        )
    )


def inductor_table() -> Decompositions:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


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


PLUGIN = """
    from torchbay.plugin import Capabilities, NoOptions, hookimpl

    class Executable:
        def __init__(self, graph):
            self.graph = graph

        def run(self, inputs):
            return self.graph(*inputs)

    class Backend:
        name = {name!r}
        api_version = {version!r}
        capabilities = Capabilities()
        options = NoOptions

        def fingerprint(self):
            return {{}}

        def compile(self, request):
            {body}

    @hookimpl
    def torchbay_make_backend():
        return Backend()
"""


class Shelf:
    """Distributions in a folder of their own, as an installer would leave them there."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def publish(
        self,
        name,
        source=None,
        *,
        module=None,
        distribution=None,
        version="1.0",
        group="torchbay.backends",
    ):
        """Install a plugin; without a source it is one whose backend runs graphs as they are."""
        module = module or f"plugin_{name}"
        distribution = distribution or f"torchbay-{name}"
        (self.folder / f"{module}.py").write_text(dedent(source or self.source(name)))
        metadata = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
        return module

    def source(self, name, *, version=1, body="return Executable(request.graph)"):
        """Return the source of a sound plugin; ``body`` is that of its backend's ``compile``."""
        return dedent(PLUGIN).format(name=name, version=version, body=body)

    def entry_points(self, group):
        """Return what is on this shelf alone."""
        found = distributions(path=[str(self.folder)])
        return [entry for one in found for entry in one.entry_points.select(group=group)]


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Install distributions beside those that are installed, for one test."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    _registry.forget()
    yield Shelf(tmp_path)
    _registry.forget()
    for module in set(sys.modules) - modules:
        if module.startswith("plugin_"):
            del sys.modules[module]
