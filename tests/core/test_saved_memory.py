"""What a call saves for its backward is let go as the backward uses it up."""

from __future__ import annotations

import gc
import weakref

import attrs
import pytest
import torch

import torchbay
from torchbay.plugin import Capabilities, CompileRequest, NoOptions


@attrs.define(eq=False)
class Executable:
    """Runs a graph; of a backward's tensors it reports those alive once it let go of them."""

    graph: torch.fx.GraphModule
    backward_count: list[int] | None

    def run(self, inputs):
        values = list(inputs)
        inputs.clear()
        results = self.graph(*values)
        if self.backward_count is not None:
            held = [weakref.ref(value) for value in values]
            del values
            gc.collect()
            self.backward_count.append(sum(reference() is not None for reference in held))
        return results


@attrs.define(eq=False)
class Backend:
    """Counts what is alive in each backward."""

    alive: list[int] = attrs.field(factory=list)
    requests: dict[str, CompileRequest] = attrs.field(factory=dict)
    name: str = "counting"
    api_version: int = 1
    options: type = NoOptions
    capabilities: Capabilities = attrs.field(factory=lambda: Capabilities(training=True))

    def fingerprint(self):
        return {}

    def compile(self, request):
        self.requests[request.side] = request
        is_backward = request.side == "backward"
        return Executable(request.graph, self.alive if is_backward else None)


def scores(x, weight):
    return (x @ weight).sin().exp().tanh().sum()


@pytest.fixture(autouse=True)
def recording_gradients():
    with torch.enable_grad():
        yield


def test_lets_go_of_everything_saved():
    backend = Backend()
    compiled = torchbay.compile(scores, backend=backend, fullgraph=True)
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        compiled(x, weight).backward()
    # Autograd itself holds the gradient of the loss.
    assert set(backend.alive) == {1}


def test_keeps_what_a_second_backward_needs():
    compiled = torchbay.compile(scores, backend=Backend(), fullgraph=True)
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    compiled(x, weight)
    loss = compiled(x, weight)
    [first] = torch.autograd.grad(loss, weight, retain_graph=True)
    [second] = torch.autograd.grad(loss, weight)
    [expected] = torch.autograd.grad(scores(x, weight), weight)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_makes_views_of_parameters_again_instead_of_keeping_them():
    backend = Backend()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    compiled = torchbay.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(torch.randn(3, 4)).sum().backward()
    # A transposed weight would be memory to free, as far as a backend can tell.
    assert backend.requests["backward"].state_count == 1
