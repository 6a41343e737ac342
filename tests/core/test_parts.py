"""Graphs cut for partial backends, composites kept whole, and a backend's own guard."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors
from torchbay.plugin import Capabilities, UnsupportedGraph

aten = torch.ops.aten


@pytest.fixture
def make_partial(recording):
    """Make a partial backend that leaves out these operators."""

    def make(*left_out, **claims):
        class Partial(type(recording)):
            def supports(self, node):
                assert node.op == "call_function"
                return node.target not in left_out

        return Partial(name="partial", capabilities=Capabilities(**claims))

    return make


def operators(request):
    return [node.target for node in request.graph.graph.nodes if node.op == "call_function"]


def parts(compiled):
    (report,) = torchbay.explain(compiled).specializations
    return report.parts


def test_gets_the_whole_graph_when_it_supports_everything(make_partial):
    backend = make_partial()
    compiled = torchbay.compile(lambda x: x.sin().cos(), backend=backend)
    x = torch.randn(3)
    compiled(x)
    assert torch.equal(compiled(x), x.sin().cos())
    assert len(backend.requests) == 1
    assert parts(compiled) == (("partial", ()),)


def test_gets_what_it_supports_and_the_fallback_gets_the_rest(make_partial):
    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(lambda x: x.sin().relu().cos(), backend=backend)
    x = torch.randn(3)
    compiled(x)
    assert torch.equal(compiled(x), x.sin().relu().cos())
    assert parts(compiled) == (
        ("partial", ("aten.sin.default",)),
        ("eager", ("aten.relu.default",)),
        ("partial", ("aten.cos.default",)),
    )


def test_is_cut_into_as_few_regions_as_the_graph_allows(make_partial):
    def call(x):
        first, left = x.sin(), x.relu()
        second, right = x.cos(), x.exp().relu()
        return first + second, left + right

    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(call, backend=backend)
    x = torch.randn(3)
    compiled(x)
    torch.testing.assert_close(compiled(x), call(x), rtol=0, atol=0)
    assert [name for name, _ in parts(compiled)] == ["partial", "eager", "partial"]


def test_shows_the_parts_in_the_explanation(make_partial):
    compiled = torchbay.compile(lambda x: x.sin().relu(), backend=make_partial(aten.relu.default))
    compiled(torch.randn(3))
    assert "part for eager: aten.relu.default" in str(torchbay.explain(compiled))


def test_gets_state_first_in_every_region(make_partial):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).requires_grad_(False)
    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(module, backend=backend)
    x = torch.randn(2, 3)
    compiled(x)
    assert torch.equal(compiled(x), module(x))
    assert [request.state_count for request in backend.requests] == [2, 2]


def test_keeps_random_numbers_in_order_between_regions(make_partial):
    def call(x):
        first = torch.rand_like(x).sin()
        second = torch.rand_like(x).cos()
        return first.relu(), second

    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(call, backend=backend)
    x = torch.ones(4)
    for seed in range(3):
        torch.manual_seed(seed)
        found = (*compiled(x), torch.rand(1))
        torch.manual_seed(seed)
        expected = (*call(x), torch.rand(1))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    drawn = [op for request in backend.requests for op in operators(request) if "rand" in str(op)]
    assert drawn == []


def test_gets_attention_that_draws_nothing(make_partial):
    def call(x):
        return nn.functional.scaled_dot_product_attention(x, x, x).relu()

    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(call, backend=backend)
    x = torch.randn(1, 2, 3, 4)
    compiled(x)
    assert torch.equal(compiled(x), call(x))
    assert [name for name, _ in parts(compiled)] == ["partial", "eager"]


def test_keeps_writes_where_regions_are_cut(make_partial):
    module = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)).requires_grad_(False)
    expected = copy.deepcopy(module)
    backend = make_partial(aten.relu.default, mutation=True)
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(compiled(x), expected(x))
    for name, buffer in expected.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_refuses_the_rest_where_there_is_no_fallback(make_partial):
    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(lambda x: x.relu(), backend=backend, fallback=None)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    (route,) = torchbay.explain(compiled).eager
    assert "does not support aten.relu.default" in route.reason


def test_gives_the_rest_to_the_fallback_that_was_named(make_partial, recording):
    backend = make_partial(aten.relu.default)
    compiled = torchbay.compile(lambda x: x.sin().relu(), backend=backend, fallback=recording)
    compiled(torch.ones(2))
    assert [operators(request) for request in recording.requests] == [[aten.relu.default]]


def test_lets_go_of_values_between_regions(make_partial):

    kept = []

    def watch(inputs):
        kept.extend(weakref.ref(value) for value in inputs)

    backend = make_partial(aten.relu.default)
    compile_plainly = backend.compile

    def compiling(request):
        executable = compile_plainly(request)
        run = executable.run

        class Watching:
            def run(self, inputs):
                watch(inputs)
                return run(inputs)

        return Watching()

    backend.compile = compiling
    compiled = torchbay.compile(lambda x: x.sin().relu().cos(), backend=backend)
    compiled(torch.randn(3))
    compiled(torch.randn(3))
    gc.collect()
    assert kept
    assert [reference() for reference in kept] == [None] * len(kept)


@pytest.mark.parametrize(
    ("composite", "call", "shape"),
    [
        (aten.layer_norm.default, lambda x: nn.functional.layer_norm(x, (4,)), (2, 4)),
        (aten.group_norm.default, lambda x: nn.functional.group_norm(x, 2), (2, 4, 3)),
        (
            aten.scaled_dot_product_attention.default,
            lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
            (1, 2, 3, 4),
        ),
        (
            aten.scaled_dot_product_attention.default,
            lambda x: nn.functional.scaled_dot_product_attention(
                x, x, x, attn_mask=torch.zeros(3, 3), scale=0.3
            ),
            (1, 2, 3, 4),
        ),
    ],
    ids=["layer norm", "group norm", "causal attention", "masked attention"],
)
def test_gets_a_composite_whole_if_it_asks(composite, call, shape, recording):
    recording.capabilities = Capabilities(keep=frozenset({composite}))
    compiled = torchbay.compile(call, backend=recording)
    x = torch.randn(shape)
    compiled(x)
    torch.testing.assert_close(compiled(x), call(x), rtol=0, atol=0)
    assert composite in operators(recording.requests[0])


def test_gets_a_kernel_whose_statistics_are_used_as_it_is(recording):
    recording.capabilities = Capabilities(keep=frozenset({aten.layer_norm.default}))
    compiled = torchbay.compile(
        lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5), backend=recording
    )
    compiled(torch.randn(2, 4))
    assert aten.native_layer_norm.default in operators(recording.requests[0])


def test_tries_others_and_compiles_again_when_an_executable_refuses(recording, guarded):
    class Guarding(type(recording)):
        def compile(self, request):
            self.requests.append(request)
            is_first = len(self.requests) == 1
            return guarded(request.graph) if is_first else super().compile(request)

    backend = Guarding()
    compiled = torchbay.compile(lambda x: x * 2, backend=backend)
    for value in (1.0, 1.0, -1.0, -1.0, 1.0):
        assert torch.equal(compiled(torch.full((2,), value)), torch.full((2,), value * 2))
    explanation = torchbay.explain(compiled)
    assert explanation.calls == {"graph": 3, "eager": 2}
    assert "refuses the inputs: an input is not positive" in explanation.recompiles[0][0]


def test_is_not_asked_for_what_it_does_not_claim(recording):
    recording.capabilities = Capabilities(dtypes=frozenset({torch.float32}))
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    with pytest.warns(errors.TorchbayWarning, match=r"torch.float64.*that take it: .*eager"):
        result = compiled(torch.ones(2, dtype=torch.float64))
    assert torch.equal(result, torch.full((2,), 2.0, dtype=torch.float64))
    assert recording.requests == []
    assert torchbay.explain(compiled).calls == {"graph": 0, "eager": 1}


def test_gives_way_to_the_fallback_for_what_it_does_not_claim(recording):
    recording.capabilities = Capabilities(dtypes=frozenset({torch.float32}))
    compiled = torchbay.compile(lambda x: x + 1, backend=recording, fallback="eager")
    for _ in range(2):
        compiled(torch.ones(2, dtype=torch.float64))
    assert parts(compiled) == (("eager", ()),)


def test_is_told_of_compiling_under_the_callers_name(recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording, name="increment")
    compiled(torch.ones(2))
    assert recording.requests[0].name == "increment"


def test_may_decline_after_all(make_partial):
    backend = make_partial()

    def decline(request):
        raise UnsupportedGraph("not today")

    backend.compile = decline
    compiled = torchbay.compile(lambda x: x + 1, backend=backend)
    with pytest.warns(errors.TorchbayWarning, match="not today"):
        compiled(torch.ones(2))


def test_is_kept_as_long_as_it_may_be_called(recording):
    class Mortal:
        def __init__(self, graph):
            self.graph = graph
            reference = weakref.ref(self)
            self.run = lambda inputs: reference().graph(*inputs)

    class Making(type(recording)):
        def compile(self, request):
            return Mortal(request.graph)

    compiled = torchbay.compile(lambda x: x + 1, backend=Making())
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
