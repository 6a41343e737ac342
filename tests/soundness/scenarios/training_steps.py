"""Steps of a training: the program itself goes backward, and gradients land where eager puts them."""

from __future__ import annotations

import types
import warnings

import torch
from torch import nn
from torch.nn import functional

from scenarios._scenario import Program, calls, change, each, given, growing, normal, scenario
from scenarios._training import StateOf, loss_of

X = normal(4, 3)
T = normal(4, 2)
LEAF = normal(4, 3, requires_grad=True)


def steps(*parts, **options):
    return calls(*parts, under=torch.enable_grad, **options)


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def weight(*shape):
    return torch.randn(*shape).requires_grad_()


def stepping(made=None, **keywords):
    """Return a step that only adds gradients up."""
    made = made or net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward(**keywords)
        return loss

    return Program(step, made)


def optimizing(make, *, made=None, before=None):
    """Return a step that ends with one of an optimizer."""
    made = made or net()
    optimizer = make(made.parameters())

    def step(x, t):
        optimizer.zero_grad()
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        found = before(made) if before is not None else None
        optimizer.step()
        return loss, found

    return Program(step, types.SimpleNamespace(made=made, state=StateOf(optimizer)))


def descending():
    """Return a step, and in its world the optimizer itself."""
    made = net()
    world = types.SimpleNamespace(made=made, optimizer=torch.optim.SGD(made.parameters(), 0.1))

    def step(x, t):
        world.optimizer.zero_grad()
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        world.optimizer.step()
        return loss

    return Program(step, world)


# Where gradients land


@scenario(steps(X, T), at_most=2)
def accumulates_into_the_gradients_that_are_there():
    return stepping()


def _clear(made):
    made.zero_grad(set_to_none=True)


def _zero(made):
    made.zero_grad(set_to_none=False)


CLEARED = [part for _ in range(4) for part in (*steps(X, T, times=1), change(_clear))]
ZEROED = [part for _ in range(4) for part in (*steps(X, T, times=1), change(_zero))]


@scenario(CLEARED, at_most=1)
def sets_gradients_that_are_not_there():
    return stepping()


@scenario(ZEROED, at_most=2)
def accumulates_into_zeros():
    return stepping()


@scenario(CLEARED, ZEROED, CLEARED, at_most=2)
def follows_gradients_that_come_and_go():
    return stepping()


def _clear_one(made):
    made[0].weight.grad = None


@scenario(steps(X, T), change(_clear_one), steps(X, T, times=1), change(_clear_one), steps(X, T))
def follows_one_gradient_that_goes():
    return stepping()


def _flat(made):
    """Let all gradients be views of one tensor."""
    parameters = list(made.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    made.flat = flat


@scenario(steps(X, T, times=3), change(_flat), steps(X, T), eagerly=True)
def accumulates_into_views_of_one_tensor():
    return stepping()


def _transpose(made):
    made[0].weight.grad = torch.ones(3, 5).t()


@scenario(steps(X, T, times=3), change(_transpose), steps(X, T))
def accumulates_into_a_gradient_of_another_layout():
    return stepping()


def _share(made):
    made[0].bias.grad = made.shared = torch.zeros(3)
    made[2].bias.grad = made.shared


@scenario(change(_share), steps(X, normal(4, 3)), eagerly=True)
def accumulates_two_gradients_into_one_tensor():
    return stepping(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))


def _hold(made):
    made.held = [p.grad for p in made.parameters()]


@scenario(steps(X, T), change(_hold), steps(X, T), change(_clear), steps(X, T))
def keeps_the_gradients_that_somebody_holds():
    return stepping()


@scenario(steps(X, T), at_most=2)
def leaves_frozen_and_unused_parameters_without_a_gradient():
    made = net()
    made[0].weight.requires_grad_(False)
    made.unused = nn.Parameter(torch.ones(2))
    step = stepping(nn.Sequential(*made)).function
    return Program(step, made)


@scenario(
    steps(X, T),
    change(lambda made: made[0].requires_grad_(False)),
    steps(X, T),
    change(lambda made: made[0].requires_grad_(True)),
    steps(X, T),
)
def follows_a_layer_that_is_frozen_and_freed():
    return stepping()


@scenario(steps(LEAF, T))
def lands_a_gradient_on_an_input():
    return stepping()


def _already(_):
    x = torch.randn(4, 3, requires_grad=True)
    x.grad = torch.ones(4, 3)
    return x


@scenario(steps(given(_already), T), steps(LEAF, T), steps(given(_already), T))
def lands_a_gradient_on_an_input_that_has_one():
    return stepping()


@scenario(steps(together=lambda world: (world.leaf * 2,)), eagerly=True)
def lands_a_gradient_beyond_an_input_that_is_no_leaf():
    world = types.SimpleNamespace(leaf=weight(3), scale=weight(3))

    def step(x):
        loss = (x * world.scale).sin().sum()
        loss.backward()
        return loss

    return Program(step, world)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", weight(3))

    def forward(self, x):
        loss = (x * self.scale).sin().sum()
        loss.backward()
        return loss


@scenario(steps(X))
def lands_a_gradient_on_a_buffer():
    return Buffered()


@scenario(steps(X))
def lands_a_gradient_on_what_a_closure_holds():
    table = {"scale": weight(3), "shifts": [weight(3)]}

    def step(x):
        loss = (x * table["scale"] + table["shifts"][0]).sin().sum()
        loss.backward()
        return loss

    return Program(step, table)


@scenario(steps(X), eagerly=True)
def lands_a_gradient_on_what_it_made():
    def step(x):
        made = torch.ones(3).requires_grad_()
        (x * made).sin().sum().backward()
        return made.grad, made

    return step


@scenario(steps(X), eagerly=True)
def retains_the_gradient_of_what_it_computed():
    scale = weight(3)

    def step(x):
        hidden = x * scale
        hidden.retain_grad()
        hidden.sin().sum().backward()
        return hidden.grad * 2

    return Program(step, scale)


@scenario(steps(X), eagerly=True)
def gives_backward_a_tangent():
    scale = weight(3)

    def step(x):
        hidden = (x * scale).sin()
        hidden.backward(torch.full_like(hidden, 0.5))
        return hidden.detach()

    return Program(step, scale)


@scenario(steps(X), eagerly=True)
def tells_backward_where_gradients_shall_land():
    scale, shift = weight(3), weight(3)

    def step(x):
        loss = (x * scale + shift).sin().sum()
        loss.backward(inputs=[shift])
        return loss

    return Program(step, [scale, shift])


@scenario(steps(X, T), at_most=2)
def goes_backward_in_two_parts():
    made = net()

    def step(x, t):
        first = functional.mse_loss(made(x), t)
        first.backward()
        second = made(x * 2).square().mean()
        second.backward()
        return first + second.detach()

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def goes_backward_twice_through_one_graph():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def raises_what_eager_raises_for_a_second_backward_pass():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        loss.backward()

    return Program(step, made)


@scenario(steps(X), eagerly=True)
def raises_what_eager_raises_where_nothing_needs_a_gradient():
    def step(x):
        x.sin().sum().backward()

    return step


@scenario(steps(X, T), eagerly=True)
def keeps_the_history_of_its_gradients():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in made.parameters())
        found = penalty.detach().clone()
        made.zero_grad()
        return found

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def returns_results_beside_its_loss():
    made = net()

    def step(x, t):
        y = made(x)
        loss = functional.mse_loss(y, t)
        loss.backward()
        return {"loss": loss.detach(), "y": y.detach(), "best": y.argmax(1), "same": y}

    return Program(step, made)


@scenario(steps(X, T))
def returns_its_loss_as_a_number():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        return loss.item()

    return Program(step, made)


def _backward_from_the_rest(step):
    def call(x):
        rest = step(x)
        loss_of(rest).backward()
        return rest

    return call


@scenario(steps(X, through=_backward_from_the_rest), eagerly=True)
def leaves_a_result_to_go_backward_from_outside():
    scale, shift = weight(3), weight(3)

    def step(x):
        (x * scale).sin().sum().backward()
        return (x * shift).exp()

    return Program(step, [scale, shift])


# Gradients read inside


@scenario(steps(X, T), at_most=2)
def clears_gradients_first():
    made = net()

    def step(x, t):
        made.zero_grad(set_to_none=True)
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        return loss

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def zeroes_gradients_first():
    made = net()

    def step(x, t):
        made.zero_grad(set_to_none=False)
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        return loss

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def clears_gradients_last():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        norm = sum(p.grad.norm() for p in made.parameters())
        made.zero_grad()
        return loss, norm

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def returns_gradients():
    made = net()

    def step(x, t):
        functional.mse_loss(made(x), t).backward()
        return [p.grad for p in made.parameters()], made[0].weight.grad * 2

    return Program(step, made)


@scenario(steps(X, T), at_most=1)
def asks_autograd_grad_inside():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        return loss.detach(), torch.autograd.grad(loss, list(made.parameters()))

    return Program(step, made)


@scenario(steps(X, T), at_most=1)
def descends_along_autograd_grad():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        parameters = list(made.parameters())
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
        return loss.detach()

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def adapts_weights_inside():
    """One inner step, differentiated through, as in meta-learning."""
    made = net()

    def step(x, t):
        weights = dict(made.named_parameters())
        inner = functional.mse_loss(torch.func.functional_call(made, weights, (x,)), t)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        outer = functional.mse_loss(torch.func.functional_call(made, adapted, (x * 2,)), t)
        outer.backward()
        return outer.detach()

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def scales_gradients_in_place():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        for parameter in made.parameters():
            parameter.grad.mul_(0.5)
        return loss

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def replaces_gradients():
    made = net()

    def step(x, t):
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        for parameter in made.parameters():
            parameter.grad = parameter.grad.sign()
        return loss

    return Program(step, made)


@scenario(steps(X, T, each(True, False)))
def clears_gradients_when_it_is_told_to():
    made = net()

    def step(x, t, clear):
        if clear:
            made.zero_grad()
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        return loss

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def clips_the_norm_of_gradients():
    made = net()

    def step(x, t):
        made.zero_grad()
        functional.mse_loss(made(x), t).backward()
        return nn.utils.clip_grad_norm_(made.parameters(), 0.1)

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def clips_the_values_of_gradients():
    made = net()

    def step(x, t):
        made.zero_grad()
        functional.mse_loss(made(x), t).backward()
        nn.utils.clip_grad_value_(made.parameters(), 0.05)

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def accumulates_over_parts_of_a_batch():
    made = net()

    def step(x, t):
        made.zero_grad()
        losses = []
        for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
            loss = functional.mse_loss(made(part), target) / 2
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return Program(step, made)


class Counted:
    """Steps an optimizer every second time."""

    def __init__(self):
        self.made, self.count = net(), 0
        self.optimizer = torch.optim.SGD(self.made.parameters(), 0.1)

    def step(self, x, t):
        loss = functional.mse_loss(self.made(x), t)
        loss.backward()
        self.count += 1
        if self.count % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


@scenario(steps(X, T, times=8), eagerly=True)
def steps_an_optimizer_every_second_time():
    made = Counted()
    return Program(made.step, made)


# Optimizers inside


@scenario(steps(X, T), eagerly=True)
def steps_plain_descent():
    return optimizing(lambda p: torch.optim.SGD(p, 0.1))


@scenario(steps(X, T), eagerly=True)
def steps_descent_with_momentum():
    return optimizing(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01))


@scenario(steps(X, T), eagerly=True, near=1e-5)
def steps_adam():
    return optimizing(lambda p: torch.optim.AdamW(p, 0.1))


@scenario(steps(X, T), eagerly=True, near=1e-5)
def steps_adam_all_at_once():
    return optimizing(lambda p: torch.optim.AdamW(p, 0.1, foreach=True, amsgrad=True))


@scenario(steps(X, T), eagerly=True)
def steps_fused_adam():
    return optimizing(lambda p: torch.optim.Adam(p, 0.1, fused=True))


@scenario(steps(X, T), eagerly=True)
def clips_before_it_steps():
    return optimizing(
        lambda p: torch.optim.SGD(p, 0.1),
        before=lambda made: nn.utils.clip_grad_norm_(made.parameters(), 0.1),
    )


@scenario(steps(X, normal(4, 2)), eagerly=True)
def steps_where_a_batch_norm_and_a_dropout_are():
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    return optimizing(lambda p: torch.optim.SGD(p, 0.1), made=made)


@scenario(
    steps(X, T),
    change(lambda world: world.optimizer.param_groups[0].update(lr=0.5)),
    steps(X, T),
    eagerly=True,
)
def follows_the_rate_of_an_optimizer():
    return descending()


def _reverse(world):
    world.optimizer.param_groups[0].update(weight_decay=0.5, maximize=True)


@scenario(steps(X, T), change(_reverse), steps(X, T), eagerly=True)
def follows_the_settings_of_an_optimizer():
    return descending()


@scenario(
    steps(X, T),
    change(lambda world: world.optimizer.param_groups[0]["params"].pop()),
    steps(X, T),
    eagerly=True,
)
def follows_what_an_optimizer_is_responsible_for():
    return descending()


@scenario(steps(X, T), eagerly=True)
def follows_a_schedule():
    made = net()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x, t):
        optimizer.zero_grad()
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach(), optimizer.param_groups[0]["lr"]

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def scales_its_loss():
    made = net()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def step(x, t):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.mse_loss(made(x), t)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), scaler.get_scale()

    return Program(step, made)


@scenario(steps(X), eagerly=True)
def trains_two_models_against_each_other():
    maker, judge = nn.Linear(3, 3), nn.Linear(3, 1)
    first = torch.optim.SGD(maker.parameters(), 0.1)
    second = torch.optim.SGD(judge.parameters(), 0.1)

    def step(x):
        second.zero_grad()
        made = maker(torch.randn(4, 3))
        loss = judge(made.detach()).mean() - judge(x).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        other = -judge(made).mean()
        other.backward()
        first.step()
        return loss.detach(), other.detach()

    return Program(step, [maker, judge])


@scenario(steps(X, T))
def averages_weights_after_it_steps():
    made, average = net(), net().requires_grad_(False)

    def step(x, t):
        made.zero_grad()
        loss = functional.mse_loss(made(x), t)
        loss.backward()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), made.parameters(), strict=True):
                parameter.sub_(parameter.grad, alpha=0.1)
                mean.lerp_(parameter, 0.1)
        return loss.detach()

    return Program(step, [made, average])


# State, branches and sizes


@scenario(steps(X, normal(4, 3)), at_most=2)
def moves_statistics_and_draws_masks_in_a_step():
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    return stepping(made)


@scenario(steps(growing(2, 3, by=(1, 0)), growing(2, 2, by=(1, 0))), at_most=4)
def steps_on_a_growing_batch():
    return stepping()


@scenario(steps(X, each(torch.zeros(4, 2), torch.full((4, 2), float("nan"))), times=10))
def goes_backward_only_from_a_finite_loss():
    made = net()

    def step(x, t):
        made.zero_grad()
        loss = functional.mse_loss(made(x), t)
        if torch.isfinite(loss):
            loss.backward()
        return loss.detach()

    return Program(step, made)


@scenario(steps(X, T), at_most=2)
def steps_under_autocast():
    made = net()

    def step(x, t):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.mse_loss(made(x), t)
            loss.backward()
        return loss.detach()

    return Program(step, made)


@scenario(calls(X, T), at_most=2)
def records_inside_where_nothing_is_recorded():
    made = net()

    def step(x, t):
        with torch.enable_grad():
            loss = functional.mse_loss(made(x), t)
            loss.backward()
        return loss

    return Program(step, made)


@scenario(steps(X, T), eagerly=True)
def runs_the_hooks_of_parameters_in_a_step():
    def halve(parameter):
        parameter.grad.mul_(0.5)

    program = stepping()
    for parameter in program.world.parameters():
        parameter.register_hook(lambda grad: grad * 3)
        parameter.register_post_accumulate_grad_hook(halve)
    return program


@scenario(steps(X, T))
def steps_on_a_tied_weight():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return stepping(nn.Sequential(first, nn.Tanh(), second, nn.Linear(3, 2)))


@scenario(steps(given(lambda _: torch.randint(0, 7, (4,))), normal(4, 3)), eagerly=True)
def lands_a_sparse_gradient():
    return stepping(nn.Embedding(7, 3, sparse=True))


@scenario(
    steps(X, T),
    change(lambda made: made.requires_grad_(False)),
    steps(X, T),
    eagerly=True,
)
def raises_what_eager_raises_once_nothing_is_trained():
    return stepping()


@scenario(steps(X, T, through=lambda step: lambda *args: [step(*args), step(*args)]), at_most=2)
def adds_up_two_steps():
    return stepping()
