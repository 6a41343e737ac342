"""A backend that claims training gets a forward and a backward graph; one that does not, neither."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional

import torchbay
from torchbay.errors import BackendFailed, TorchbayError, UnsupportedGraph

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def trained(module, compiled, times=3, x=X):
    """Train a module and a copy of it side by side; assert that they stay equal."""
    twin = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (module, twin)]
    for number in range(times):
        losses = []
        for program, optimizer in zip((compiled, twin), optimizers, strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            losses.append(program(x).square().sum())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def test_gives_a_backend_that_claims_training_both_graphs(any_net, training):
    """https://github.com/pytorch/pytorch/issues/114189"""
    compiled = torchbay.compile(any_net, backend=training, fullgraph=True)
    trained(any_net, compiled)
    assert training.sides == ["forward", "backward"]
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 1}


def test_gives_graphs_that_are_flat_linted_and_know_their_values(any_net, training):
    compiled = torchbay.compile(any_net, backend=training)
    trained(any_net, compiled)
    for request in training.requests:
        request.graph.graph.lint()
        places = request.graph.graph.find_nodes(op="placeholder")
        assert len(places) == len(request.example_inputs)
        computed = [node for node in request.graph.graph.nodes if node.op == "call_function"]
        assert all("val" in node.meta for node in [*places, *computed])
        (results,) = request.graph.graph.output_node().args
        assert isinstance(results, (tuple, list))
        assert request.mutated == frozenset()


def random_operators(request):
    calls = [node for node in request.graph.graph.nodes if node.op == "call_function"]
    tag = torch.Tag.nondeterministic_seeded
    return [node for node in calls if tag in getattr(node.target, "tags", ())]


def test_draws_in_the_forward_graph_only(training):
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    trained(module, torchbay.compile(module, backend=training))
    forward, backward = training.requests
    assert len(random_operators(forward)) == 1
    assert random_operators(backward) == []


def test_hands_over_a_graph_of_its_own_for_inference(net, training):
    compiled = torchbay.compile(net, backend=training, fullgraph=True)
    trained(net, compiled)
    with torch.no_grad():
        results = [compiled(X) for _ in range(3)]
    assert training.sides == ["forward", "backward", "inference"]
    (outputs,) = training.requests[2].graph.graph.output_node().args
    assert len(outputs) == 1
    assert all(torch.equal(result, net(X)) for result in results)
    assert results[-1].grad_fn is None


def test_hands_over_no_backward_graph_where_no_result_needs_one(net, training):
    net.requires_grad_(False)
    compiled = torchbay.compile(net, backend=training, fullgraph=True)
    for _ in range(3):
        assert compiled(X).grad_fn is None
    assert training.sides == ["inference"]


def test_rewrites_both_graphs_as_the_backend_asks(net, training_with):
    aten = torch.ops.aten

    def tanh_backward(grad, result):
        return grad * (1 - result * result)

    backend = training_with(decompositions=lambda: {aten.tanh_backward.default: tanh_backward})
    trained(net, torchbay.compile(net, backend=backend))
    targets = {node.target for request in backend.requests for node in request.graph.graph.nodes}
    assert backend.sides == ["forward", "backward"]
    assert aten.tanh_backward.default not in targets


def test_serves_every_size_from_graphs_of_its_own_for_a_static_backend(net, training):
    compiled = torchbay.compile(net, backend=training)
    for rows in (2, 3, 4):
        trained(net, compiled, x=torch.randn(rows, 3))
    assert training.sides == ["forward", "backward"] * 3


def test_serves_every_size_from_few_graphs_for_a_symbolic_backend(net, training_with):
    backend = training_with(dynamic_shapes=True)
    compiled = torchbay.compile(net, backend=backend)
    for rows in (2, 3, 4, 5, 6):
        trained(net, compiled, x=torch.randn(rows, 3))
    assert len(torchbay.explain(compiled).specializations) <= 2
    assert backend.sides == ["forward", "backward"] * 2


def test_gives_a_plain_function_both_graphs(net):
    graphs = []

    def plain(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torchbay.compile(net, backend=plain, fullgraph=True)
    trained(net, compiled)
    assert len(graphs) == 2


# Backends that claim no training


def test_refuses_an_inference_only_backend_and_names_one_that_trains(net, inferring):
    compiled = torchbay.compile(net, backend=inferring, fullgraph=True)
    with pytest.raises(TorchbayError, match="'inferring'.*train") as caught:
        compiled(X)
    assert "eager" in str(caught.value)
    assert "inductor_triton" in str(caught.value)
    assert inferring.requests == []


def test_warns_once_where_an_inference_only_backend_may_run_eagerly(net, inferring):
    compiled = torchbay.compile(net, backend=inferring)
    with pytest.warns(torchbay.errors.TorchbayWarning, match="'inferring'.*train.*eager"):
        trained(net, compiled)
    assert inferring.requests == []
    assert torchbay.explain(compiled).calls["eager"] == 3


def test_trains_with_the_fallback_of_an_inference_only_backend(net, inferring, training):
    compiled = torchbay.compile(net, backend=inferring, fallback=training, fullgraph=True)
    trained(net, compiled)
    assert inferring.requests == []
    assert training.sides == ["forward", "backward"]


def test_infers_with_an_inference_only_backend_while_its_fallback_trains(net, inferring, training):
    compiled = torchbay.compile(net, backend=inferring, fallback=training, fullgraph=True)
    trained(net, compiled)
    with torch.no_grad():
        assert torch.equal([compiled(X) for _ in range(2)][1], net(X))
    assert inferring.sides == ["inference"]
    assert training.sides == ["forward", "backward"]


def test_serves_inference_of_a_model_with_parameters_by_an_inference_only_backend(net, inferring):
    compiled = torchbay.compile(net, backend=inferring, fullgraph=True)
    with torch.no_grad():
        assert torch.equal([compiled(X) for _ in range(2)][1], net(X))
    assert inferring.sides == ["inference"]


def test_refuses_a_step_for_an_inference_only_backend(net, inferring):
    def step(x):
        loss = net(x).sum()
        loss.backward()
        return loss.detach()

    compiled = torchbay.compile(step, backend=inferring, fullgraph=True)
    with pytest.raises(TorchbayError, match="'inferring'.*train"):
        compiled(X)
    assert inferring.requests == []


# Backends that decline, or fail


@attrs.define(eq=False)
class Selective:
    """Another backend, for one side only; it does something else for the other."""

    inner: object
    refused: str
    error: Exception
    name: str = "selective"
    api_version: int = 1

    @property
    def capabilities(self):
        return self.inner.capabilities

    @property
    def options(self):
        return self.inner.options

    def fingerprint(self):
        return {}

    def compile(self, request):
        if request.side == self.refused:
            raise self.error
        return self.inner.compile(request)


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_falls_back_where_a_backend_declines_one_half(side, net, training):
    backend = Selective(training, side, UnsupportedGraph("no kernel"))
    compiled = torchbay.compile(net, backend=backend, fallback="eager", fullgraph=True)
    trained(net, compiled)
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 1}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_runs_eagerly_where_a_backend_declines_one_half(side, net, training):
    backend = Selective(training, side, UnsupportedGraph("no kernel"))
    compiled = torchbay.compile(net, backend=backend)
    trained(net, compiled)
    (report,) = torchbay.explain(compiled).eager
    assert "no kernel" in report.reason


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_never_hides_that_a_backend_failed_on_one_half(side, net, training):
    backend = Selective(training, side, ZeroDivisionError("codegen bug"))
    compiled = torchbay.compile(net, backend=backend, fallback="eager")
    with pytest.raises(BackendFailed, match="codegen bug"):
        compiled(X)


# What the installed ones claim


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor_triton", marks=pytest.mark.slow)]
)
def test_trains_a_small_network_and_a_step(backend):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(module)
    compiled = torchbay.compile(module, backend=backend, fullgraph=True)
    for _ in range(3):
        for program in (compiled, twin):
            functional.mse_loss(program(X), X[:, :2]).backward()
    found, expected = ([p.grad for p in one.parameters()] for one in (module, twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torchbay.explain(compiled).calls["graph"] == 2


def test_says_how_much_memory_a_training_step_saves(net, training, served):
    compiled = served(net, X, backend=training)
    hidden = 4 * 8 * 4
    assert f"keeps {hidden} bytes for its backward" in str(torchbay.explain(compiled))
