"""Gradients outside: the program is compiled, its caller goes backward from what it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from scenarios._scenario import (
    Program,
    calls,
    change,
    constant,
    each,
    given,
    growing,
    normal,
    scenario,
)
from scenarios._training import (
    backward_from,
    changing,
    differentiated,
    loss_of,
    optimized,
    trained,
)

X = normal(4, 3)
LEAF = normal(4, 3, requires_grad=True)
SQUARE = normal(3, 3, requires_grad=True)
INNER = given(lambda _: torch.randn(4, 3, requires_grad=True) * 2)


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def weight(*shape, **options):
    return torch.randn(*shape, **options).requires_grad_()


# Where gradients arrive


@scenario(trained(X), at_most=1)
def gives_gradients_to_parameters():
    return net()


@scenario(trained(LEAF), at_most=1)
def gives_a_gradient_to_an_input():
    return lambda x: x.sin() * x


@scenario(trained(LEAF), at_most=1)
def gives_gradients_to_parameters_and_an_input():
    return net()


@scenario(trained(together=lambda leaf: (leaf * 2,)), at_most=1)
def gives_a_gradient_through_an_input_that_is_no_leaf():
    leaf = weight(4)
    return Program(lambda x: x.exp(), leaf)


def _retaining(_):
    x = torch.randn(4, requires_grad=True) * 2
    x.retain_grad()
    return x


@scenario(trained(given(_retaining)), at_most=1)
def gives_a_gradient_to_an_input_that_retains_it():
    return lambda x: x.exp()


@scenario(trained(LEAF), trained(INNER), trained(LEAF))
def serves_leaves_and_others():
    return lambda x: x.sin() * 2


@scenario(trained(X), at_most=1)
def gives_gradients_to_what_a_closure_holds():
    table = {"scale": weight(3), "shifts": [weight(3), torch.ones(3)]}
    return Program(lambda x: x * table["scale"] + sum(table["shifts"]), table)


@scenario(trained(X), at_most=1)
def leaves_a_frozen_parameter_without_a_gradient():
    made = net()
    made[0].weight.requires_grad_(False)
    made[2].bias.requires_grad_(False)
    return made


class Wide(nn.Module):
    """Has a parameter and a layer that no call uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.used(x)


@scenario(trained(X), at_most=1)
def leaves_an_unused_parameter_without_a_gradient():
    return Wide()


class Masked(nn.Module):
    """Uses a parameter, but its result does not depend on it."""

    def __init__(self):
        super().__init__()
        self.used, self.counted = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.used(x), (self.counted > 0).sum(), self.counted.detach() * x


@scenario(trained(X), at_most=1)
def leaves_a_parameter_without_a_gradient_that_only_masks_depend_on():
    return Masked()


@scenario(trained(X, by=backward_from(lambda r: r[0])), at_most=1)
def leaves_a_parameter_without_a_gradient_whose_output_is_dropped():
    first, second = weight(3), weight(3)
    return Program(lambda x: (x * first, x * second), [first, second])


@scenario(
    trained(X, times=3),
    change(lambda made: made.zero_grad(set_to_none=True)),
    trained(X, times=3),
    change(lambda made: made.zero_grad(set_to_none=False)),
    trained(X, times=3),
    at_most=1,
)
def follows_gradients_that_are_cleared():
    return net()


def _twice(program):
    def call(x):
        loss = loss_of(program(x)) + loss_of(program(x * 2))
        loss.backward()
        return loss

    return call


@scenario(trained(X, by=_twice), at_most=1)
def adds_up_two_calls_in_one_backward_pass():
    return net()


def _out_of_order(program):
    def call(x):
        first, second = program(x), program(x * 2)
        loss_of(first).backward()
        third = program(x * 3)
        loss_of(third).backward()
        loss_of(second).backward()
        return first, second, third

    return call


@scenario(trained(X, by=_out_of_order), at_most=1)
def goes_backward_in_another_order_than_forward():
    return net()


@scenario(
    trained(X),
    change(lambda made: made[0].weight.requires_grad_(False)),
    trained(X),
    change(lambda made: made[0].weight.requires_grad_(True)),
    trained(X),
    at_most=2,
    says=("requires_grad",),
)
def follows_a_parameter_that_is_frozen_and_freed():
    return net()


@scenario(
    trained(X),
    change(lambda made: made.requires_grad_(False)),
    calls(X, under=torch.enable_grad),
    change(lambda made: made.requires_grad_(True)),
    trained(X),
    at_most=2,
)
def follows_a_model_that_is_frozen_and_freed():
    return net()


@scenario(trained(X), trained(LEAF), trained(X), at_most=2)
def follows_an_input_that_begins_to_need_a_gradient():
    return net()


def _replace(made):
    made[0].weight = nn.Parameter(torch.ones(5, 3))


@scenario(trained(X), change(_replace), trained(X))
def gives_the_gradient_to_a_parameter_that_was_replaced():
    return net()


@scenario(
    trained(X),
    change(lambda made: setattr(made[0].weight, "data", torch.ones(5, 3))),
    trained(X),
    at_most=1,
)
def gives_the_gradient_to_a_parameter_whose_data_was_replaced():
    return net()


class Tied(nn.Module):
    """One weight, on the way in and on the way out."""

    def __init__(self):
        super().__init__()
        self.read, self.write = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.write.weight = self.read.weight

    def forward(self, ids):
        return self.write(self.read(ids).tanh())


@scenario(trained(given(lambda _: torch.randint(0, 7, (4,)))), at_most=1)
def adds_up_the_gradients_of_a_tied_weight():
    return Tied()


def _same():
    x = torch.randn(4, requires_grad=True)
    return x, x


@scenario(trained(together=lambda _: _same()), trained(LEAF, LEAF), at_most=2)
def adds_up_the_gradients_of_one_input_passed_twice():
    return lambda x, y: x.sin() * y.exp()


def _views():
    base = torch.randn(6, requires_grad=True)
    return base, base[:3], base[2:5]


@scenario(trained(together=lambda _: _views()))
def adds_up_the_gradients_of_inputs_that_are_views_of_one():
    return lambda base, x, y: (base.sin(), x * y)


@scenario(trained(LEAF, LEAF, by=differentiated()), at_most=1)
def answers_autograd_grad():
    return lambda x, y: x.sin() * y


@scenario(trained(LEAF, LEAF, by=differentiated(allow_unused=True)), at_most=1)
def answers_autograd_grad_for_what_it_does_not_use():
    return lambda x, y: x.sin() + y.shape[0]


@scenario(
    trained(LEAF, LEAF, by=differentiated(allow_unused=True, materialize_grads=True)), at_most=1
)
def answers_autograd_grad_with_zeros():
    return lambda x, y: x.sin() + y.shape[0]


def _only_the_first(program):
    def call(x, y):
        result = program(x, y)
        loss_of(result).backward(inputs=[x])
        return result

    return call


@scenario(trained(LEAF, LEAF, by=_only_the_first), at_most=1)
def gives_a_gradient_only_where_backward_is_told_to():
    return lambda x, y: x.sin() * y.exp()


def _batched(program):
    def call(x):
        result = program(x)
        rows = torch.eye(result.numel()).reshape(-1, *result.shape)
        return torch.autograd.grad(result, x, rows, is_grads_batched=True)

    return call


@scenario(trained(normal(4, requires_grad=True), by=_batched), eagerly=True)
def answers_a_batch_of_tangents():
    return lambda x: x.sin() * x.sum()


def _retained(program):
    def call(x):
        result = program(x)
        result.retain_grad()
        hidden = result * 2
        loss_of(hidden).backward()
        return result

    return call


@scenario(trained(LEAF, by=_retained), at_most=1)
def retains_the_gradient_of_its_result():
    return lambda x: x.sin()


@scenario(trained(X), trained(together=lambda made: (made[0].weight,)), trained(X), at_most=2)
def takes_its_own_parameter_as_an_input():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


@scenario(trained(X), at_most=1)
def normalizes_a_weight():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


# Backward more than once


def _backward_twice(program):
    def call(x):
        result = program(x)
        loss_of(result).backward(retain_graph=True)
        loss_of(result).backward()
        return result

    return call


@scenario(trained(LEAF, by=_backward_twice), at_most=1)
def goes_backward_twice_where_the_graph_is_retained():
    return net()


def _backward_too_often(program):
    def call(x):
        loss = loss_of(program(x))
        loss.backward()
        loss.backward()

    return call


@scenario(trained(LEAF, by=_backward_too_often), at_most=1)
def raises_what_eager_raises_for_a_second_backward_pass():
    return lambda x: x.sin().exp()


def _one_after_the_other(program):
    def call(x):
        first, second = program(x)
        loss_of(first).backward()
        loss_of(second).backward()

    return call


@scenario(trained(LEAF, by=_one_after_the_other), eagerly=True)
def goes_backward_from_one_result_after_the_other():
    """In eager the two share no saved tensor; in one graph they do."""
    return lambda x: (x.sin(), x.exp())


def _backward_without_need(program):
    def call(x):
        program(x).sum().backward()

    return call


@scenario(trained(X, by=_backward_without_need), at_most=1)
def raises_what_eager_raises_where_nothing_needs_a_gradient():
    return lambda x: x.sin()


@scenario(trained(LEAF, by=_backward_without_need), at_most=1)
def raises_what_eager_raises_where_the_result_is_detached():
    return lambda x: x.sin().detach()


# What recording is told inside


@scenario(trained(LEAF), at_most=1)
def stops_recording_inside():
    def program(x):
        with torch.no_grad():
            scale = x.exp()
        return x * scale

    return program


@scenario(trained(LEAF), at_most=1)
def detaches_inside():
    return lambda x: x.sin() * x.exp().detach() + x.detach()


@scenario(trained(LEAF, under=torch.no_grad), at_most=1)
def starts_recording_inside():
    def program(x):
        with torch.enable_grad():
            y = x.sin() * 2
        return y, x.exp()

    return program


@scenario(trained(LEAF), at_most=1)
def records_inside_what_is_not_recorded():
    @torch.no_grad()
    def quiet(x):
        with torch.enable_grad():
            inner = x.sin()
        return inner * 2, inner

    return lambda x: (quiet(x), x * 3)


@scenario(trained(LEAF), eagerly=True)
def enters_inference_mode_inside():
    def program(x):
        with torch.inference_mode():
            scale = x.exp().sum()
        return x * scale.item()

    return program


@scenario(trained(LEAF), eagerly=True)
def makes_a_tensor_inside_that_needs_a_gradient():
    def program(x):
        scale = torch.full((3,), 2.0).requires_grad_()
        return x * scale, scale

    return program


@scenario(trained(LEAF), at_most=1)
def stops_the_gradient_of_one_factor():
    return lambda x: torch.where(x > 0, x.detach() * x, x.sin())


@scenario(trained(LEAF), eagerly=True)
def asks_whether_a_gradient_is_needed():
    return lambda x: x * 2 if x.requires_grad and (x * 2).requires_grad else x * 3


@scenario(trained(X), eagerly=True)
def asks_for_the_gradient_of_its_input():
    return lambda x: x.requires_grad_().sin()


@scenario(trained(LEAF), eagerly=True)
def detaches_in_place():
    def program(x):
        y = x.sin()
        z = y.exp()
        z.detach_()
        return y * z

    return program


@scenario(trained(INNER, LEAF), eagerly=True)
def detaches_its_input_in_place():
    def program(x, y):
        x.detach_()
        return x * y

    return program


@scenario(trained(LEAF), at_most=1)
def asks_whether_gradients_are_recorded():
    def program(x):
        with torch.no_grad():
            scale = 2 if torch.is_grad_enabled() else 3
        return x.sin() * scale * (5 if torch.is_grad_enabled() else 7)

    return program


@scenario(trained(LEAF), eagerly=True)
def asks_what_made_a_result():
    def program(x):
        y = x.sin()
        return y * (2 if y.grad_fn is not None and x.grad_fn is None else 3)

    return program


@scenario(trained(LEAF), eagerly=True)
def leaves_recording_off():
    def program(x):
        y = x.sin()
        torch.set_grad_enabled(False)
        return y, y * 2

    return program


@scenario(trained(X), eagerly=True)
def scales_by_the_gradient_of_the_call_before():
    scale = weight(3)
    scale.grad = torch.ones(3)
    return Program(lambda x: (x * scale).sin() * scale.grad.norm(), scale)


@scenario(trained(X), eagerly=True)
def lets_an_optimizer_clear_gradients_before_it_returns_its_loss():
    made = net()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)

    def program(x):
        optimizer.zero_grad()
        return made(x).square().mean()

    return Program(program, made)


@scenario(trained(X), eagerly=True)
def clears_gradients_before_it_returns_its_loss():
    made = net()

    def program(x):
        made.zero_grad()
        return made(x).square().mean()

    return Program(program, made)


# What it returns


@scenario(trained(LEAF), at_most=1)
def returns_results_that_need_no_gradient():
    def program(x):
        return x.sin(), x.detach() * 2, x.argmax(1), x > 0, x.shape[0], None, torch.ones(2)

    return program


@scenario(trained(LEAF, by=backward_from(lambda r: r["values"])), at_most=1)
def returns_indices_beside_values():
    return lambda x: dict(zip(("values", "indices"), x.topk(2), strict=True))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sides:
    left: Any
    right: Any


@scenario(trained(LEAF), at_most=1)
def returns_nested_containers():
    return lambda x: Pair(x.sin(), {"list": [x * 2, None, (x.exp(),)], "number": 3})


@scenario(trained(LEAF), at_most=1)
def returns_an_object_of_a_class_with_fields():
    return lambda x: Sides(x.sin(), [x * 2])


@scenario(trained(LEAF), at_most=1)
def returns_an_output_of_a_model():
    from transformers.modeling_outputs import BaseModelOutput

    return lambda x: BaseModelOutput(last_hidden_state=x.sin(), hidden_states=(x * 2, x.exp()))


@scenario(trained(LEAF), at_most=1)
def returns_one_result_twice():
    def program(x):
        y = x.sin()
        return y, {"again": y}

    return program


@scenario(trained(LEAF), at_most=1)
def returns_an_input_that_needs_a_gradient():
    return lambda x: (x, x.sin())


@scenario(trained(INNER), at_most=1)
def returns_an_input_that_is_no_leaf():
    return lambda x: (x, x.sin())


class ReturningWeight(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight, self.weight.t(), self.bias.detach()


@scenario(trained(X), at_most=1)
def returns_a_parameter_and_views_of_it():
    return ReturningWeight(3, 2)


# Views among results


@scenario(trained(SQUARE), at_most=1, near=1e-6)
def returns_views_of_an_input_that_needs_a_gradient():
    return lambda x: (x.t(), x[1], x.flatten(), x.unsqueeze(0), x.sin())


@scenario(trained(LEAF), at_most=1)
def returns_results_that_are_views_of_each_other():
    def program(x):
        y = x.sin()
        return y, y[1:], y.t()

    return program


@scenario(trained(LEAF), at_most=1)
def returns_two_views_of_what_it_does_not_return():
    def program(x):
        y = x.sin()
        return y[:2], y[1:]

    return program


@scenario(trained(normal(6, requires_grad=True)), at_most=1)
def returns_chunks_of_what_it_computed():
    return lambda x: x.sin().chunk(3)


@scenario(trained(LEAF), at_most=1)
def returns_rows_of_an_input():
    return lambda x: (x.unbind(0), x.sin())


@scenario(trained(LEAF), at_most=1)
def returns_something_expanded():
    return lambda x: (x[:, :1].sin().expand(4, 5), x.sum().expand(2))


def _double_first(result):
    first = result[0] if isinstance(result, (tuple, list)) else result
    first.mul_(2)


@scenario(trained(LEAF, by=changing(_double_first)), at_most=1)
def lets_the_caller_change_a_result():
    return lambda x: (x.sin(), x.exp())


@scenario(trained(LEAF, by=changing(_double_first)), eagerly=True)
def lets_the_caller_change_one_of_two_views():
    def program(x):
        y = x * 3
        return y[:2], y[1:]

    return program


@scenario(trained(LEAF, by=changing(_double_first)), eagerly=True)
def lets_the_caller_change_a_result_that_has_a_view():
    def program(x):
        y = x * 3
        return y, y[1:], y.t()

    return program


@scenario(trained(LEAF, by=changing(lambda r: r[1].mul_(2))), eagerly=True)
def lets_the_caller_change_a_view_of_another_result():
    def program(x):
        y = x * 3
        return y, y[1:], y.t()

    return program


@scenario(trained(INNER, by=changing(lambda r: r[0].mul_(2))), eagerly=True)
def lets_the_caller_change_an_input_through_a_view():
    return lambda x: (x[1:], x * 3)


@scenario(trained(LEAF, by=changing(lambda r: r[0].mul_(2))), eagerly=True)
def raises_what_eager_raises_for_a_change_of_a_view_of_a_leaf():
    return lambda x: (x[1:], x.sin())


@scenario(trained(X, by=changing(lambda r: r[2].mul_(2))), eagerly=True)
def raises_what_eager_raises_for_a_change_of_a_view_of_a_parameter():
    return ReturningWeight(3, 2)


@scenario(trained(LEAF, by=changing(lambda r: r[1].mul_(2))), at_most=1)
def lets_the_caller_change_a_detached_alias():
    def program(x):
        y = x * 3
        return y, y.detach()

    return program


def _change_quietly(result):
    with torch.no_grad():
        result[0].zero_()


@scenario(trained(LEAF, by=changing(_change_quietly)), at_most=1)
def lets_the_caller_change_a_result_unrecorded():
    return lambda x: (x * 3, x.exp())


# Tangents


def _with_tangent(make):
    def way(program):
        def call(x):
            result = program(x)
            result.backward(make(result))
            return result

        return call

    return way


TANGENTS = {
    "expanded": lambda y: torch.ones(()).expand(y.shape),
    "transposed": lambda y: torch.randn(y.shape[::-1]).t(),
    "strided": lambda y: torch.randn(y.shape[0], 2 * y.shape[1])[:, ::2],
    "offset": lambda y: torch.randn(y.shape[0] + 1, y.shape[1])[1:],
}


def _all_tangents(program):
    def call(x):
        found = []
        for make in TANGENTS.values():
            result = program(x)
            result.backward(make(result))
            found.append(result)
        return found

    return call


@scenario(trained(LEAF, by=_all_tangents), at_most=1)
def takes_tangents_of_any_layout():
    return lambda x: x.sin() @ torch.ones(3, 3) + x.t().contiguous().t()


@scenario(trained(LEAF, by=_with_tangent(lambda y: torch.zeros(y.shape))), at_most=1)
def takes_a_tangent_of_zeros():
    return lambda x: x.sin().exp()


def _tangent_kept(program):
    def call(x):
        tangent = torch.randn(4, 3)
        program(x).backward(tangent)
        return tangent

    return call


@scenario(trained(LEAF, by=_tangent_kept), at_most=1)
def leaves_the_tangent_as_it_is():
    return lambda x: (x * 1).view(12).view(4, 3)


@scenario(
    trained(
        given(lambda _: torch.randn(2, 3, 4, 4, requires_grad=True)),
        by=_with_tangent(lambda y: torch.randn(y.shape).to(memory_format=torch.channels_last)),
    ),
    at_most=1,
)
def takes_a_tangent_of_images_in_another_order():
    return nn.Conv2d(3, 5, 3, padding=1)


@scenario(trained(LEAF, by=backward_from(lambda r: r[1])), at_most=1)
def goes_backward_from_one_of_two_results():
    return lambda x: (x.sin(), x.exp())


ZEROS = given(lambda _: torch.tensor([0.0, 1.0, 0.0, 2.0], requires_grad=True))


@scenario(trained(ZEROS, by=backward_from(lambda r: r[0])), eagerly=True)
def keeps_nan_out_of_a_gradient_that_no_tangent_asks_for():
    """A tangent of zeros in place of none gives 0 * inf."""
    return lambda x: (x * 3, 1 / x, x.sqrt())


@scenario(trained(ZEROS, by=backward_from(lambda r: r["loss"])), eagerly=True)
def keeps_nan_out_of_a_shared_part():
    def program(x):
        hidden = x * 2
        return {"loss": hidden.sin(), "extra": hidden.log(), "other": hidden.sqrt()}

    return program


@scenario(trained(ZEROS))
def keeps_nan_where_eager_has_it():
    return lambda x: torch.where(x > 0, x.sqrt(), x)


# Numbers and layouts


@scenario(trained(normal(4, dtype=torch.double, requires_grad=True)), at_most=1)
def serves_double_precision():
    return lambda x: x.sin() * x.exp()


@scenario(trained(normal(4, dtype=torch.bfloat16, requires_grad=True)), at_most=1)
def serves_half_precision():
    return lambda x: (x.sin() * x.exp(), x.float() * 2)


@scenario(trained(normal(4, dtype=torch.cfloat, requires_grad=True)), at_most=1)
def serves_complex_numbers():
    return lambda x: x * (1 + 2j) * x.conj() + x.abs()


@scenario(trained(normal(4, dtype=torch.cfloat, requires_grad=True)), eagerly=True)
def returns_the_parts_of_complex_numbers():
    return lambda x: (x.imag, torch.view_as_real(x) * 2)


@scenario(trained(normal(4, requires_grad=True)), at_most=1)
def goes_to_complex_numbers_and_back():
    return lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 1j), n=4)


@scenario(trained(given(lambda _: torch.randn(4, dtype=torch.cfloat, requires_grad=True).conj())))
def serves_a_conjugate_view():
    return lambda x: (x * 2, x.imag * x.real)


@scenario(trained(given(lambda _: torch.tensor(2.0, requires_grad=True))), at_most=1)
def serves_a_tensor_without_dimensions():
    return lambda x: (x * 2, x.sin() * torch.ones(3))


@scenario(trained(normal(0, 3, requires_grad=True)), at_most=1)
def serves_a_tensor_without_elements():
    return net()


@scenario(trained(given(lambda _: torch.randn(3, 4).t().requires_grad_())), at_most=1)
def gives_a_transposed_input_a_gradient_of_its_layout():
    return lambda x: (x.sin(), x.contiguous() * 2)


@scenario(
    trained(given(lambda _: torch.randn(4, 6)[:, ::2].requires_grad_())),
    trained(given(lambda _: torch.randn(3).expand(4, 3).requires_grad_())),
)
def gives_strided_and_expanded_inputs_a_gradient():
    return lambda x: (x.sin(), x.contiguous() * 2)


@scenario(trained(X), at_most=1)
def gives_a_transposed_parameter_a_gradient_of_its_layout():
    made = nn.Linear(3, 2)
    made.weight = nn.Parameter(torch.randn(3, 2).t())
    return made


@scenario(trained(normal(2, 3, 4, 4)), at_most=1, near=1e-6)
def gives_channels_last_weights_a_gradient_of_their_layout():
    made = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 2, 1))
    return made.to(memory_format=torch.channels_last)


@scenario(trained(given(lambda _: torch.randint(0, 7, (4,)))), eagerly=True)
def gives_an_embedding_a_sparse_gradient():
    return nn.Embedding(7, 3, sparse=True)


@scenario(trained(given(lambda _: torch.randint(0, 7, (4,)))), at_most=1)
def gives_no_gradient_to_the_padding_of_an_embedding():
    return nn.Embedding(7, 3, padding_idx=2, scale_grad_by_freq=True)


# State that a forward pass changes


@scenario(trained(X), change(lambda made: made.eval()), trained(X), at_most=2)
def moves_the_statistics_of_a_batch_norm_once_per_call():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.5), nn.ReLU()).train()


@scenario(trained(X), eagerly=True)
def moves_statistics_without_momentum():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))


@scenario(trained(X), at_most=1)
def draws_the_mask_of_a_dropout():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.steps = nn.Linear(3, 3), 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.steps += 1
        y = self.linear(x)
        self.mean.lerp_(y.detach().mean(0), 0.5)
        self.last = y.detach()
        return y / self.steps + self.mean


@scenario(trained(X), at_most=3)
def counts_and_averages_while_it_trains():
    return Counting()


class Recurrent(nn.Module):
    """Carries what it computed, with its history, from call to call."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.Linear(3, 3), torch.zeros(4, 3)

    def forward(self, x):
        self.hidden = self.cell(x + self.hidden.detach())
        return self.hidden


@scenario(trained(X), eagerly=True)
def stores_a_result_that_needs_a_gradient():
    return Recurrent()


@scenario(trained(X, INNER), eagerly=True)
def changes_an_input_by_what_needs_a_gradient():
    def program(x, y):
        x.add_(y)
        return x.sin()

    return program


@scenario(trained(INNER), eagerly=True)
def changes_an_input_that_needs_a_gradient():
    def program(x):
        x.mul_(2)
        return x.sin()

    return program


@scenario(trained(INNER), eagerly=True)
def changes_a_view_of_an_input_that_needs_a_gradient():
    def program(x):
        x[1:].mul_(2)
        return x.sin(), x[:2]

    return program


@scenario(trained(X, LEAF), at_most=1)
def changes_an_input_that_needs_none():
    def program(x, y):
        z = (x + 1) * y
        x.add_(1)
        return z.sin() * 2

    return program


class Shifting(nn.Module):
    """Changes a buffer after it has used it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x):
        y = (self.shift * 2 + 1) * self.scale
        self.shift.add_(1)
        return (y + x).sin()


@scenario(trained(X), at_most=1)
def changes_a_buffer_that_it_has_used():
    return Shifting()


@scenario(trained(X, LEAF), at_most=1)
def changes_an_input_through_a_view_after_it_has_used_it():
    def program(x, y):
        view = x[:2]
        z = (x + 1) * y
        view.mul_(0)
        return z.sin()

    return program


@scenario(trained(X), at_most=1)
def changes_a_parameter_unrecorded_after_it_has_used_it():
    scale, shift = weight(3), weight(3)

    def program(x):
        y = (shift * 2 + 1) * x * scale
        with torch.no_grad():
            shift.mul_(2)
        return y

    return Program(program, [scale, shift])


@scenario(trained(X, LEAF), eagerly=True)
def raises_what_eager_raises_for_a_change_of_an_input_that_backward_needs():
    def program(x, y):
        z = x * y
        x.add_(1)
        return z

    return program


@scenario(trained(LEAF), eagerly=True)
def raises_what_eager_raises_for_a_change_of_a_leaf():
    return lambda x: x.mul_(2)


@scenario(trained(LEAF), at_most=1)
def changes_a_leaf_unrecorded():
    def program(x):
        with torch.no_grad():
            x.mul_(2)
        return x.sin()

    return program


@scenario(trained(LEAF), at_most=1)
def changes_what_it_computed_in_place():
    def program(x):
        y = x * 2
        y[1:].add_(x[:-1])
        y.t()[0] = x[:, 1]
        return y.relu_() + torch.zeros(4, 3).index_add_(0, torch.tensor([0, 1, 2, 3]), y)

    return program


@scenario(trained(LEAF), eagerly=True)
def raises_what_eager_raises_for_a_change_of_what_backward_needs():
    def program(x):
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z

    return program


@scenario(trained(X), at_most=1)
def renormalizes_weights_while_it_trains():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))


@scenario(trained(X, by=optimized(lambda p: torch.optim.SGD(p, 0.1))), at_most=1)
def reads_parameters_after_each_step_of_an_optimizer():
    return nn.Sequential(net(), nn.BatchNorm1d(2))


@scenario(trained(X, by=optimized(lambda p: torch.optim.AdamW(p, 0.1, foreach=True))), at_most=1)
def reads_parameters_that_are_changed_all_at_once():
    return net()


# Training and inference with one model


@scenario(
    trained(X, times=2),
    change(lambda made: made.eval()),
    calls(X, times=2),
    change(lambda made: made.train()),
    trained(X, times=2),
    change(lambda made: made.eval()),
    calls(X, times=2),
    change(lambda made: made.train()),
    trained(X, times=2),
    at_most=2,
)
def alternates_training_and_evaluation():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))


@scenario(calls(X), trained(X), calls(X, under=torch.inference_mode), trained(X), at_most=3)
def serves_inference_and_training():
    return net()


@scenario(trained(X), calls(X, under=torch.enable_grad), trained(X), at_most=1)
def drops_a_result_without_going_backward():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


# Branches, numbers and sizes


def _branching():
    scale = weight(3)

    def program(x):
        y = x * scale
        if y.sum() > 0:
            return y.sin()
        return y.exp() * 2

    return Program(program, scale)


@scenario(trained(each(torch.ones(4, 3), -torch.ones(4, 3))))
def takes_a_branch_both_ways_while_it_trains():
    return _branching()


@scenario(trained(each(torch.ones(4, 3), -torch.ones(4, 3))), at_most=2)
def takes_a_branch_on_what_backward_needs():
    scale = torch.ones(3, requires_grad=True)

    def program(x):
        y = (x * scale).relu()
        return y.sin() if y.sum() > 2 else y.exp()

    return Program(program, scale)


@scenario(trained(each(torch.ones(3), torch.ones(3) / 2, torch.ones(3) * 9), times=12))
def repeats_until_the_data_says_so():
    scale = weight(3)

    def program(x):
        y = x * scale.abs().clamp(min=0.5)
        while y.detach().norm() < 4:
            y = y * 1.5
        return y

    return Program(program, scale)


@scenario(trained(LEAF), at_most=1)
def scales_by_a_number_of_the_data():
    return lambda x: x.sin() * x.detach().abs().sum().item()


@scenario(trained(LEAF), at_most=1)
def returns_a_number_beside_its_loss():
    def program(x):
        loss = x.sin().sum()
        return loss, loss.item(), loss.detach()

    return program


@scenario(trained(LEAF, constant([True, False, True, True])))
def selects_rows_by_a_mask():
    return lambda x, mask: x[mask].sin()


@scenario(trained(X, each(1.5, 2.5, 3.5, 4.5, 5.5, 6.5)), at_most=2)
def takes_a_number_that_changes():
    scale = weight(3)
    return Program(lambda x, factor: (x * scale).sin() * factor, scale)


@scenario(trained(growing(2, 3, by=(1, 0))), at_most=2)
def trains_on_a_growing_batch():
    return nn.Sequential(net(), nn.BatchNorm1d(2))


@scenario(trained(growing(2, 3, by=(1, 0))), at_most=2)
def draws_masks_for_a_growing_batch():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))


@scenario(trained(given(lambda n: torch.randn(2 + n, 3 + n, 4, requires_grad=True))), at_most=2)
def trains_on_batches_and_lengths_that_grow():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


@scenario(trained(growing(2, 3, by=(1, 0))), at_most=2)
def averages_over_a_growing_batch():
    scale = weight(3)
    return Program(lambda x: (x * scale).sin().sum() / x.shape[0], scale)


@scenario(trained(growing(2, 3, by=(1, 0))), eagerly=True)
def returns_views_of_a_growing_batch():
    scale = weight(3)

    def program(x):
        y = x * scale
        return y[1:], y.t(), y

    return Program(program, scale)


@scenario(trained(LEAF), eagerly=True)
def chooses_by_cond():
    def program(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.exp(), (x,))

    return program


# Layers


@scenario(trained(normal(5, 4, 3, requires_grad=True)), at_most=1)
def trains_a_recurrent_network():
    return nn.LSTM(3, 4, num_layers=2)


@scenario(trained(normal(2, 5, 8, requires_grad=True)), at_most=1)
def trains_attention_with_dropout():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)


@scenario(trained(normal(2, 2, 5, 4, requires_grad=True)), at_most=1)
def trains_causal_attention():
    return lambda x: functional.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True)


@scenario(trained(normal(4, 7, requires_grad=True), given(lambda _: torch.randint(0, 7, (4,)))))
def trains_a_cross_entropy():
    return lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1, ignore_index=3)


# Autocast

LOW = torch.bfloat16


def autocast():
    """Return gradients recorded, in bfloat16 where autocast says so."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autocast("cpu", LOW))
    return stack


def _under_autocast(program):
    def call(x):
        with torch.autocast("cpu", LOW):
            result = program(x)
        loss_of(result).backward()
        return result

    return call


@scenario(trained(X, under=autocast), at_most=1)
def goes_backward_within_autocast():
    return net()


@scenario(trained(X, by=_under_autocast), at_most=1)
def goes_backward_after_autocast():
    return net()


class Casting(nn.Module):
    """Autocast inside, with a part that is kept out of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with torch.autocast("cpu", LOW):
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                y = self.second(y.float())
            return self.first(y), y


@scenario(trained(X), at_most=1, near=5e-2)
def has_autocast_inside():
    return Casting()


@scenario(trained(X, under=autocast), trained(X), trained(X, under=autocast), at_most=2, near=5e-2)
def follows_autocast_around_it():
    return Casting()


def _scaled(program):
    def call(x):
        optimizer = torch.optim.SGD(program.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        with torch.autocast("cpu", LOW):
            result = program(x)
        optimizer.zero_grad()
        scaler.scale(loss_of(result)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(program.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return result, norm, scaler.get_scale()

    return call


@scenario(trained(X, by=_scaled), at_most=1)
def trains_with_scaled_gradients():
    return net()


# Function transforms


def _through_func_grad(program):
    return lambda x: torch.func.grad(lambda y: program(y).sum())(x)


@scenario(trained(X, by=_through_func_grad))
def is_differentiated_by_a_function_transform():
    return lambda x: x.sin() * 2


@scenario(
    trained(X, times=3), trained(X, by=_through_func_grad, times=3), trained(X, times=3), at_most=1
)
def is_differentiated_both_ways():
    scale = weight(3)
    return Program(lambda x: (x * scale).sin(), scale)


@scenario(trained(LEAF), at_most=1)
def differentiates_a_function_inside():
    return lambda x: torch.func.grad(lambda y: (y.sin() * y).sum())(x) * x


@scenario(trained(normal(3, requires_grad=True)), at_most=1)
def has_a_jacobian_inside():
    return lambda x: torch.func.jacrev(lambda y: y.sin() * y.sum())(x) @ x


@scenario(trained(LEAF), at_most=1)
def maps_a_function_over_rows_inside():
    return lambda x: torch.func.vmap(lambda row: row.sin() * row.sum())(x)


@scenario(trained(X), at_most=1)
def calls_a_module_with_other_weights_inside():
    made = nn.Linear(3, 2)
    weights = {"weight": weight(2, 3), "bias": weight(2)}
    called = types.SimpleNamespace(made=made, weights=weights)
    return Program(lambda x: torch.func.functional_call(made, weights, (x,)), called)


def _forward_mode(program):
    def call(x, tangent):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            found = torch.autograd.forward_ad.unpack_dual(program(dual))
            return found.primal, found.tangent

    return call


@scenario(
    trained(X, X, by=lambda program: lambda x, _: program(x)),
    trained(X, X, by=_forward_mode),
    calls(X, X, through=_forward_mode),
    eagerly=True,
)
def is_differentiated_forward():
    return lambda x: x.sin() * 2


@scenario(trained(X, X), eagerly=True)
def differentiates_forward_inside():
    scale = weight(3)
    return Program(lambda x, t: torch.func.jvp(lambda y: (y * scale).sin(), (x,), (t,)), scale)
