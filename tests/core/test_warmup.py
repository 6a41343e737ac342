"""`warmup` compiles for a call without the call's effects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors


def test_makes_the_next_call_a_hit(recording):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    compiled = torchbay.compile(module, backend=recording)
    state = torch.get_rng_state()
    x = torch.ones(3, 2)
    assert compiled.warmup(x) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, torch.ones(3, 2))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert len(recording.requests) == 1
    compiled(x)
    assert torchbay.explain(compiled).calls == {"graph": 1, "eager": 0}


def test_undoes_what_the_call_writes(recording):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0
            self.memo = {}
            self.log = []
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.n += 1
            self.memo[self.n] = x
            self.log.append(x)
            self.count += 1
            self.late = 1
            return x.add_(1)

    module, x = Counter(), torch.zeros(2)
    compiled = torchbay.compile(module, backend=recording)
    compiled.warmup(x)
    assert (module.n, module.memo, module.log, module.count.item()) == (0, {}, [], 0)
    assert not hasattr(module, "late")
    assert torch.equal(x, torch.zeros(2))


def test_undoes_writes_through_views(recording):
    base = torch.arange(6.0)

    def call(x):
        x[1:].mul_(5)
        x.t_() if x.dim() == 2 else None
        return x

    compiled = torchbay.compile(call, backend=recording)
    compiled.warmup(base[::2])
    assert torch.equal(base, torch.arange(6.0))


def test_draws_no_random_number(recording):
    compiled = torchbay.compile(lambda x: x + torch.rand(2), backend=recording)
    torch.manual_seed(0)
    compiled.warmup(torch.ones(2))
    found = compiled(torch.ones(2))
    torch.manual_seed(0)
    assert torch.equal(found, 1 + torch.rand(2))


def test_does_nothing_for_a_call_that_is_covered(recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    compiled.warmup(torch.ones(2))
    compiled.warmup(torch.ones(2))
    compiled.warmup(torch.ones(3))
    assert len(recording.requests) == 2


def test_compiles_the_other_branch(recording):
    compiled = torchbay.compile(lambda x: x * 2 if x.sum() > 0 else x * 3, backend=recording)
    compiled.warmup(torch.ones(2))
    compiled.warmup(-torch.ones(2))
    compiled(-torch.ones(2))
    compiled(torch.ones(2))
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 0}


def test_has_no_effect_past_the_limit(recording):
    compiled = torchbay.compile(lambda x, k: x.add_(k), backend=recording, recompile_limit=1)
    compiled.warmup(torch.zeros(1), 1)
    x = torch.zeros(1)
    with pytest.warns(errors.TorchbayWarning, match="recompile_limit"):
        compiled.warmup(x, 2)
    assert x.item() == 0
    assert torchbay.explain(compiled).calls == {"graph": 0, "eager": 0}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_has_no_effect_for_a_call_that_runs_eagerly(recording):
    def call(x):
        x.add_(1)
        return torch.from_numpy(x.numpy())

    compiled, x = torchbay.compile(call, backend=recording), torch.zeros(1)
    compiled.warmup(x)
    compiled.warmup(x)
    assert x.item() == 0
    assert torchbay.explain(compiled).calls == {"graph": 0, "eager": 0}


def test_undoes_a_call_that_raises(recording):
    def call(x):
        x.add_(1)
        raise KeyError("late")

    compiled, x = torchbay.compile(call, backend=recording), torch.zeros(1)
    with pytest.raises(KeyError):
        compiled.warmup(x)
    assert x.item() == 0


def test_works_on_methods(recording):
    class Layer:
        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x + 1

    layer = Layer()
    layer.apply.warmup(torch.ones(1))
    layer.apply(torch.ones(1))
    assert torchbay.explain(layer.apply).calls == {"graph": 1, "eager": 0}


def test_leaves_gradients_alone(recording):
    module = nn.Linear(2, 2)
    compiled = torchbay.compile(module, backend=recording)
    with torch.enable_grad(), pytest.warns(errors.TorchbayWarning, match="gradients"):
        compiled.warmup(torch.ones(2))
    assert module.weight.grad is None
    assert module.weight.requires_grad
