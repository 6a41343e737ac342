"""torch.compile(..., backend="torchbay") reaches our backends by name and by object."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from torch import nn

import torchbay
from torchbay.errors import TorchbayWarning


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dynamo(function, **options):
    return torch.compile(function, backend="torchbay", options=options)


def sine(x):
    return torch.sin(x)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_is_listed_by_torch():
    assert "torchbay" in torch._dynamo.list_backends()


def test_serves_inference_by_a_backend_object(recording):
    module = small().eval()
    compiled = dynamo(module, backend=recording)
    x = torch.randn(3, 4)
    for _ in range(3):
        assert torch.equal(compiled(x), module(x))
    [request] = recording.requests
    assert request.side == "inference"
    assert torch.ops.aten.relu.default in {node.target for node in request.graph.graph.nodes}


def test_serves_inference_by_an_installed_name(shelf):
    source = shelf.source("mygpu")
    shelf.publish("mygpu", source.replace("return self.graph(*inputs)", "raise MemoryError"))
    compiled = dynamo(sine, backend="mygpu")
    x = torch.randn(3)
    with pytest.raises(MemoryError):
        compiled(x)


def test_serves_sizes_that_dynamo_made_symbolic(recording):
    compiled = dynamo(lambda x: (x * x.shape[0]).sum(0), backend=recording)
    for size in (2, 3, 4, 5):
        x = torch.randn(size, 3)
        for _ in range(2):
            assert torch.equal(compiled(x), (x * size).sum(0))
    assert len(recording.requests) >= 2


def test_keeps_the_structure_of_results_and_writes_inputs(recording):
    def step(state, x):
        state["total"].add_(x)
        return {"both": [state["total"] * 2, x], "count": 3}

    compiled = dynamo(step, backend=recording)
    total, expected = torch.zeros(2), torch.zeros(2)
    for _ in range(3):
        x = torch.randn(2)
        result, wanted = compiled({"total": total}, x), step({"total": expected}, x)
        assert torch.equal(total, expected)
        assert torch.equal(result["both"][0], wanted["both"][0])
        assert result["both"][1] is x
        assert result["count"] == 3
    assert recording.requests


def test_chooses_the_default_backend_where_none_is_named(monkeypatch):
    monkeypatch.setenv("TORCHBAY_BACKEND", "nope")
    compiled = torch.compile(sine, backend="torchbay")
    with pytest.raises(Exception, match="no backend is called 'nope'.*TORCHBAY_BACKEND"):
        compiled(torch.ones(2))


@attrs.frozen(kw_only=True)
class Options:
    mode: str = "plain"
    tile: int = 16


def test_passes_the_other_options_on(recording):
    recording.options = Options
    dynamo(sine, backend=recording, tile=32)(torch.ones(2))
    assert recording.requests[0].options == Options(tile=32)


def test_passes_the_mode_on(recording, monkeypatch):
    recording.options = Options
    torchbay.set_default_backend(None)
    monkeypatch.setattr("torchbay._registry._default", lambda: recording)
    torch.compile(sine, backend="torchbay", mode="reduce-overhead")(torch.ones(2))
    assert recording.requests[0].options == Options(mode="reduce-overhead")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"backend": "eagre"}, "no backend is called 'eagre'.*Did you mean 'eager'"),
        ({"backend": "eager", "fusoin": 1}, "backend 'eager' has no option.*'fusoin'"),
    ],
)
def test_refuses_what_torchbay_refuses(options, complaint):
    compiled = dynamo(sine, **options)
    with pytest.raises(Exception, match=complaint):
        compiled(torch.ones(2))


def test_names_a_backend_that_crashes(crashing):
    compiled = dynamo(sine, backend=crashing)
    with pytest.raises(torchbay.errors.BackendFailed, match="codegen bug"):
        compiled(torch.ones(2))


@pytest.mark.filterwarnings("ignore:torch_compile runs eagerly")
def test_trains_as_eager_does(recording):
    module = small()
    reference = copy.deepcopy(module)
    compiled = dynamo(module, backend=recording)
    with torch.enable_grad():
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            compiled(x).square().sum().backward()
            reference(y).square().sum().backward()
            assert torch.equal(x.grad, y.grad)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_says_which_training_is_not_served_from_a_graph(recording):
    compiled = dynamo(small(), backend=recording)
    with torch.enable_grad(), pytest.warns(TorchbayWarning, match="training is not served"):
        compiled(torch.randn(3, 4)).sum().backward()
    assert recording.requests == []
