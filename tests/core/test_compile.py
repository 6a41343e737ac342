"""`torchbay.compile` takes every kind of callable, and what it returns behaves as that does."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import traceback

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors


def double(x):
    """Return twice as much."""
    return x * 2


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def scaled(self, x):
        return x * self.factor


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


@pytest.mark.parametrize(
    "function",
    [
        double,
        lambda x: x + 1,
        torch.relu,
        torch.nn.functional.gelu,
        functools.partial(torch.mul, other=3),
        functools.partial(double),
        Scaler(3.0),
        Scaler(3.0).scaled,
        nn.Linear(3, 2),
        nn.Linear(3, 2).forward,
        torch.no_grad()(double),
        torch.inference_mode()(double),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
    ],
    ids=lambda f: getattr(f, "__qualname__", type(f).__name__),
)
def test_serves(function, recording):
    x = torch.randn(4, 3)
    expected = function(x)
    compiled = torchbay.compile(function, backend=recording)
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}
    assert len(recording.requests) == 1


def test_decorates(recording):
    @torchbay.compile
    def bare(x):
        return x + 1

    @torchbay.compile(backend=recording)
    def with_settings(x):
        return x + 1

    x = torch.ones(2)
    with_settings(x)
    assert torch.equal(with_settings(x), x + 1)
    assert callable(bare)
    assert served(with_settings) == {"graph": 1, "eager": 1}


def test_decorates_a_method_of_a_class(recording):
    class Layer:
        def __init__(self, factor):
            self.factor = factor

        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x * self.factor

    layer = Layer(2.0)
    layer.apply(torch.ones(2))
    assert torch.equal(layer.apply(torch.ones(2)), torch.full((2,), 2.0))
    layer.factor = 5.0
    assert torch.equal(layer.apply(torch.ones(2)), torch.full((2,), 5.0))


def test_gives_each_instance_a_budget_of_its_own(recording):
    """https://github.com/pytorch/pytorch/pull/171598"""

    class Layer(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        @torchbay.compile(backend=recording)
        def forward(self, x):
            return x * self.factor

    layers = [Layer(factor) for factor in range(12)]
    for layer in layers:
        layer(torch.ones(2))
    for factor, layer in enumerate(layers):
        assert torch.equal(layer(torch.ones(2)), torch.full((2,), float(factor)))
        assert served(layer.forward) == {"graph": 1, "eager": 1}


def test_serves_instances_that_are_equal_or_cannot_be_hashed(recording):
    class Equal:
        def __init__(self, factor):
            self.factor = factor

        def __eq__(self, other):
            return True

        __hash__ = None

        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x * self.factor

    first, second = Equal(2.0), Equal(3.0)
    for _ in range(2):
        assert torch.equal(first.apply(torch.ones(1)), torch.tensor([2.0]))
        assert torch.equal(second.apply(torch.ones(1)), torch.tensor([3.0]))
    assert served(first.apply) == {"graph": 1, "eager": 1}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_is_right_on_instances_without_weak_references(recording):
    class Slotted:
        __slots__ = ("factor",)

        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x * self.factor

    slotted = Slotted()
    for factor in (2.0, 2.0, 3.0):
        slotted.factor = factor
        assert slotted.apply(torch.ones(1)).item() == factor


def test_is_a_plain_function_on_the_class(recording):
    class Layer:
        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x + 1

    assert torch.equal(Layer.apply(Layer(), torch.ones(1)), torch.tensor([2.0]))


def test_decorates_beside_staticmethod_and_classmethod(recording):
    class Layer:
        factor = 3

        @staticmethod
        @torchbay.compile(backend=recording)
        def static(x):
            return x + 1

        @classmethod
        @torchbay.compile(backend=recording)
        def of_class(cls, x):
            return x * cls.factor

    for _ in range(2):
        assert Layer().static(torch.ones(1)).item() == 2
        assert Layer.static(torch.ones(1)).item() == 2
        assert Layer.of_class(torch.ones(1)).item() == 3
        assert Layer().of_class(torch.ones(1)).item() == 3


def test_binds_only_what_the_original_would(recording):
    class Layer:
        builtin = torchbay.compile(torch.relu, backend=recording)
        partial = torchbay.compile(functools.partial(torch.mul, other=2), backend=recording)
        scaler = torchbay.compile(Scaler(3.0), backend=recording)

        @torchbay.compile(backend=recording)
        @staticmethod
        def static(x):
            return x + 1

    layer, x = Layer(), torch.ones(1)
    for _ in range(2):
        assert layer.builtin(x).item() == 1
        assert layer.partial(x).item() == 2
        assert layer.scaler(x).item() == 3
        assert layer.static(x).item() == 2


def test_looks_like_the_original(recording):
    compiled = torchbay.compile(double, backend=recording)
    assert compiled.__name__ == "double"
    assert compiled.__qualname__ == "double"
    assert compiled.__doc__ == "Return twice as much."
    assert compiled.__module__ == double.__module__
    assert compiled.__wrapped__ is double
    assert compiled.original is double
    assert inspect.signature(compiled) == inspect.signature(double)


def test_reads_attributes_of_a_callable_object_live(recording):
    scaler = Scaler(2.0)
    compiled = torchbay.compile(scaler, backend=recording)
    scaler.factor = 5.0
    assert compiled.factor == 5.0


def test_compiles_a_compiled_function_afresh(recording, declining):
    first = torchbay.compile(double, backend=declining)
    second = torchbay.compile(first, backend=recording)
    assert second.original is double
    second(torch.ones(1))
    assert declining.requests == []


def test_returns_the_argument_itself_when_disabled(monkeypatch):
    assert torchbay.compile(double, disable=True) is double
    assert torchbay.compile(disable=True)(double) is double
    monkeypatch.setenv("TORCHBAY_OFF", "1")
    assert torchbay.compile(double) is double
    assert torchbay.compile(backend="eager")(double) is double


def test_raises_what_eager_raises_for_the_wrong_arity(recording):
    def add(x, y):
        return x + y

    compiled = torchbay.compile(add, backend=recording)
    compiled(torch.ones(1), torch.ones(1))
    for arguments, keywords in (((torch.ones(1),), {}), ((torch.ones(1),) * 3, {}), ((), {"z": 1})):
        with pytest.raises(TypeError) as expected:
            add(*arguments, **keywords)
        with pytest.raises(TypeError, match="add") as caught:
            compiled(*arguments, **keywords)
        assert str(caught.value) == str(expected.value)


def test_passes_on_exceptions_with_their_traceback(recording):
    class Peculiar(Exception):
        pass

    error = Peculiar("at once")

    def fails(x):
        y = x + 1
        if y.sum() > 5:
            raise error
        return y

    compiled = torchbay.compile(fails, backend=recording)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    with pytest.raises(Peculiar) as caught:
        compiled(torch.ones(2) * 9)
    assert caught.value is error
    assert "raise error" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_raises_what_operators_raise_on_a_hit(recording):
    compiled = torchbay.compile(lambda x, i: x[i], backend=recording)
    x = torch.ones(3)
    compiled(x, torch.tensor([0]))
    compiled(x, torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([7]))


def test_copies(recording):
    compiled = torchbay.compile(double, backend=recording)
    for other in (copy.copy(compiled), copy.deepcopy(compiled)):
        assert torch.equal(other(torch.ones(1)), torch.tensor([2.0]))
        assert served(compiled) == {"graph": 0, "eager": 0}


@torchbay.compile(backend="eager")
def pickled_by_name(x):
    return x + 1


def test_pickles():
    assert pickle.loads(pickle.dumps(pickled_by_name)) is pickled_by_name
    compiled = torchbay.compile(double, backend="eager")
    loaded = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(loaded(torch.ones(1)), torch.tensor([2.0]))


def test_takes_a_plain_function_as_a_backend():
    seen = []

    def backend(graph, example_inputs):
        seen.append(len(example_inputs))
        return graph

    compiled = torchbay.compile(lambda x, y: x + y, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [2]


def test_hands_the_backend_no_graph_without_compute(recording):
    compiled = torchbay.compile(lambda x, k: (x, k, None, 1.5, "s", 2), backend=recording)
    x = torch.ones(1)
    for _ in range(3):
        result = compiled(x, 7)
        assert result[0] is x
        assert result[1:] == (7, None, 1.5, "s", 2)
    assert recording.requests == []
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_promises_backends_what_the_contract_says(recording):
    layer = nn.Linear(3, 3)

    def call(x, y):
        torch.rand(2)
        x.add_(1)
        return layer(x), y

    torchbay.compile(call, backend=recording, name="mine")(torch.ones(1, 3), torch.ones(1))
    (request,) = recording.requests
    request.graph.graph.lint()
    placeholders = request.graph.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(request.example_inputs) == 3
    assert request.state_count == 2
    assert request.mutated == frozenset()
    assert request.device == torch.device("cpu")
    assert (request.side, request.name) == ("inference", "mine")
    calls = request.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert __file__ in calls[0].meta["stack_trace"] or "linear.py" in calls[0].meta["stack_trace"]
    assert all("val" in n.meta for n in request.graph.graph.nodes if n.op == "call_function")
    assert any("rand" in str(node.target) for node in request.graph.graph.nodes)


def test_runs_the_fallback_the_caller_named(recording, declining):
    compiled = torchbay.compile(double, backend=declining, fallback=recording)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(1)), torch.tensor([2.0]))
    assert len(declining.requests) == len(recording.requests) == 1
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_runs_eagerly_with_a_warning_when_the_backend_declines(declining):
    compiled = torchbay.compile(double, backend=declining)
    with pytest.warns(errors.TorchbayWarning, match="no kernel for anything"):
        compiled(torch.ones(1))
    assert torch.equal(compiled(torch.ones(1)), torch.tensor([2.0]))
    assert len(declining.requests) == 1
    assert served(compiled) == {"graph": 0, "eager": 2}


def test_never_turns_a_crash_of_a_backend_into_a_fallback(crashing, recording):
    compiled = torchbay.compile(double, backend=crashing, fallback=recording)
    with pytest.raises(errors.BackendFailed, match="ZeroDivisionError.*codegen bug") as caught:
        compiled(torch.ones(1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.account
    assert caught.value.remedy
    assert recording.requests == []


def test_resets_every_compiled_object(recording):
    compiled = torchbay.compile(double, backend=recording)
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    torchbay.reset()
    assert not torchbay.explain(compiled).specializations
    compiled(torch.ones(1))
    assert len(recording.requests) == 2


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky])
def test_serves_operators_that_check_their_own_results(function, recording):
    compiled = torchbay.compile(function, backend=recording)
    matrix = torch.eye(3) + 0.1
    for _ in range(3):
        assert torch.equal(compiled(matrix), function(matrix))
    assert served(compiled) == {"graph": 2, "eager": 1}
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(3, 3))
