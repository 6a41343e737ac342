"""After a call nothing keeps its inputs, outputs, intermediates or frames alive."""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
import weakref

import pytest
import torch
from torch import nn

import torchbay


class Watched:
    """Remembers objects weakly."""

    def __init__(self):
        self._references = []

    def __call__(self, name, thing):
        self._references.append((name, weakref.ref(thing)))
        return thing

    def alive(self):
        return sorted(name for name, reference in self._references if reference() is not None)


class Token:
    pass


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_lets_go_of_inputs_and_outputs(calls, recording):
    watched, module = Watched(), nn.Linear(3, 3)
    compiled = torchbay.compile(lambda x, box: (module(x) + box["y"], [x + 1]), backend=recording)
    for _ in range(calls):
        x, box = watched("x", torch.ones(2, 3)), {"y": watched("y", torch.ones(3))}
        first, (second,) = compiled(x, box)
        watched("first", first)
        watched("second", second)
        del x, box, first, second
    gc.collect()
    assert watched.alive() == []


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_lets_go_of_frames_and_intermediates(recording):
    watched = Watched()

    def call(x):
        token = watched("frame", Token())
        y = watched("intermediate", x + 1)
        return y * 2, token is None

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        compiled(torch.ones(2, 3))
        gc.collect()
        assert watched.alive() == []


def test_needs_no_garbage_collector_for_a_hit(recording, without_collector):
    watched = Watched()
    compiled = torchbay.compile(lambda x: (x + 1, [x * 2]), backend=recording)
    compiled(torch.ones(3))
    x = watched("x", torch.ones(3))
    first, (second,) = compiled(x)
    watched("first", first)
    watched("second", second)
    del x, first, second
    assert watched.alive() == []


def test_lets_go_after_an_exception(recording):
    watched = Watched()

    def fails(x):
        raise KeyError

    compiled = torchbay.compile(fails, backend=recording)
    x = watched("x", torch.ones(3))
    with pytest.raises(KeyError):
        compiled(x)
    del x
    gc.collect()
    assert watched.alive() == []


@pytest.mark.parametrize("backend", ["crashing", "declining"])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_lets_go_when_the_backend_fails(backend, request):
    watched = Watched()
    compiled = torchbay.compile(lambda x: x + 1, backend=request.getfixturevalue(backend))
    x = watched("x", torch.ones(3))
    with contextlib.suppress(torchbay.errors.BackendFailed):
        watched("result", compiled(x))
    del x
    gc.collect()
    assert watched.alive() == []


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_lets_go_of_calls_that_run_eagerly(recording):
    watched = Watched()
    compiled = torchbay.compile(lambda x: torch.from_numpy(x.numpy() + 1), backend=recording)
    for _ in range(2):
        x = watched("x", torch.ones(3))
        watched("result", compiled(x))
        del x
    gc.collect()
    assert watched.alive() == []


def test_lets_go_of_calls_past_a_limit(recording):
    watched = Watched()
    compiled = torchbay.compile(lambda x, k: x + k, backend=recording, recompile_limit=1)
    compiled(torch.ones(3), 1)
    with pytest.warns(torchbay.errors.TorchbayWarning):
        x = watched("x", torch.ones(3))
        watched("result", compiled(x, 2))
    del x
    gc.collect()
    assert watched.alive() == []


def test_lets_go_of_tensors_that_a_branch_read(recording):
    watched = Watched()
    compiled = torchbay.compile(lambda x: x * 2 if x.sum() > 0 else x * 3, backend=recording)
    for sign in (1, -1, 1):
        x = watched("x", torch.ones(3) * sign)
        watched("result", compiled(x))
        del x
    gc.collect()
    assert watched.alive() == []


@pytest.mark.parametrize("back", ["none", "list", "attribute", "child"])
def test_lets_go_of_a_module_that_was_an_argument(back, recording):
    watched = Watched()
    compiled = torchbay.compile(lambda m, x: m(x), backend=recording)
    module = watched("module", nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    watched("weight", module[0].weight)
    if back == "list":
        module.itself = [module]
    elif back == "attribute":
        object.__setattr__(module, "itself", module)
    elif back == "child":
        module[1].parents = (module,)
    for _ in range(2):
        compiled(module, torch.ones(3))
    del module
    gc.collect()
    assert watched.alive() == []
    assert not torchbay.explain(compiled).specializations


@pytest.mark.parametrize("back", [False, True])
def test_lets_go_of_an_object_with_a_compiled_method(back, recording):
    class Layer:
        def __init__(self):
            self.weight = torch.ones(3)

        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x * self.weight

    watched, layer = Watched(), Layer()
    watched("layer", layer)
    watched("weight", layer.weight)
    if back:
        layer.itself = {"me": layer}
    for _ in range(2):
        layer.apply(torch.ones(3))
    del layer
    gc.collect()
    assert watched.alive() == []


def test_lets_go_of_a_module_with_a_compiled_forward(recording):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.linear.owner = [self]

        @torchbay.compile(backend=recording)
        def forward(self, x):
            return self.linear(x)

    watched, layer = Watched(), Layer()
    watched("layer", layer)
    watched("weight", layer.linear.weight)
    for _ in range(2):
        layer(torch.ones(3))
    del layer
    gc.collect()
    assert watched.alive() == []


def test_frees_the_model_with_the_compiled_object(recording):
    """https://github.com/pytorch/pytorch/issues/155778"""
    watched = Watched()
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    watched("module", module)
    watched("weight", module[0].weight)
    watched("buffer", module[1].running_mean)
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(3):
        compiled(torch.ones(2, 3))
    watched("compiled", compiled)
    recording.requests.clear()
    del module, compiled
    gc.collect()
    assert watched.alive() == []


def test_frees_a_function_and_its_closure(recording):
    watched, weight = Watched(), torch.ones(3)
    watched("weight", weight)

    def make(w):
        return torchbay.compile(lambda x: x * w, backend=recording)

    compiled = make(weight)
    compiled(torch.ones(3))
    compiled(torch.ones(3))
    recording.requests.clear()
    del compiled, weight
    gc.collect()
    assert watched.alive() == []


def test_frees_a_parameter_that_was_replaced(recording):
    watched, module = Watched(), nn.Linear(3, 3)
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(2):
        compiled(torch.ones(3))
    watched("old", module.weight)
    module.weight = nn.Parameter(torch.ones(3, 3))
    compiled(torch.ones(3))
    gc.collect()
    assert watched.alive() == []


def test_frees_specializations_on_reset(recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    compiled(torch.ones(3))
    graph = weakref.ref(recording.requests.pop().graph)
    torchbay.reset()
    gc.collect()
    assert graph() is None


def test_grows_by_nothing_from_hit_to_hit(recording):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torchbay.compile(module, backend=recording)
    x = torch.ones(3)
    for _ in range(50):
        compiled(x)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(500):
        compiled(x)
    gc.collect()
    assert sys.getallocatedblocks() - before < 100


def call_with_a_class_of_its_own(backend):
    class Scale:
        factor = 2.0

    compiled = torchbay.compile(lambda x: x * Scale.factor, backend=backend)
    for _ in range(3):
        compiled(torch.ones(2))
    return weakref.ref(Scale)


def test_lets_go_of_classes(recording):
    reference = call_with_a_class_of_its_own(recording)
    gc.collect()
    assert reference() is None


def test_lets_go_of_emitted_source(recording):
    def lines():
        return sum(name.startswith("<torchbay") for name in linecache.cache)

    before = lines()
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    compiled(torch.ones(2))
    assert lines() > before
    del compiled
    gc.collect()
    assert lines() <= before
