"""Compiled parts train inside each other, beside each other and under other transforms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchbay

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def compiled(program):
    return torchbay.compile(program, backend="eager", fullgraph=True)


def trained(module, program, plainly=lambda twin: twin):
    """Train a module through a program of it, and a copy plainly; assert that they stay equal."""
    twin = copy.deepcopy(module)
    for _ in range(4):
        for one, run in ((module, program), (twin, plainly(twin))):
            one.zero_grad()
            run(X).square().sum().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
        found, expected = ([p.grad for p in one.parameters()] for one in (module, twin))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_trains_compiled_parts_of_a_model(net):
    parts = [compiled(part) for part in net]

    def program(x):
        for part in parts:
            x = part(x)
        return x

    trained(net, program)
    assert [torchbay.explain(part).calls["graph"] for part in parts] == [3, 3, 3]


def test_trains_a_model_one_part_of_which_was_replaced_by_the_compiled(net):
    whole = nn.Sequential(net[0], net[1], compiled(net[2]))
    trained(net, whole)


def test_trains_a_compiled_part_called_twice(net):
    layer = nn.Linear(3, 3)
    part = compiled(layer)
    twin = copy.deepcopy(layer)
    for _ in range(3):
        part(part(X)).sum().backward()
        twin(twin(X)).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert torchbay.explain(part).calls == {"graph": 4, "eager": 2}


def test_trains_one_compiled_within_another(net):
    inner = compiled(net)
    outer = compiled(lambda x: inner(x) * 1)
    trained(net, outer)
    assert torchbay.explain(outer).calls["graph"] == 3


@pytest.mark.filterwarnings("ignore")
def test_trains_under_torch_compile(net):
    inner = compiled(net)
    trained(net, torch.compile(inner, backend="aot_eager"))


def test_trains_a_copy_of_a_module_that_was_compiled_and_trained(net):
    trained(net, compiled(net))
    other = copy.deepcopy(net)
    trained(other, compiled(other))


def test_keeps_two_compiled_objects_of_one_module_apart(net):
    one, other = compiled(net), compiled(lambda x: net(x) * 2)
    trained(net, lambda x: one(x) + other(x), lambda twin: lambda x: twin(x) + twin(x) * 2)
    assert torchbay.explain(one).calls["graph"] == torchbay.explain(other).calls["graph"] == 3
