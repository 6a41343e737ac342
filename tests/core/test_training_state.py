"""State that training keeps in PyTorch's own objects: optimizers, schedules, hooks, gradients."""

from __future__ import annotations

import collections
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers

import torchbay
from torchbay.errors import TorchbayWarning
from torchbay.plugin import Capabilities

pytestmark = pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")

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
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


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


OPTIMIZERS = {
    "descent": sgd,
    "momentum": momentum,
    "momentum, all at once": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, weight_decay=0.1),
    "AdamW, all at once": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "Adam with a tensor as rate": lambda p: torch.optim.Adam(p, torch.tensor(0.1)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax, all at once": lambda p: torch.optim.Adamax(p, foreach=True),
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
    "averaged descent": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_serves_steps_of_an_optimizer(name, backend):
    compiled = run_beside(OPTIMIZERS[name], backend)
    assert torchbay.explain(compiled).calls == {"graph": 6, "eager": 2}


def test_computes_corrections_as_eager_does(backend):
    """RAdam takes another way from its fifth step on, told from numbers near a bound."""
    compiled = run_beside(torch.optim.RAdam, backend, calls=5)
    assert torchbay.explain(compiled).calls == {"graph": 7, "eager": 3}


def test_names_an_operator_that_is_a_whole_step(backend):
    loop = Loop(lambda p: torch.optim.AdamW(p, 0.1, fused=True))
    compiled = torchbay.compile(loop.step, backend=backend)
    with pytest.warns(TorchbayWarning, match=r"_fused_adamw_.*fused=False"):
        compiled(X, T)


@pytest.mark.parametrize("side", ["pre", "post"])
def test_follows_hooks_of_every_optimizer(side, backend):
    loop = Loop(sgd)
    compiled = torchbay.compile(loop.step, backend=backend)
    for _ in range(3):
        compiled(X, T)
    register = getattr(optimizers, f"register_optimizer_step_{side}_hook")
    seen = []
    handle = register(lambda *_: seen.append(loop))
    try:
        compiled(X, T)
    finally:
        handle.remove()
    compiled(X, T)
    assert seen == [loop]


def test_follows_a_learning_rate_that_is_written_in_place(backend):
    compiled = run_beside(
        lambda p: torch.optim.SGD(p, torch.tensor(0.1)),
        backend,
        lambda loop: loop.optimizer.param_groups[0]["lr"].mul_(0.5),
    )
    assert torchbay.explain(compiled).calls == {"graph": 6, "eager": 2}


def _trained_by_argument(loop, optimizer, x, t):
    optimizer.zero_grad()
    functional.mse_loss(loop.net(x), t).backward()
    optimizer.step()


def test_follows_an_optimizer_that_is_an_argument(backend):
    plain, loop = Loop(momentum), Loop(momentum)
    compiled = torchbay.compile(_trained_by_argument, backend=backend)
    for rate in (0.1, 0.1, 0.1, 1.0, 1.0):
        for one, train in ((plain, _trained_by_argument), (loop, compiled)):
            one.optimizer.param_groups[0]["lr"] = rate
            train(one, one.optimizer, X, T)
        assert_alike(plain.held(), loop.held())
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 3}


def test_keeps_no_optimizer_alive_that_is_an_argument(backend):
    compiled = torchbay.compile(_trained_by_argument, backend=backend)
    loop = Loop(momentum)
    for _ in range(4):
        compiled(loop, loop.optimizer, X, T)
    assert torchbay.explain(compiled).calls["graph"] == 2
    gone = [weakref.ref(loop.optimizer), weakref.ref(loop.net[0].weight)]
    del loop
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


# Schedules and scalers


SCHEDULES = {
    "steps": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


def _scheduled(make, wrap=lambda step: step):
    loop = Loop(sgd)
    schedule = make(loop.optimizer)

    def step(x, t):
        loop.step(x, t)
        schedule.step()
        return loop.optimizer.param_groups[0]["lr"]

    return loop, schedule, wrap(step)


@pytest.mark.parametrize("name", SCHEDULES)
def test_keeps_to_a_schedule(name, backend):
    plain, expected, step = _scheduled(SCHEDULES[name])
    loop, schedule, compiled = _scheduled(
        SCHEDULES[name], lambda step: torchbay.compile(step, backend=backend)
    )
    for _ in range(6):
        assert compiled(X, T) == step(X, T)
        assert schedule.get_last_lr() == expected.get_last_lr()
        assert_alike(plain.held(), loop.held())


def test_follows_a_schedule_outside(backend):
    loop, plain = Loop(sgd), Loop(sgd)
    schedules = [lr_scheduler.StepLR(each.optimizer, 3, 0.1) for each in (loop, plain)]
    compiled = torchbay.compile(loop.step, backend=backend)
    for _ in range(9):
        assert_alike([compiled(X, T)], [plain.step(X, T)])
        for schedule in schedules:
            schedule.step()
    assert torchbay.explain(compiled).calls == {"graph": 6, "eager": 3}
    assert len(torchbay.explain(compiled).recompiles) == 1


def _scaled(wrap=lambda step: step):
    loop = Loop(sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def step(x, t):
        loop.optimizer.zero_grad()
        loss = functional.mse_loss(loop.net(x), t)
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        return scaler.get_scale()

    return loop, scaler, wrap(step)


def test_scales_gradients_as_eager_does(backend):
    plain, expected, step = _scaled()
    loop, scaler, compiled = _scaled(lambda step: torchbay.compile(step, backend=backend))
    for number in range(9):
        x = X / 0 if number == 4 else X
        assert compiled(x, T) == step(x, T)
        assert scaler.state_dict() == expected.state_dict()
        assert_alike(plain.held(), loop.held())
        if number == 6:
            scaler.set_growth_factor(4.0)
            expected.set_growth_factor(4.0)


# Dicts that have tensors for keys


class Averaged(nn.Module):
    """Adds what it keeps for its weight."""

    def __init__(self, kept):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.kept = kept
        self.kept[self.weight] = torch.ones(3)

    def forward(self, x):
        return x * self.weight + self.kept[self.weight]


def test_finds_what_is_kept_for_another_weight(backend):
    module = Averaged({})
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(3):
        compiled(X)
    weight, module.weight = module.weight, nn.Parameter(torch.ones(3))
    with pytest.raises(KeyError):
        compiled(X)
    module.kept[module.weight] = torch.full((3,), 5.0)
    assert torch.equal(compiled(X), module(X))
    module.weight = weight
    assert torch.equal(compiled(X), module(X))


def test_puts_nothing_into_a_dict_that_makes_what_is_missing(backend):
    module = Averaged(collections.defaultdict(dict))
    compiled = torchbay.compile(lambda x, is_kept: module(x) if is_kept else x, backend=backend)
    for _ in range(3):
        compiled(X, is_kept=True)
    module.kept.clear()
    compiled(X, is_kept=False)
    assert not module.kept


def test_follows_the_order_of_keys(backend):
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    kept = {first: 1.0, second: 2.0}

    def weighted(x):
        for number, (weight, factor) in enumerate(kept.items()):
            x = x * weight * factor + number
        return x

    held = [first, second]
    compiled = torchbay.compile(lambda x: weighted(x) + 0 * held[0] + 0 * held[1], backend=backend)
    for _ in range(3):
        compiled(X)
    kept[first] = kept.pop(first)
    assert torch.equal(compiled(X), weighted(X))
    assert torch.equal(compiled(X), weighted(X))


def test_writes_what_is_kept_for_a_weight(backend):
    weight, kept = nn.Parameter(torch.ones(3)), {}

    def remember(x):
        kept[weight] = (x * weight).detach()
        return kept[weight].sum()

    compiled = torchbay.compile(remember, backend=backend)
    for number in range(5):
        compiled(X + number)
        assert torch.equal(kept[weight], X + number)
    assert [*kept] == [weight]
    assert torchbay.explain(compiled).calls["graph"] >= 2


# Hooks of modules on gradients


def tripled(module, *gradients):
    del module
    return tuple(None if g is None else g * 3 for g in gradients[0])


REGISTER = {
    "full": lambda m: m.register_full_backward_hook(tripled),
    "before": lambda m: m.register_full_backward_pre_hook(tripled),
    "full, of every module": lambda _: modules.register_module_full_backward_hook(tripled),
    "before, of every module": lambda _: modules.register_module_full_backward_pre_hook(tripled),
}


def _gradient(program):
    x = X.clone().requires_grad_()
    program(x).sin().sum().backward()
    return x.grad


@pytest.mark.parametrize("name", REGISTER)
def test_follows_hooks_on_gradients(name, backend):
    module = net()
    compiled = torchbay.compile(module, backend=backend)
    plain = _gradient(module)
    for _ in range(3):
        assert_alike([plain], [_gradient(compiled)])
    handle = REGISTER[name](module[2])
    try:
        hooked = _gradient(module)
        assert not torch.equal(hooked, plain)
        for _ in range(3):
            assert_alike([hooked], [_gradient(compiled)])
    finally:
        handle.remove()
    for _ in range(3):
        assert_alike([plain], [_gradient(compiled)])


factor = 2.0


def test_follows_what_a_hook_on_gradients_reads(backend, monkeypatch):
    module, own = net(), {"factor": 3.0}
    module[2].register_full_backward_hook(
        lambda _module, given, _: (given[0] * factor * own["factor"],)
    )
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(3):
        assert_alike([_gradient(module)], [_gradient(compiled)])
    own["factor"] = 5.0
    for _ in range(3):
        assert_alike([_gradient(module)], [_gradient(compiled)])
    monkeypatch.setitem(globals(), "factor", 7.0)
    for _ in range(3):
        assert_alike([_gradient(module)], [_gradient(compiled)])


def test_leaves_no_fake_tensor_where_a_hook_on_gradients_keeps_them(backend):
    module, seen = net(), []
    module[0].register_full_backward_hook(lambda _module, _, grads: seen.append(grads[0]))
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(3):
        _gradient(compiled)
    assert [type(gradient) for gradient in seen] == [torch.Tensor] * 3


# Gradients that are asked for


CLEARED = {
    "zero_grad of a module": lambda m, _: m.zero_grad(),
    "zero_grad of an optimizer": lambda _, o: o.zero_grad(),
    "zeroing": lambda m, _: m.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("name", CLEARED)
def test_clears_gradients_before_a_backward_outside(name, backend):
    def trained(compile_):
        module = net()
        optimizer = sgd(module.parameters())

        def forward(x):
            CLEARED[name](module, optimizer)
            return module(x)

        program, found = compile_(forward), []
        for number in range(6):
            program(X * number).square().sum().backward()
            found += [p.grad.clone() for p in module.parameters()]
        return program, found

    compiled, found = trained(lambda forward: torchbay.compile(forward, backend=backend))
    assert_alike(found, trained(lambda forward: forward)[1])
    assert torchbay.explain(compiled).calls["graph"] >= 3


def test_clips_only_gradients_that_are_there(backend):
    module = net()

    def clip(scale):
        return nn.utils.clip_grad_norm_(module.parameters(), 0.1) * scale

    compiled = torchbay.compile(clip, backend=backend)
    for _ in range(3):
        assert compiled(torch.ones(())) == 0
    module(X).sum().backward()
    module[0].weight.grad = None
    twin = copy.deepcopy(module)
    for given, own in zip(twin.parameters(), module.parameters(), strict=True):
        given.grad = None if own.grad is None else own.grad.clone()
    assert_alike([compiled(torch.ones(()))], [nn.utils.clip_grad_norm_(twin.parameters(), 0.1)])
    assert_alike([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])


def test_runs_a_backward_eagerly_that_asks_for_gradients(backend):
    module = net()
    weight = module[0].weight

    def scaled(_module, given, _):
        return (given[0] if weight.grad is None else given[0] * 10,)

    module[2].register_full_backward_hook(scaled)
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(3):
        expected, module[0].weight.grad = _gradient(module), None
        assert_alike([expected], [_gradient(compiled)])
        again = _gradient(compiled)
        module.zero_grad()
        _gradient(module)
        assert_alike([again], [_gradient(module)])
        module.zero_grad()
    assert torchbay.explain(compiled).calls["graph"] == 0
