"""What is changed between the forward and the backward pass raises as in eager, or changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad

CHANGED = "modified by an inplace operation"


def test_raises_when_a_weight_was_changed(net, served):
    compiled = served(net, torch.randn(4, 3))
    loss = compiled(torch.randn(4, 3)).sum()
    with torch.no_grad():
        net[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    assert [parameter.grad for parameter in net.parameters()] == [None] * 4


def test_raises_when_an_optimizer_stepped_too_early(net, served):
    compiled = served(net, torch.randn(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    first, second = compiled(torch.randn(4, 3)).sum(), compiled(torch.randn(4, 3)).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=CHANGED):
        second.backward()


def test_raises_when_the_input_was_changed(served):
    weight = torch.randn(3, requires_grad=True)
    compiled = served(lambda x: (x * weight).sin(), torch.randn(4, 3))
    x = torch.randn(4, 3)
    loss = compiled(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_raises_when_a_buffer_was_changed(net, served):
    module = torch.nn.Sequential(net, torch.nn.BatchNorm1d(2)).eval()
    compiled = served(module, torch.randn(4, 3))
    loss = compiled(torch.randn(4, 3)).sum()
    module[1].running_var.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


PROGRAMS = {
    "the result": (lambda x, w: (x * w).exp(), lambda x, w, result: result),
    "a view of the result": (lambda x, w: (x * w).exp(), lambda x, w, result: result[1:]),
    "an input that eager saves nothing of": (lambda x, w: (x + 1) * w, lambda x, w, result: x),
    "an input that is only added": (lambda x, w: (x + w).sin(), lambda x, w, result: x),
    "an input that is only compared": (lambda x, w: w * (x > 0), lambda x, w, result: x),
}


def gradient(program, w, x, changed):
    """Return the gradient after a change that autograd records, or the error of it."""
    result = program(x, w)
    with torch.no_grad():
        changed(x, w, result).add_(1)
    try:
        return grad(result.sum(), w)[0]
    except RuntimeError as error:
        assert CHANGED in str(error)  # noqa: PT017
        return None


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_never_wrong_after_a_change_of(name, served):
    program, changed = PROGRAMS[name]
    x, w = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    (unchanged,) = grad(program(x, w).sum(), w)
    found = gradient(served(program, x, w), w, x.clone(), changed)
    assert found is None or torch.equal(found, unchanged)


def test_takes_another_input_where_only_a_comparison_was_made_of_the_first(served):
    """What min-cut keeps may be the input itself, which then must stay; here it keeps the mask."""
    program, changed = PROGRAMS["an input that is only compared"]
    x, w = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    compiled = served(program, x, w)
    assert gradient(compiled, w, x.clone(), changed) is not None


def test_uses_the_values_of_the_forward_pass_when_weights_were_replaced(net, served, gradients):
    x = torch.randn(4, 3)
    compiled = served(net, x)
    expected = gradients(net, lambda module: module(x).sum())
    loss = compiled(x).sum()
    old = list(net.parameters())
    net[2].weight = torch.nn.Parameter(torch.zeros(2, 8))
    loss.backward()
    assert all(map(torch.equal, [parameter.grad for parameter in old], expected))
    assert net[2].weight.grad is None
