"""Saved tensors live as long as in eager, whether or not the garbage collector runs."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional

import torchbay

pytestmark = pytest.mark.usefixtures("uncollected")


def memory(tensor):
    return weakref.ref(tensor.untyped_storage())


def grads(module):
    return [parameter.grad for parameter in module.parameters()]


@pytest.fixture
def watched(any_net, training, served):
    """Return a module, the same compiled, and the backend that watches its memory."""
    compiled = served(any_net, torch.randn(4, 3), backend=training)
    training.seen.clear()
    return any_net, compiled, training


def test_keeps_what_backward_needs_until_then(watched):
    module, compiled, backend = watched
    result = compiled(torch.randn(4, 3))
    assert backend.alive(module, result) > 0


def test_frees_everything_with_the_backward_pass(watched):
    module, compiled, backend = watched
    result = compiled(torch.randn(4, 3))
    result.sum().backward()
    assert backend.alive(module, result) == 0


def test_frees_everything_when_a_result_is_dropped(watched):
    module, compiled, backend = watched
    result = compiled(torch.randn(4, 3))
    del result
    assert backend.alive(module) == 0


def test_frees_everything_when_a_loss_is_dropped(watched):
    module, compiled, backend = watched
    loss = compiled(torch.randn(4, 3)).sum()
    del loss
    assert backend.alive(module) == 0


def test_keeps_what_backward_needs_where_the_graph_is_retained(watched):
    module, compiled, backend = watched
    loss = compiled(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    assert backend.alive(module, loss) > 0
    loss.backward()
    assert backend.alive(module, loss) == 0


def test_frees_everything_when_a_retained_graph_is_dropped(watched):
    module, compiled, backend = watched
    loss = compiled(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    del loss
    assert backend.alive(module) == 0


def test_frees_the_input_and_the_tangent(watched):
    _, compiled, _ = watched
    x, tangent = torch.randn(4, 3), torch.randn(4, 2)
    seen = [memory(x), memory(tangent)]
    compiled(x).backward(tangent)
    del x, tangent
    assert [ref() for ref in seen] == [None, None]


def test_frees_an_input_that_got_a_gradient(net, training, served):
    compiled = served(net, torch.randn(4, 3, requires_grad=True), backend=training)
    x = torch.randn(4, 3, requires_grad=True)
    compiled(x).sum().backward()
    seen = [memory(x), memory(x.grad)]
    del x
    assert [ref() for ref in seen] == [None, None]


def test_frees_the_gradients_that_are_cleared(watched):
    module, compiled, backend = watched
    compiled(torch.randn(4, 3)).sum().backward()
    module.zero_grad()
    assert backend.alive(module) == 0


def test_keeps_no_result_that_only_a_detached_one_is_held_of(watched):
    module, compiled, backend = watched
    kept = compiled(torch.randn(4, 3)).detach()
    assert backend.alive(module, kept) == 0


def test_frees_everything_when_backward_raises(watched):
    module, compiled, backend = watched
    result = compiled(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="shape"):
        result.backward(torch.ones(7))
    del result
    assert backend.alive(module) == 0


def test_holds_as_much_after_ten_steps_as_after_one(watched):
    module, compiled, backend = watched
    for _ in range(10):
        module.zero_grad()
        compiled(torch.randn(4, 3)).sum().backward()
        assert backend.alive(module) == 0


def test_keeps_nothing_of_the_call_it_observed(net, training):
    compiled = torchbay.compile(net, backend=training)
    x = torch.randn(4, 3)
    result = compiled(x)
    seen = [memory(x), memory(result)]
    result.sum().backward()
    del x, result
    assert [ref() for ref in seen] == [None, None]


def test_saves_no_more_elements_than_eager(net, training, served):
    x = torch.randn(4, 3)
    compiled = served(net, x, backend=training)
    training.seen.clear()
    result = compiled(x)
    state = {p.untyped_storage()._cdata for p in [*net.parameters(), x, result]}
    stored = {s._cdata: s.nbytes() for ref in training.seen if (s := ref()) is not None}
    saved = sum(size for key, size in stored.items() if key not in state)
    hidden = 4 * 8 * 4
    assert saved <= hidden


def step_of(net):
    def step(x, t):
        net.zero_grad()
        loss = functional.mse_loss(net(x), t)
        loss.backward()
        return loss.detach()

    return step


def test_frees_everything_but_the_gradients_after_a_step(any_net, training):
    compiled = torchbay.compile(step_of(any_net), backend=training)
    for _ in range(6):
        training.seen.clear()
        x, t = torch.randn(4, 3), torch.randn(4, 2)
        seen = [memory(x), memory(t)]
        compiled(x, t)
        del x, t
        assert training.alive(any_net) == 0
        assert [ref() for ref in seen] == [None, None]
    assert torchbay.explain(compiled).calls["graph"] >= 3


def test_goes_backward_after_the_compiled_object_is_gone(net, served, gradients):
    x = torch.randn(4, 3)
    compiled = served(net, x)
    loss = compiled(x).sum()
    del compiled
    loss.backward()
    expected = gradients(net, lambda module: module(x).sum())
    assert all(map(torch.equal, grads(net), expected))


def test_goes_backward_after_everything_was_forgotten(net, served, gradients):
    x = torch.randn(4, 3)
    compiled = served(net, x)
    loss = compiled(x).sum()
    torchbay.reset()
    loss.backward()
    expected = gradients(net, lambda module: module(x).sum())
    assert all(map(torch.equal, grads(net), expected))


def test_frees_the_model_with_the_compiled_object(net, served):
    compiled = served(net, torch.randn(4, 3))
    seen = memory(net[0].weight)
    compiled(torch.randn(4, 3)).sum().backward()
    torchbay.reset()
    del compiled
    # The fixture holds the module itself; what it held before is nobody else's.
    net[0].weight = torch.nn.Parameter(torch.ones(8, 3))
    assert seen() is None
