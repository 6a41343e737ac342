"""Parameters, buffers and free tensors are read live on every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchbay


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x):
        return self.linear(x) + self.offset


def step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with torch.enable_grad():
        module(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = {
    "optimizer step": step,
    "load_state_dict": lambda m: m.load_state_dict(Net().state_dict()),
    "load_state_dict with assign": lambda m: m.load_state_dict(Net().state_dict(), assign=True),
    "in-place edit of a parameter": lambda m: m.linear.weight.mul_(3),
    "in-place edit of a buffer": lambda m: m.offset.add_(1),
    "edit through data": lambda m: m.linear.bias.data.fill_(7),
    "data": lambda m: setattr(m.linear.weight, "data", torch.ones(3, 3)),
    "replaced parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(3, 3))),
    "replaced buffer": lambda m: setattr(m, "offset", torch.ones(3)),
    "re-initialization": lambda m: nn.init.ones_(m.linear.weight),
    "vector to parameters": lambda m: nn.utils.vector_to_parameters(torch.ones(12), m.parameters()),
    "apply": lambda m: m.apply(lambda part: [p.fill_(2) for p in part.parameters()] and None),
    "there and back": lambda m: m.double().float(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_reaches_the_next_call(name, recording):
    torch.manual_seed(0)
    module = Net()
    compiled = torchbay.compile(module, backend=recording)
    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(compiled(x), module(x))
    CHANGES[name](module)
    for _ in range(2):
        assert torch.equal(compiled(x), module(x))
    assert torchbay.explain(compiled).calls == {"graph": 3, "eager": 1}


def test_reaches_the_next_call_through_the_compiled_module(recording):
    module = Net()
    compiled = torchbay.compile(module, backend=recording)
    compiled(torch.ones(3))
    compiled.load_state_dict(Net().state_dict())
    compiled.linear.weight = nn.Parameter(torch.ones(3, 3))
    compiled.offset = torch.full((3,), 2.0)
    assert torch.equal(compiled(torch.ones(3)), module(torch.ones(3)))
    assert (module.linear.weight == 1).all()


@pytest.mark.parametrize("holder", ["closure", "global", "list", "dict", "object", "default"])
def test_reads_free_tensors_live(holder, recording, monkeypatch):
    weight = torch.ones(3)
    places = {"list": [weight], "dict": {"w": weight}}
    thing = type("Thing", (), {})()
    thing.weight = weight
    monkeypatch.setitem(globals(), "free", weight)
    functions = {
        "closure": lambda x: x * weight,
        "global": lambda x: x * free,  # noqa: F821 - set above
        "list": lambda x: x * places["list"][0],
        "dict": lambda x: x * places["dict"]["w"],
        "object": lambda x: x * thing.weight,
        "default": lambda x, w=weight: x * w,
    }
    compiled = torchbay.compile(functions[holder], backend=recording)
    for value in range(4):
        weight.fill_(value)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), float(value)))
    assert torchbay.explain(compiled).calls == {"graph": 3, "eager": 1}


def test_serves_between_optimizer_steps_with_gradients_set(recording):
    module = Net()
    compiled = torchbay.compile(module, backend=recording)
    x = torch.ones(3)
    for _ in range(4):
        assert torch.equal(compiled(x), module(x))
        with torch.enable_grad():
            module(x).sum().backward()
    assert torchbay.explain(compiled).calls == {"graph": 3, "eager": 1}


def test_serves_tied_weights(recording):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    compiled = torchbay.compile(module, backend=recording)
    x = torch.ones(3)
    compiled(x)
    first.weight.fill_(0.5)
    assert torch.equal(compiled(x), module(x))
    assert recording.requests[0].state_count == 3


def test_serves_weights_that_share_memory(recording):
    whole = torch.arange(6.0)
    left, right = whole[:4], whole[2:]
    compiled = torchbay.compile(lambda x: x * left + right, backend=recording)
    for _ in range(3):
        whole.add_(1)
        assert torch.equal(compiled(torch.ones(4)), left + right)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_reads_gradients_live(recording):
    weight = nn.Parameter(torch.ones(3))
    compiled = torchbay.compile(lambda x: x + weight.grad, backend=recording)
    for value in (1.0, 2.0, 3.0, 4.0):
        weight.grad = torch.full((3,), value)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 1 + value))
    weight.grad.fill_(9)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 10.0))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_steps_an_optimizer_as_eager_does(kind, recording):
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [kind([weight], lr=0.1) for weight in weights]
    compiled = torchbay.compile(optimizers[0].step, backend=recording)
    for count in range(6):
        for weight in weights:
            weight.grad = torch.full((3,), float(count + 1))
        optimizers[0].param_groups[0]["lr"] = optimizers[1].param_groups[0]["lr"] = 0.1 / (
            count + 1
        )
        compiled()
        optimizers[1].step()
        torch.testing.assert_close(*weights)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_clears_gradients_as_eager_does(recording):
    module = nn.Linear(3, 3)

    def call(x, to_none):
        module.zero_grad(set_to_none=to_none)
        return module(x)

    compiled = torchbay.compile(call, backend=recording)
    for to_none in (False, False, False, True, True, True):
        module.weight.grad = torch.ones(3, 3)
        compiled(torch.ones(3), to_none)
        assert module.weight.grad is None if to_none else not module.weight.grad.any()


def test_moves_an_average_of_weights_once_per_call(recording):
    weight, average = nn.Parameter(torch.full((3,), 8.0)), torch.zeros(3)

    def call(x):
        average.lerp_(weight, 0.5)
        return x + average

    compiled = torchbay.compile(call, backend=recording)
    assert [compiled(torch.zeros(3))[0].item() for _ in range(4)] == [4.0, 6.0, 7.0, 7.5]
    assert torchbay.explain(compiled).calls == {"graph": 3, "eager": 1}
