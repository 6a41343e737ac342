"""What is the inductor_triton plugin's alone: outputs that CUDA graphs would get wrong."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from torchbay.errors import UnsupportedGraph
from torchbay_eager._boxed import boxed_function
from torchbay_inductor_triton._pool import leaving_pool
from torchbay_inductor_triton._views import making_views, split_views


def test_makes_views_of_the_live_input(make_request):
    def function(x):
        return x.t(), x + 1, x[1:], x.unbind(0)[2], functional.relu(x).t()

    graph, views = split_views(make_request(function, [torch.zeros(3, 2)]).graph)
    assert sorted(views) == [0, 2, 3]
    x = torch.arange(8.0)[2:].view(3, 2)
    given = [x]
    outputs = making_views(boxed_function(graph), views)(given)
    assert given == []
    for actual, expected in zip(outputs, function(x), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
    x.fill_(7)
    assert [bool((output == 7).all()) for output in outputs] == [True, False, True, True, False]


def test_declines_views_as_another_type(make_request):
    request = make_request(lambda x: (x.view(torch.int32),), [torch.zeros(3)])
    with pytest.raises(UnsupportedGraph, match="another type"):
        split_views(request.graph)


def test_copies_outputs_and_keeps_what_they_share(make_request):
    def function(x):
        y = x * 2
        return y, y.t(), y[1], x + 1, (x.sum() + 1).expand(3), (x - 1).t()

    x = torch.arange(6.0).view(3, 2)
    graph = make_request(function, [x]).graph
    pool = list(boxed_function(graph)([x]))
    outputs = leaving_pool(lambda _: pool, graph)([x])
    for tensor in pool:
        tensor.fill_(0)
    for actual, expected in zip(outputs, function(x), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
    outputs[0].fill_(9)
    assert [bool((output == 9).all()) for output in outputs] == [True] * 3 + [False] * 3
