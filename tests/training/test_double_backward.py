"""A gradient of a gradient is right, or refused by name: a term of it is never left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad, gradcheck

import torchbay
from torchbay.errors import TorchbayError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def right_or_refused(found, expected):
    """Assert that the one is what the other is, or raises an error of torchbay's."""
    wanted = expected()
    try:
        got = found()
    except TorchbayError as refusal:
        assert "gradient" in str(refusal) or "backward" in str(refusal)  # noqa: PT017
        return
    torch.testing.assert_close(got, wanted)


def penalty(program, module):
    """Return the gradients of a score and a penalty on its slope, as for a critic."""
    x = X.clone().requires_grad_()
    module.zero_grad()
    score = program(x).sum()
    (slope,) = grad(score, x, create_graph=True)
    (score + (slope.norm(dim=1) - 1).square().sum()).backward()
    return [parameter.grad for parameter in module.parameters()], x.grad


def test_never_leaves_a_gradient_penalty_out(net, served):
    compiled = served(net, X.clone().requires_grad_())
    right_or_refused(lambda: penalty(compiled, net), lambda: penalty(net, net))


def test_never_leaves_a_gradient_penalty_out_of_a_first_call(net):
    compiled = torchbay.compile(net, backend="eager")
    right_or_refused(lambda: penalty(compiled, net), lambda: penalty(net, net))


def second(program, power):
    x = X.clone().requires_grad_()
    (first,) = grad(program(x).sum(), x, create_graph=True)
    (twice,) = grad(first.pow(power).sum(), x)
    return first, twice


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: x.sin() * x, id="sine"),
        pytest.param(lambda x: x.pow(3), id="cube"),
        pytest.param(lambda x: (x.exp() * x.sum()).tanh(), id="mixed"),
    ],
)
def test_gives_a_second_derivative_or_an_error(program, power, served):
    compiled = served(program, X.clone().requires_grad_())
    right_or_refused(lambda: second(compiled, power), lambda: second(program, power))


def outer(program):
    """Use the compiled call as a part of a greater graph."""
    x = X.clone().requires_grad_()
    result = program(x.sin()).exp()
    (first,) = grad(result.sum(), x, create_graph=True)
    (result.sum() + first.square().sum()).backward()
    return x.grad


def test_never_leaves_a_term_out_around_the_call(served):
    def program(x):
        return x.sin() * x

    compiled = served(program, X.clone().requires_grad_())
    right_or_refused(lambda: outer(compiled), lambda: outer(program))


def with_tangent(program):
    """Differentiate by the tangent, which the first derivative depends on."""
    x = X.clone().requires_grad_()
    tangent = torch.ones(4, 3, requires_grad=True)
    (first,) = grad(program(x), x, tangent, create_graph=True)
    (by_tangent,) = grad(first.sum(), tangent)
    return first, by_tangent


def test_never_leaves_out_a_derivative_by_the_tangent(served):
    def program(x):
        return x.sin() * x

    compiled = served(program, X.clone().requires_grad_())
    right_or_refused(lambda: with_tangent(compiled), lambda: with_tangent(program))


def test_serves_a_first_derivative_whose_graph_nobody_uses(net, served, counted):
    x = X.clone().requires_grad_()
    compiled = served(net, x)
    (expected,) = grad(net(x).sum(), x)
    with counted(compiled):
        (found,) = grad(compiled(x).sum(), x, create_graph=True)
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_sets_gradients_where_backward_keeps_the_graph(net, served, gradients):
    compiled = served(net, X)
    compiled(X).sum().backward(create_graph=True)
    expected = gradients(net, lambda module: module(X).sum())
    assert all(map(torch.equal, [p.grad.detach() for p in net.parameters()], expected))
    net.zero_grad()


def test_gives_a_hessian_or_an_error(served):
    def program(x):
        return (x.sin() * x.sum()).sum()

    compiled = served(program, X.clone().requires_grad_())

    def hessian(function):
        return torch.autograd.functional.hessian(function, X)

    right_or_refused(lambda: hessian(compiled), lambda: hessian(program))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: x.sin() * x, id="one result"),
        pytest.param(lambda x: (x.sin(), x.sum() * x.exp()), id="two results"),
        pytest.param(lambda x: x[1:].t().contiguous().cumsum(0), id="views"),
    ],
)
def test_passes_the_check_of_gradients(program):
    """Which asks for gradients with tangents of zeros and with none, too."""
    x = X.double().requires_grad_()
    compiled = torchbay.compile(program, backend="eager")
    assert gradcheck(compiled, (x,))
    assert torchbay.explain(compiled).calls["graph"] > 10


def test_passes_the_check_of_gradients_of_a_layer():
    layer = nn.LSTM(3, 4).double()
    compiled = torchbay.compile(layer, backend="eager")
    x = torch.randn(2, 2, 3, dtype=torch.double, requires_grad=True)
    assert gradcheck(lambda x: compiled(x)[0], (x,))
