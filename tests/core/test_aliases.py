"""Results share memory as eager's do, through a backend whose outputs are always copies."""

from __future__ import annotations

import copy

import pytest
import torch

import torchbay


class Copying:
    """Runs a graph and returns copies, as a foreign runtime would."""

    def __init__(self, graph):
        self.graph = graph

    def run(self, inputs):
        values = list(inputs)
        inputs.clear()
        return [self._copy(value) for value in self.graph(*values)]

    def _copy(self, value):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.copy_(value)


@pytest.fixture
def copying(recording):
    class Backend(type(recording)):
        def compile(self, request):
            self.requests.append(request)
            return Copying(request.graph)

    return Backend()


def two_parts(x):
    y = x + 1
    return y[:2], y[1:3]


def through_a_view(x):
    y = (x + 1).t()
    return y, y[0], (x + 1).sum()


def changed_and_viewed(x):
    x[0].add_(1)
    return x[0], x.t()


def viewed_then_changed(x):
    y = x * 2
    z = y.t()
    y.add_(1)
    return y, z


CALLS = {
    "a view of an input": lambda x: (x.t(), x + 1),
    "a slice of an input": lambda x: x[1:, ::2],
    "an expanded input": lambda x: x[0].expand(3, -1),
    "a view of a result": lambda x: ((y := x + 1), y.t()),
    "a view before its base": lambda x: ((y := x + 1).t(), y),
    "two parts of one tensor": two_parts,
    "views of a view": through_a_view,
    "a view of a changed input": changed_and_viewed,
    "a changed tensor and its view": viewed_then_changed,
    "real parts": lambda x: torch.view_as_real(torch.complex(x, x)),
    "nothing shared": lambda x: (x.t() + 0, x.clone()),
}


@pytest.mark.parametrize("name", CALLS)
def test_shares_memory_as_eager_does(name, copying):
    call = CALLS[name]
    compiled = torchbay.compile(call, backend=copying, fullgraph=True)
    for offset in range(3):
        mine = torch.arange(13.0)[offset % 2 :][:12].view(4, 3)
        theirs = copy.deepcopy(mine)
        found, expected = compiled(mine), call(theirs)
        found = found if isinstance(found, tuple) else (found,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for first, second in zip(found, expected, strict=True):
            assert first.stride() == second.stride()
            if not (0 in first.stride() and first.numel()):
                first.mul_(2)
                second.mul_(2)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_hands_no_pure_view_to_a_backend(copying):
    compiled = torchbay.compile(lambda x: (x.t(), x[0]), backend=copying, fullgraph=True)
    x = torch.ones(2, 3)
    compiled(x)
    first, second = compiled(x)
    first.add_(1)
    assert torch.equal(second, torch.full((3,), 2.0))
    assert copying.requests == []


def test_makes_a_view_from_an_input_that_lies_elsewhere_next_time(copying):
    compiled = torchbay.compile(lambda x: x[1], backend=copying, fullgraph=True)
    whole = torch.arange(20.0).view(5, 4)
    compiled(torch.zeros(2, 4))
    assert torch.equal(compiled(whole[:2]), whole[1])
    assert torch.equal(compiled(whole[2:4]), whole[3])
