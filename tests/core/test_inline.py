"""A compiled callable inside somebody else's trace or transform runs inline, as the original does."""

from __future__ import annotations

import contextlib
import cProfile
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import torchbay


@pytest.fixture
def compiled(recording):
    return torchbay.compile(lambda x: x.sin() * 2, backend=recording)


def expected(x):
    return x.sin() * 2


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


@pytest.fixture(params=["fresh", "warm"])
def state(request, compiled):
    if request.param == "warm":
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    return served(compiled)


def test_runs_inline_under_make_fx(compiled, state):
    graph = make_fx(lambda x: compiled(x) + 1)(torch.ones(2))
    names = [str(node.target) for node in graph.graph.nodes]
    assert "aten.sin.default" in names
    assert torch.equal(graph(torch.zeros(2)), torch.ones(2))
    assert served(compiled) == state


def test_runs_inline_under_fake_tensors(compiled, state):
    with FakeTensorMode() as mode:
        found = compiled(mode.from_tensor(torch.ones(2)))
    assert type(found).__name__ == "FakeTensor"
    assert served(compiled) == state


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.vmap(f)(x),
        lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.functionalize(f)(x),
    ],
    ids=["vmap", "grad", "jvp", "jacrev", "functionalize"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_runs_inline_under_transforms(transform, compiled, state):
    x = torch.randn(2)
    torch.testing.assert_close(transform(compiled, x), transform(expected, x))
    assert served(compiled) == state


def test_runs_inline_under_export(recording, state):
    module = nn.Sequential(torchbay.compile(nn.Linear(2, 2), backend=recording), nn.ReLU())
    exported = torch.export.export(module, (torch.ones(2),), strict=False)
    assert torch.equal(exported.module()(torch.ones(2)), module(torch.ones(2)))


def test_runs_inline_under_torch_compile(compiled, state):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    outer = torch.compile(lambda x: compiled(x) + 1, backend=backend, fullgraph=True)
    x = torch.randn(2)
    assert torch.equal(outer(x), expected(x) + 1)
    assert any("sin" in str(node.target) for node in graphs[0].graph.nodes)
    assert served(compiled) == state


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_is_right_around_torch_compile(recording):
    inner = torch.compile(expected, backend="eager")
    compiled = torchbay.compile(lambda x: inner(x) + 1, backend=recording)
    for _ in range(3):
        x = torch.randn(2)
        assert torch.equal(compiled(x), expected(x) + 1)


def test_runs_inline_under_a_mode_of_the_users(compiled, state):
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(2)
    with Log():
        assert torch.equal(compiled(x), expected(x))
    assert "aten.sin.default" in seen
    assert served(compiled) == state


def test_runs_inline_in_another_compiled_callable(compiled, recording):
    outer = torchbay.compile(lambda x: compiled(x) + 1, backend=recording)
    for _ in range(3):
        x = torch.randn(2)
        assert torch.equal(outer(x), expected(x) + 1)
    assert served(outer) == {"graph": 2, "eager": 1}
    assert served(compiled) == {"graph": 0, "eager": 0}


def test_serves_a_recursive_callable(recording):
    @torchbay.compile(backend=recording)
    def power(x, n):
        return x if n == 0 else x * power(x, n - 1)

    for _ in range(2):
        assert power(torch.full((1,), 2.0), 3).item() == 16
    assert served(power) == {"graph": 1, "eager": 1}


def test_runs_inline_under_torch_jit_trace(compiled):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(compiled, torch.ones(2), check_trace=False)
    x = torch.randn(2)
    assert torch.equal(traced(x), expected(x))


def test_leaves_no_mode_or_flag_behind(compiled):
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert not torch.compiler.is_compiling()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert sys.getprofile() is None


def test_leaves_nothing_behind_after_a_failure(recording):
    def fails(x):
        if torch.compiler.is_compiling():
            raise RuntimeError("in between")
        return x

    with pytest.raises(RuntimeError, match="in between"):
        torchbay.compile(fails, backend=recording)(torch.ones(2))
    test_leaves_no_mode_or_flag_behind(torchbay.compile(torch.neg, backend=recording))


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_leaves_torch_compile_working_after_a_failed_trace(recording):
    runs = []

    def second_run_fails(x):
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError("only once")
        return x + 1

    compiled = torchbay.compile(second_run_fails, backend=recording)
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            compiled(torch.ones(1))
    assert torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1)).item() == 3
    test_leaves_no_mode_or_flag_behind(torchbay.compile(torch.neg, backend=recording))


def test_keeps_a_profiler_of_the_users(compiled):
    events = []

    def profiler(frame, event, argument):
        events.append(event)

    sys.setprofile(profiler)
    try:
        compiled(torch.ones(2))
        assert sys.getprofile() is profiler
        compiled(torch.ones(2))
    finally:
        sys.setprofile(None)
    assert events


def test_runs_under_cprofile(compiled):
    profile = cProfile.Profile()
    profile.enable()
    try:
        for _ in range(3):
            compiled(torch.ones(2))
        sorted([3, 1, 2], key=lambda value: -value)
    finally:
        profile.disable()


def test_runs_under_the_profiler_of_torch(compiled):
    with torch.profiler.profile() as profile:
        for _ in range(2):
            compiled(torch.ones(2))
    assert any(event.name == "aten::sin" for event in profile.events())


def test_serves_under_a_default_device(recording):
    compiled = torchbay.compile(lambda x: x + torch.ones(2), backend=recording)
    with torch.device("cpu"):
        for _ in range(3):
            compiled(torch.ones(2))
    assert served(compiled) == {"graph": 2, "eager": 1}
