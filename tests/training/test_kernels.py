"""Gradients of served calls where PyTorch's own parts do not agree with each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchbay


def both(program, *inputs, wanted):
    """Return the gradients of the third call from a graph and of plain PyTorch."""
    compiled = torchbay.compile(program, backend="eager")
    for _ in range(3):
        found = wanted(compiled(*inputs))
    assert torchbay.explain(compiled).calls["graph"] >= 1, torchbay.explain(compiled).eager
    return found, wanted(program(*inputs))


def test_gives_none_where_a_kernel_gives_none_for_want_of_a_tangent():
    x = torch.randn(3, 3, requires_grad=True)

    def wanted(result):
        return torch.autograd.grad(result[0] * 2, x, allow_unused=True)[0]

    assert both(torch.linalg.slogdet, x, wanted=wanted) == (None, None)


def test_gives_zeros_where_a_kernel_does_not_look_at_the_tangent():
    x = torch.randn(3, requires_grad=True)

    def wanted(result):
        return torch.autograd.grad(result.sum(), x)[0]

    found, expected = both(torch.angle, x, wanted=wanted)
    assert torch.equal(found, expected)


def test_lets_separate_results_be_differentiated_one_after_the_other():
    x = torch.randn(3, requires_grad=True)

    def wanted(results):
        return [torch.autograd.grad(result.sum(), x)[0] for result in results]

    found, expected = both(lambda x: (x.sin(), x.exp()), x, wanted=wanted)
    assert all(map(torch.equal, found, expected))


def test_lets_go_of_what_results_have_in_common():
    x = torch.randn(3, requires_grad=True)
    compiled = torchbay.compile(lambda x: (x.exp().sin(), x.exp().exp()), backend="eager")
    common = torchbay.compile(lambda x: [h := x.exp(), h.sin(), h.cos()][1:], backend="eager")
    for call, is_common in ((compiled, False), (common, True)):
        for _ in range(2):
            first, second = call(x)
        first.sum().backward()
        if is_common:
            with pytest.raises(RuntimeError, match="second time"):
                second.sum().backward()
        else:
            second.sum().backward()


@pytest.mark.parametrize(
    ("norm", "sizes"),
    [(nn.LayerNorm(8), (4, 8)), (nn.BatchNorm1d(8), (4, 8)), (nn.GroupNorm(2, 8), (4, 8, 3))],
)
def test_serves_norms_whose_weights_are_more_precise_than_their_input(norm, sizes):
    x = torch.randn(sizes).bfloat16().requires_grad_()
    norm.requires_grad_()

    def wanted(result):
        return torch.autograd.grad(result.float().square().sum(), [x, *norm.parameters()])

    found, expected = both(norm, x, wanted=wanted)
    assert all(map(torch.equal, found, expected))


def test_sees_lazy_conjugations_in_the_call_that_is_observed():
    x = torch.randn(2, 3, dtype=torch.complex64)
    compiled = torchbay.compile(torch.linalg.pinv, backend="eager")
    assert torch.equal(compiled(x), torch.linalg.pinv(x))
