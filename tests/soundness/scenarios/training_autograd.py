"""What autograd can do beside recording: functions of one's own, hooks, checkpoints, gradients inside."""

from __future__ import annotations

import contextlib
import functools
import types

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from scenarios._scenario import Program, calls, change, each, growing, normal, scenario
from scenarios._training import backward, backward_from, loss_of, trained

X = normal(4, 3)
LEAF = normal(4, 3, requires_grad=True)


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def weight(*shape):
    return torch.randn(*shape).requires_grad_()


# Functions of one's own. Their gradients are none that a formula would give.


class Halving(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor, ctx.shape = factor, x.shape
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.factor / 2 + ctx.shape[0], None


@scenario(trained(LEAF), at_most=1)
def uses_the_gradient_that_a_function_defines():
    return lambda x: Halving.apply(x, 3.0) + x


@scenario(trained(LEAF, each(2.0, 3.0, 4.0, 5.0, 6.0, 7.0)), at_most=3)
def gives_a_function_a_number_that_changes():
    return lambda x, factor: Halving.apply(x, factor) + x


@scenario(trained(growing(2, 3, by=(1, 0))), at_most=2)
def gives_a_function_a_growing_batch():
    scale = weight(3)
    return Program(lambda x: Halving.apply(x * scale, 3.0), scale)


class Sorting(Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, grad, _):
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, indices, grad * 3)


@scenario(trained(LEAF), at_most=1)
def returns_what_a_function_marks_as_not_differentiable():
    return lambda x: Sorting.apply(x * 1)


class Choosing(Function):
    """Gives gradients only where they are asked for."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx, first, second):
        asked = ctx.needs_input_grad
        return (
            first * 5 if asked[0] and first is not None else None,
            second * 7 if asked[1] and second is not None else None,
        )


@scenario(trained(LEAF, LEAF), trained(LEAF, X), trained(X, LEAF), at_most=3)
def asks_a_function_only_for_gradients_that_are_needed():
    return lambda x, y: Choosing.apply(x, y)


@scenario(trained(LEAF, LEAF, by=backward_from(lambda r: r[0])), eagerly=True)
def leaves_out_a_gradient_that_a_function_need_not_give():
    return lambda x, y: Choosing.apply(x, y)


class Viewing(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(4, 3) * 2


@scenario(trained(LEAF), eagerly=True)
def returns_a_view_that_a_function_made():
    return lambda x: (Viewing.apply(x), Viewing.apply(x * 2))


class Writing(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


@scenario(trained(LEAF), at_most=1)
def has_a_function_that_writes_what_it_is_given():
    return lambda x: Writing.apply(x * 1)


class Remembering(Function):
    seen: list[float]

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(len(ctx.seen))
        return grad * 2, None


@scenario(trained(LEAF), eagerly=True)
def has_a_function_that_writes_python_state_in_backward():
    seen: list[int] = []
    return Program(lambda x: Remembering.apply(x, seen), seen)


class Printing(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        print("backward")
        return grad * 2


@scenario(trained(LEAF), eagerly=True)
def has_a_function_that_prints_in_backward():
    return lambda x: Printing.apply(x)


class Asking(Function):
    """What it does in backward depends on the values of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.sum() > 0 else grad * 3


def _either_way(program):
    def call(x, sign):
        result = program(x)
        (loss_of(result) * sign).backward()
        return result

    return call


@scenario(trained(LEAF, each(1.0, -1.0), by=_either_way), eagerly=True)
def has_a_function_that_branches_in_backward():
    return lambda x: Asking.apply(x)


class Drawing(Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(3)


@scenario(trained(LEAF), eagerly=True)
def has_a_function_that_draws_in_backward():
    return lambda x: Drawing.apply(x)


class Stating(Function):
    """Written in the two parts that function transforms ask for."""

    @staticmethod
    def forward(x, y):
        return x * y, x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, first, second):
        x, y, sine = ctx.saved_tensors
        return first * y * 2 + second * sine, first * x * 3


@scenario(trained(LEAF, LEAF), at_most=1)
def has_a_function_with_a_context_set_up_apart():
    return lambda x, y: Stating.apply(x, y)


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 5


@scenario(trained(LEAF), at_most=1)
def has_a_function_that_is_differentiable_once():
    return lambda x: Once.apply(x)


class Straight(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round().to(torch.int64).float()

    @staticmethod
    def backward(ctx, grad):
        return grad


@scenario(trained(X), at_most=1)
def goes_straight_through_what_has_no_gradient():
    made = net()
    return Program(lambda x: Straight.apply(made(x) * 8) / 8, made)


class Holding(Function):
    """Keeps tensors where no check of versions sees them."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.half = x, x / 2
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x + ctx.half


@scenario(trained(LEAF), at_most=1)
def has_a_function_that_holds_tensors_as_attributes():
    return lambda x: Holding.apply(x * 1)


class Cast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x @ torch.eye(x.shape[1], dtype=x.dtype)


@scenario(trained(X), eagerly=True)
def has_a_function_that_casts_for_autocast():
    made = net()

    def program(x):
        with torch.autocast("cpu", torch.bfloat16):
            return Cast.apply(made(x))

    return Program(program, made)


# Hooks of tensors


@scenario(trained(LEAF), eagerly=True)
def hooks_a_tensor_inside():
    def program(x):
        y = x.sin()
        y.register_hook(lambda grad: grad * 3)
        return y * 2

    return program


@scenario(trained(LEAF), eagerly=True)
def hooks_a_tensor_inside_that_tells_python():
    seen: list[int] = []

    def program(x):
        y = x.sin()
        y.register_hook(lambda grad: seen.append(grad.numel()))
        return y * 2

    return Program(program, seen)


@scenario(trained(LEAF), eagerly=True)
def hooks_its_input_inside():
    def program(x):
        x.register_hook(lambda grad: grad * 3)
        return x.sin()

    return program


@scenario(trained(LEAF), eagerly=True)
def retains_a_gradient_inside():
    kept: list[torch.Tensor] = []

    def program(x):
        y = x.sin()
        y.retain_grad()
        kept[:] = [y]
        return y * 2

    return Program(program, kept)


def hooked(register):
    made = net()
    seen = {name: [] for name, _ in made.named_parameters()}
    register(made, seen)
    return Program(made, types.SimpleNamespace(made=made, seen=seen))


def _hook_parameters(made, seen):
    # The order in which they run is no promise; each sees its gradient.
    def hook(name, grad):
        seen[name].append(grad.sum())
        return grad * 2

    for name, parameter in made.named_parameters():
        parameter.register_hook(functools.partial(hook, name))


@scenario(trained(X), at_most=1)
def runs_the_hooks_of_parameters():
    return hooked(_hook_parameters)


def _hook_accumulation(made, seen):
    def hook(name, parameter):
        seen[name].append(parameter.grad.sum())

    for name, parameter in made.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, name))


@scenario(trained(X), at_most=1)
def runs_hooks_after_gradients_were_accumulated():
    return hooked(_hook_accumulation)


def _descend_at_once(made, seen):
    @torch.no_grad()
    def descend(parameter):
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in made.parameters():
        parameter.register_post_accumulate_grad_hook(descend)


@scenario(trained(X), at_most=1)
def changes_parameters_in_hooks_of_their_gradients():
    return hooked(_descend_at_once)


def _hook_later(world):
    _hook_parameters(world.made, world.seen)


@scenario(trained(X), change(_hook_later), trained(X))
def follows_hooks_that_parameters_get_between_calls():
    return hooked(lambda made, seen: None)


def _hooking_the_result(program):
    def call(x):
        result = program(x)
        seen = []
        result.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
        result.grad_fn.register_hook(lambda *_: seen.append(1))
        loss_of(result).backward()
        return result, seen

    return call


@scenario(trained(LEAF, by=_hooking_the_result), at_most=1)
def runs_hooks_of_its_result():
    return net()


def _hooking_the_input(program):
    def call(x):
        x.register_hook(lambda grad: grad * 2)
        inner = x * 2
        inner.register_hook(lambda grad: grad + 1)
        return backward(program)(inner)

    return call


@scenario(trained(LEAF, by=_hooking_the_input), eagerly=True)
def runs_hooks_of_its_input():
    return net()


# Hooks of modules


def _hook_forward(made, seen):
    made[0].register_forward_hook(lambda module, args, out: out * 2)
    made[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))


@scenario(trained(X), at_most=1)
def runs_forward_hooks_of_modules():
    return hooked(_hook_forward)


def _hook_backward(made, seen):
    made[0].register_full_backward_hook(lambda module, into, out: (into[0],))
    made[2].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    made[2].register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))


@scenario(trained(LEAF), eagerly=True)
def runs_backward_hooks_of_modules():
    return hooked(_hook_backward)


def _watch_backward(made, seen):
    made[2].register_full_backward_hook(
        lambda module, into, out: seen.update({len(seen): out[0].sum()})
    )


@scenario(trained(X), eagerly=True)
def runs_backward_hooks_that_tell_python():
    return hooked(_watch_backward)


def _hook_all_backward(program):
    def call(x):
        hook = nn.modules.module.register_module_full_backward_hook(
            lambda module, into, out: tuple(g * 2 if g is not None else None for g in into)
        )
        try:
            return backward(program)(x)
        finally:
            hook.remove()

    return call


@scenario(trained(LEAF, times=3), trained(LEAF, by=_hook_all_backward), eagerly=True)
def runs_backward_hooks_of_all_modules():
    return net()


def _hook_backward_later(world):
    _hook_backward(world.made, world.seen)


@scenario(trained(LEAF), change(_hook_backward_later), trained(LEAF), eagerly=True)
def follows_backward_hooks_that_modules_get_between_calls():
    return hooked(lambda made, seen: None)


def _hook_itself(program):
    def call(x):
        hook = program.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
        try:
            return backward(program)(x)
        finally:
            hook.remove()

    return call


@scenario(trained(LEAF, by=_hook_itself), eagerly=True)
def runs_backward_hooks_that_it_got_itself():
    return net()


def _removable(made, seen):
    made.hook = made[2].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))


@scenario(
    trained(LEAF), change(lambda world: world.made.hook.remove()), trained(LEAF), eagerly=True
)
def follows_backward_hooks_that_are_removed():
    return hooked(_removable)


# Checkpoints


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
        self.outer, self.options = nn.Linear(3, 2), options

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, **self.options))


@scenario(trained(LEAF), at_most=1)
def checkpoints_a_part():
    made = Checkpointed(use_reentrant=False)
    made.inner[1].p = 0.0
    return made


@scenario(trained(LEAF), eagerly=True)
def draws_the_same_mask_again_in_a_checkpoint():
    return Checkpointed(use_reentrant=False)


@scenario(trained(LEAF), eagerly=True)
def checkpoints_a_part_reentrantly():
    return Checkpointed(use_reentrant=True)


@scenario(trained(LEAF), eagerly=True)
def draws_another_mask_again_in_a_checkpoint_that_says_so():
    return Checkpointed(use_reentrant=False, preserve_rng_state=False)


@scenario(trained(LEAF), at_most=1)
def nests_checkpoints():
    made = net()

    def inner(x):
        return checkpoint(made[:2], x, use_reentrant=False).sin()

    return Program(lambda x: checkpoint(inner, x * 2, use_reentrant=False).sum(0), made)


@scenario(trained(LEAF), eagerly=True)
def checkpoints_a_sequence():
    made = net()
    return Program(lambda x: checkpoint_sequential(made, 2, x, use_reentrant=False), made)


@scenario(trained(growing(2, 3, by=(1, 0))), at_most=2)
def checkpoints_a_growing_batch():
    made = Checkpointed(use_reentrant=False)
    made.inner[1].p = 0.0
    return made


def _within_checkpoint(**options):
    def way(program):
        def call(x):
            result = checkpoint(program, x, **options)
            loss_of(result).backward()
            return result

        return call

    return way


def dropping():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))


@scenario(trained(LEAF, by=_within_checkpoint(use_reentrant=False)), eagerly=True)
def is_called_within_a_checkpoint():
    return dropping()


@scenario(trained(LEAF, by=_within_checkpoint(use_reentrant=True)), eagerly=True)
def is_called_within_a_reentrant_checkpoint():
    return dropping()


@scenario(
    trained(LEAF, times=3),
    trained(LEAF, by=_within_checkpoint(use_reentrant=False)),
    trained(LEAF, times=3),
    eagerly=True,
)
def is_called_within_a_checkpoint_and_without():
    return dropping()


@scenario(
    trained(LEAF, times=3),
    trained(LEAF, by=_within_checkpoint(use_reentrant=True)),
    trained(LEAF, times=3),
    eagerly=True,
)
def is_called_within_a_reentrant_checkpoint_and_without():
    return dropping()


@scenario(trained(LEAF, by=_within_checkpoint(use_reentrant=False)), eagerly=True)
def moves_statistics_within_a_checkpoint_as_often_as_eager():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


# Hooks of saved tensors


def halves():
    """Keep saved tensors at half precision."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.half(), lambda tensor: tensor.float()
    )


def _with_saved(context):
    def way(program):
        def call(x):
            with context():
                result = program(x)
            loss_of(result).backward()
            return result

        return call

    return way


@scenario(
    trained(LEAF, times=3), trained(LEAF, by=_with_saved(halves)), trained(LEAF), eagerly=True
)
def keeps_saved_tensors_as_hooks_say():
    return net()


@scenario(
    trained(LEAF, by=_with_saved(torch.autograd.graph.save_on_cpu)),
    trained(LEAF),
    trained(LEAF, by=_with_saved(torch.autograd.graph.save_on_cpu)),
    eagerly=True,
)
def keeps_saved_tensors_on_the_cpu():
    return net()


@scenario(trained(LEAF), eagerly=True)
def hooks_saved_tensors_inside():
    def program(x):
        with halves():
            return (x * 3.14159).sin().exp()

    return program


def packing():
    """Forbid hooks of saved tensors."""
    return torch.autograd.graph.disable_saved_tensors_hooks("not here")


@scenario(trained(LEAF, by=_with_saved(packing)), trained(LEAF), eagerly=True)
def forbids_hooks_of_saved_tensors():
    return net()


def _changing_saved(program):
    def call(x):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            return backward(program)(x)

    return call


@scenario(trained(LEAF, by=_changing_saved), eagerly=True)
def lets_saved_tensors_be_changed():
    def program(x):
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z, y

    return program


@scenario(trained(LEAF, by=_with_saved(torch.autograd.detect_anomaly)), eagerly=True)
def is_called_while_anomalies_are_detected():
    return net()


@scenario(
    trained(
        LEAF, by=_with_saved(functools.partial(torch.autograd.set_multithreading_enabled, False))
    )
)
def goes_backward_in_one_thread():
    return net()


# Gradients inside the forward pass


@scenario(trained(LEAF), eagerly=True)
def differentiates_inside():
    def program(x):
        y = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(y.sin().sum(), y)
        return x * grad

    return program


@scenario(trained(LEAF), eagerly=True)
def differentiates_its_input_inside():
    def program(x):
        (grad,) = torch.autograd.grad(x.sin().sum(), x, retain_graph=True)
        return x * grad

    return program


@scenario(trained(LEAF), eagerly=True)
def penalizes_a_gradient_inside():
    made = net()

    def program(x):
        score = made(x).sum()
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        return score + (grad.norm(dim=1) - 1).square().mean()

    return Program(program, made)


@scenario(calls(X, under=contextlib.nullcontext), trained(X), eagerly=True)
def computes_forces_from_an_energy():
    made = net()

    def program(x):
        x = x.clone().requires_grad_()
        energy = made(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -force

    return Program(program, made)


@scenario(calls(X), eagerly=True)
def computes_forces_where_gradients_are_off():
    made = net()

    def program(x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (force,) = torch.autograd.grad(made(x).sum(), x)
        return -force

    return Program(program, made)


@scenario(trained(LEAF), eagerly=True)
def finds_a_jacobian_inside():
    def program(x):
        found = torch.autograd.functional.jacobian(lambda y: y.sin().sum(0), x.detach())
        return x * found.sum()

    return program


def _hessian(program):
    return lambda x: torch.func.hessian(lambda y: program(y).sum())(x)


@scenario(trained(normal(3), by=_hessian))
def has_a_hessian():
    return lambda x: x.sin() * x.sum()


def _vectorized(program):
    def call(x):
        return torch.func.vmap(torch.func.grad(lambda row: program(row).sum()))(x)

    return call


@scenario(trained(X, by=_vectorized))
def has_gradients_for_each_row():
    return lambda x: x.sin() * x.sum()
