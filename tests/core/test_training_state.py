"""State that training keeps in PyTorch's own objects: optimizers, schedules, hooks, gradients."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import torchbay
from torchbay import TorchbayWarning
from torchbay.plugin import Capabilities

pytestmark = pytest.mark.filterwarnings("ignore::torchbay.TorchbayWarning")

X = torch.linspace(-1, 1, 12).reshape(4, 3)
T = torch.linspace(1, -1, 8).reshape(4, 2)


@pytest.fixture(autouse=True)
def recording_gradients(inference):
    with torch.enable_grad():
        yield


@pytest.fixture
def backend(recording):
    recording.capabilities = Capabilities(training=True, eager_random=True, dynamic_shapes=True)
    return recording


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Loop:
    """A model, its optimizer, and a step that trains the one with the other."""

    def __init__(self, make, wrap=lambda step: step):
        self.net = net()
        self.optimizer = make(self.net.parameters())
        self.step = wrap(self._step)

    def _step(self, x, t):
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.net(x), t)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def held(self):
        """Everything that training moves."""
        parameters = list(self.net.parameters())
        states = [self.optimizer.state.get(p, {}) for p in parameters]
        state = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        return [*parameters, *(p.grad for p in parameters), *state]


def assert_alike(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def run_beside(make, backend, change=lambda loop: None, calls=4, **loop):
    """Train two models alike, one in a compiled step; return the compiled step."""
    plain = Loop(make, **loop)
    compiled = Loop(make, wrap=lambda step: torchbay.compile(step, backend=backend), **loop)
    for part in range(2):
        for _ in range(calls):
            assert_alike([plain.step(X, T)], [compiled.step(X, T)])
            assert_alike(plain.held(), compiled.held())
        if part == 0:
            change(plain)
            change(compiled)
    return compiled.step


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


# Settings of an optimizer


def _loaded(loop, **settings):
    state = copy.deepcopy(loop.optimizer.state_dict())
    state["param_groups"][0].update(settings)
    loop.optimizer.load_state_dict(state)


def _zeroing(loop):
    def zero(optimizer, args, kwargs):
        del args, kwargs
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.zero_()

    return zero


CHANGES = {
    "learning rate": lambda loop: loop.optimizer.param_groups[0].update(lr=1.0),
    "weight decay": lambda loop: loop.optimizer.param_groups[0].update(weight_decay=0.5),
    "maximize": lambda loop: loop.optimizer.param_groups[0].update(maximize=True),
    "momentum": lambda loop: loop.optimizer.param_groups[0].update(momentum=0.9),
    "load_state_dict": lambda loop: _loaded(loop, lr=1.0),
    "parameter taken out": lambda loop: loop.optimizer.param_groups[0]["params"].pop(),
    "group taken out": lambda loop: loop.optimizer.param_groups.pop(),
    "another group": lambda loop: loop.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "parameters turned round": lambda loop: loop.optimizer.param_groups[0]["params"].reverse(),
    "hook before a step": lambda loop: loop.optimizer.register_step_pre_hook(_zeroing(loop)),
    "hook after a step": lambda loop: loop.optimizer.register_step_post_hook(_zeroing(loop)),
    "step": lambda loop: setattr(loop.optimizer, "step", lambda: None),
    "zero_grad": lambda loop: setattr(loop.optimizer, "zero_grad", lambda: None),
    "frozen parameter": lambda loop: loop.net[0].weight.requires_grad_(requires_grad=False),
    "state cleared": lambda loop: loop.optimizer.state.clear(),
    "state of one parameter": lambda loop: loop.optimizer.state.pop(loop.net[0].bias, None),
}


@pytest.mark.parametrize("make", [sgd, momentum])
@pytest.mark.parametrize("name", CHANGES)
def test_follows_a_changed_optimizer(name, make, backend):
    compiled = run_beside(make, backend, CHANGES[name])
    assert torchbay.explain(compiled).calls["graph"] >= 2
