"""Forward and backward passes may happen in any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch.autograd import grad

import torchbay


def inputs(count, rows=4):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(rows, 3, generator=generator) for _ in range(count)]
    return [x.requires_grad_() for x in made]


def test_goes_backward_in_another_thread(any_net, served, gradients):
    x = torch.randn(4, 3)
    compiled = served(any_net.eval(), x)
    expected = gradients(any_net, lambda module: module(x).sum())
    loss = compiled(x).sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    assert all(map(torch.equal, [p.grad for p in any_net.parameters()], expected))


def test_goes_backward_in_a_thread_whose_call_came_from_another(net, served, gradients):
    x = torch.randn(4, 3)
    compiled = served(net, x)
    expected = gradients(net, lambda module: module(x).sum())
    with ThreadPoolExecutor(1) as pool:
        loss = pool.submit(lambda: compiled(x).sum()).result()
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], expected))


def test_goes_backward_where_nothing_is_recorded(net, served, gradients):
    x = torch.randn(4, 3)
    compiled = served(net, x)
    expected = gradients(net, lambda module: module(x).sum())
    loss = compiled(x).sum()

    def go_backward():
        with torch.no_grad():
            loss.backward()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(go_backward).result()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], expected))


@pytest.mark.parametrize("is_warm", [True, False], ids=["served", "first calls"])
def test_serves_eight_threads(net, served, is_warm):
    def program(x):
        return net(x).sin()

    xs = inputs(8)
    expected = [grad(program(x).sum(), x)[0] for x in xs]
    compiled = served(program, xs[0]) if is_warm else torchbay.compile(program, backend="eager")
    start = Barrier(8)

    def work(x):
        start.wait()
        return [grad(compiled(x).sum(), x)[0] for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, xs))
    for mine, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(one, wanted) for one in mine)
    assert torchbay.explain(compiled).calls["graph"] >= 70


def test_accumulates_what_two_threads_give_to_one_parameter(net, served):
    compiled = served(net, inputs(1)[0])
    xs = inputs(16)
    parts = [grad(net(x).sum(), list(net.parameters())) for x in xs]
    expected = [torch.stack(of_one).sum(0) for of_one in zip(*parts, strict=True)]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda x: compiled(x).sum().backward(), xs))
    found = [parameter.grad for parameter in net.parameters()]
    # the order of additions is the threads' own
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_keeps_training_and_inference_apart_in_two_threads(net, served):
    x = inputs(1)[0]
    compiled = served(net, x)
    with torch.no_grad():
        expected = net(x)
    (slope,) = grad(net(x).sum(), x)
    start = Barrier(2)

    def infer():
        start.wait()
        with torch.no_grad():
            return [compiled(x) for _ in range(20)]

    def train():
        start.wait()
        return [grad(compiled(x).sum(), x)[0] for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(infer), pool.submit(train)
    assert all(torch.equal(y, expected) and not y.requires_grad for y in one.result())
    assert all(torch.equal(y, slope) for y in other.result())
