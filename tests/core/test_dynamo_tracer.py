"""tracer="dynamo": Dynamo captures, guards and dispatches; torchbay lowers and builds."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors
from torchbay.plugin import Capabilities


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def static(recording):
    """Claims no symbolic sizes."""
    recording.capabilities = Capabilities(eager_random=True)
    return recording


def dynamo(function, backend, **settings):
    return torchbay.compile(function, backend=backend, tracer="dynamo", **settings)


def sine(x):
    return torch.sin(x) + 1


def broken(x):
    y = torch.sin(x)
    print("between")
    return torch.cos(y)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def served(compiled):
    return torchbay.explain(compiled).calls


# Serving


def test_serves_every_call_from_the_backends_graph(recording):
    compiled = dynamo(sine, recording)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(compiled(x), sine(x))
    assert served(compiled) == {"graph": 3, "eager": 0}
    [request] = recording.requests
    targets = [n.target for n in request.graph.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten.sin.default, torch.ops.aten.add.Tensor]
    assert request.name == "sine"


@pytest.mark.parametrize("backend", ["eager", "recording"])
def test_serves_by_name_and_by_object(backend, request):
    chosen = request.getfixturevalue("recording") if backend == "recording" else backend
    compiled = dynamo(sine, chosen)
    assert torch.equal(compiled(torch.ones(2)), sine(torch.ones(2)))
    [report] = torchbay.explain(compiled).specializations
    assert report.backend == backend


def test_serves_a_plain_function_as_a_backend():
    seen = []

    def plain(graph, example_inputs):
        seen.append(graph)
        return graph.forward

    compiled = dynamo(sine, plain)
    assert torch.equal(compiled(torch.ones(2)), sine(torch.ones(2)))
    assert len(seen) == 1


def test_hands_over_state_first_and_keeps_the_users_lines(recording):
    module = small().eval()
    compiled = dynamo(lambda x: module(x) * 2, recording)
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), module(x) * 2)
    [request] = recording.requests
    assert request.state_count == 8
    assert request.example_inputs[-1].shape == (3, 4)
    nodes = [n for n in request.graph.graph.nodes if n.op == "call_function"]
    assert all(n.meta["val"] is not None and n.stack_trace for n in nodes)


def test_reads_parameters_on_every_call(recording):
    module = nn.Linear(3, 3)
    compiled = dynamo(module, recording)
    x = torch.randn(2, 3)
    compiled(x)
    module.weight.mul_(2)
    assert torch.equal(compiled(x), module(x))
    module.bias = nn.Parameter(torch.ones(3))
    assert torch.equal(compiled(x), module(x))
    assert len(recording.requests) == 1


def test_compiles_anew_when_what_dynamo_guards_has_changed(recording):
    compiled = dynamo(lambda x, k: x * k, recording)
    for k in (2, 3, 2):
        assert torch.equal(compiled(torch.ones(2), k), torch.ones(2) * k)
    explanation = torchbay.explain(compiled)
    assert len(explanation.specializations) == 2
    [[reason]] = explanation.recompiles
    assert "k" in reason


# Sizes


def test_gives_static_graphs_to_a_backend_without_symbolic_sizes(static):
    compiled = dynamo(sine, static)
    for size in (2, 3, 4, 2):
        x = torch.randn(size, 3)
        assert torch.equal(compiled(x), sine(x))
    assert len(static.requests) == 3
    assert all(isinstance(r.example_inputs[0].shape[0], int) for r in static.requests)
    assert served(compiled) == {"graph": 4, "eager": 0}


def rows(x, weight):
    flat = (x @ weight).flatten()
    return flat[: x.shape[0]], x.t(), x.shape[0] * 2


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1), (False, 4)])
def test_gives_symbolic_graphs_to_a_backend_that_claims_them(recording, dynamic, graphs):
    compiled = dynamo(rows, recording, dynamic=dynamic)
    weight = torch.randn(3, 3)
    for size in (2, 3, 5, 7):
        x = torch.randn(size, 3)
        result, expected = compiled(x, weight), rows(x, weight)
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])
        assert result[1].data_ptr() == x.data_ptr()
        assert result[2] == expected[2]
    assert len(recording.requests) == graphs
    assert served(compiled) == {"graph": 4, "eager": 0}


def test_leaves_whole_numbers_open_that_are_no_size(recording):
    def cut(x, count):
        return x.flatten()[:count] * count, count + 1

    compiled = dynamo(cut, recording)
    for count in (2, 3, 5, 3, 2):
        x = torch.randn(count, 4)
        (result, more), expected = compiled(x, count), cut(x, count)
        assert torch.equal(result, expected[0])
        assert more == expected[1]
    assert len(recording.requests) == 2
    assert served(compiled) == {"graph": 5, "eager": 0}


def times_sum(x, index):
    total = x.sum().item()
    return x * total, total + 1


def plus_index(x, index):
    return x + index.item(), index.item() * 2


def positive(x, index):
    return x[x > 0].sum(), x.nonzero()


@pytest.mark.parametrize("function", [times_sum, plus_index, positive])
def test_keeps_what_data_decides_in_a_graph_where_dynamo_does(recording, function):
    compiled = dynamo(function, recording, dynamic=True)
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(config):
        for size in (2, 3, 5):
            x, index = torch.randn(size), torch.tensor(size)
            for ours, theirs in zip(compiled(x, index), function(x, index), strict=True):
                assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
                assert type(ours) is type(theirs)
    assert len(recording.requests) == 1
    assert served(compiled) == {"graph": 3, "eager": 0}


def test_makes_views_anew_whose_size_is_read_from_data(recording):
    def head(x, index):
        doubled, length = x * 2, index.item()
        torch._check(length >= 0)
        torch._check(length < 9)
        return doubled[:length], doubled

    compiled = dynamo(head, recording)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for length in (4, 0, 8):
            part, whole = compiled(torch.ones(9), torch.tensor(length))
            part.zero_()
            assert part.shape == (length,)
            assert whole.tolist() == [0] * length + [2] * (9 - length)
        with pytest.raises(RuntimeError):
            compiled(torch.ones(9), torch.tensor(9))
    assert served(compiled) == {"graph": 3, "eager": 0}


def test_is_eager_where_the_size_of_a_view_is_not_read_from_data(recording):
    def head(x, index):
        doubled = x * 2
        return doubled[: index.item()], doubled

    compiled = dynamo(head, recording)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.warns(errors.TorchbayWarning, match="a view of size"),
    ):
        part, whole = compiled(torch.ones(9), torch.tensor(-5))
    part.zero_()
    assert whole.tolist() == [0] * 4 + [2] * 5


def test_guards_floats_by_value(recording):
    compiled = dynamo(scaled, recording)
    for factor in (0.5, 1.5, 2.5, 0.5):
        assert torch.equal(compiled(torch.ones(2), factor), torch.full((2,), factor))
    assert served(compiled) == {"graph": 4, "eager": 0}


def test_writes_inputs_of_symbolic_sizes(recording):
    def step(total, x):
        total.add_(x.sum(0))
        return total[1:]

    compiled = dynamo(step, recording, dynamic=True)
    for size in (2, 3, 5):
        x, total = torch.randn(size, size + 1), torch.zeros(size + 1)
        expected = torch.zeros(size + 1)
        assert torch.equal(compiled(total, x), step(expected, x))
        assert torch.equal(total, expected)
    assert len(recording.requests) == 1


def test_refuses_dynamic_for_a_backend_without_symbolic_sizes(static):
    with pytest.raises(errors.InvalidArgument, match="'recording' takes fixed sizes only"):
        dynamo(sine, static, dynamic=True)(torch.ones(2))
    assert static.requests == []


# Memory


@pytest.mark.parametrize("backend", ["recording", "writing"])
def test_writes_inputs_and_buffers(backend, request):
    chosen = request.getfixturevalue(backend)
    module, reference = small(), small()
    compiled = dynamo(module, chosen)
    for _ in range(3):
        x = torch.randn(5, 4)
        assert torch.equal(compiled(x), reference(x))
    for ours, theirs in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert served(compiled)["graph"] == 3


def test_returns_the_very_input_that_was_changed(recording):
    compiled = dynamo(lambda x: x.add_(1), recording)
    x = torch.zeros(2)
    assert compiled(x) is x
    assert torch.equal(x, torch.ones(2))


def test_keeps_results_that_share_memory_together(recording):
    def views(x):
        y = x * 2
        return y, y[1:], x[0]

    compiled = dynamo(views, recording)
    for _ in range(2):
        x = torch.randn(4, 2)
        whole, tail, row = compiled(x)
        whole.zero_()
        assert torch.equal(tail, torch.zeros(3, 2))
        row.fill_(7)
        assert torch.equal(x[0], torch.full((2,), 7.0))


def test_is_right_when_a_changed_input_overlaps_another_later(recording):
    def shift(x, y):
        x.mul_(2)
        return x + y

    compiled = dynamo(shift, recording)
    compiled(torch.ones(3), torch.ones(3))
    memory, expected = torch.arange(4.0), torch.arange(4.0)
    with pytest.warns(errors.TorchbayWarning, match="shares memory with another"):
        result = compiled(memory[1:], memory[:-1])
    assert torch.equal(result, shift(expected[1:], expected[:-1]))
    assert torch.equal(memory, expected)
    assert served(compiled) == {"graph": 1, "eager": 1}


def test_is_right_when_the_form_of_an_input_changes(recording):
    def transpose(x):
        x.t_()
        return x * 2

    compiled = dynamo(transpose, recording)
    for _ in range(2):
        x = torch.randn(2, 3)
        expected = x.clone()
        assert torch.equal(compiled(x), transpose(expected))
        assert x.shape == (3, 2)


def test_is_eager_when_an_input_gets_other_memory(recording):
    def replace(x, y):
        x.data = y * 2
        return x + 1

    compiled = dynamo(replace, recording)
    x = torch.ones(2)
    with pytest.warns(errors.TorchbayWarning, match="the memory of an input") as caught:
        assert torch.equal(compiled(x, torch.ones(2)), torch.full((2,), 3.0))
    assert f"{__file__}:{replace.__code__.co_firstlineno + 1}" in str(caught[0].message)
    assert torch.equal(x, torch.full((2,), 2.0))


def test_draws_the_numbers_eager_draws(recording):
    def noisy(x):
        torch.rand(3)
        return nn.functional.dropout(x, 0.5) + torch.randn(4)

    compiled = dynamo(noisy, recording)
    x = torch.ones(4)
    for seed in range(3):
        torch.manual_seed(seed)
        ours, left = compiled(x), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(ours, noisy(x))
        assert torch.equal(left, torch.get_rng_state())


def stream(function, calls=4):
    np.random.seed(0)  # noqa: NPY002
    return [function(torch.ones(2)) for _ in range(calls)]


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize(
    "noisy",
    [
        lambda x: x * torch.from_numpy(np.random.rand(2)),  # noqa: NPY002
        lambda x: x * torch.tensor(np.random.rand(2)),  # noqa: NPY002
        lambda x: x * np.random.rand(),  # noqa: NPY002
        lambda x: x[torch.from_numpy(np.random.permutation(2))],  # noqa: NPY002
        lambda x: x + 1 if np.random.rand() > 0.5 else x,  # noqa: NPY002
    ],
)
def test_draws_from_numpys_own_stream(recording, noisy):
    assert all(map(torch.equal, stream(dynamo(noisy, recording)), stream(noisy)))


def test_refuses_by_name_what_tracing_warns_of_where_warnings_are_errors(recording):
    def noisy(x):
        return x * torch.tensor(np.random.rand(2))  # noqa: NPY002

    compiled = dynamo(noisy, recording)
    with pytest.raises(errors.NotServed, match="UserWarning.*Let warnings pass") as caught:
        compiled(torch.ones(2))
    assert f"{__file__}:{noisy.__code__.co_firstlineno + 1}" in str(caught.value)


def times_own():
    own = random.Random(3)
    return lambda x, own=own: x * own.random()


def own_before_a_break():
    own = random.Random(3)

    def draw(x):
        factor = own.uniform(1, 2)
        print("between")
        return x * factor

    return draw


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = random.Random(3)

    def forward(self, x):
        return (x + 1) * self.own.randint(0, 9)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
@pytest.mark.parametrize("make", [times_own, own_before_a_break, Drawing])
def test_draws_from_random_objects_of_the_programs_own(recording, make):
    compiled = dynamo(make(), recording)
    assert all(map(torch.equal, stream(compiled, 12), stream(make(), 12)))


def test_refuses_random_objects_where_the_whole_call_must_be_a_graph(recording):
    with pytest.raises(errors.NotServed, match="`random` of class `Random`") as caught:
        dynamo(times_own(), recording, fullgraph=True)(torch.ones(2))
    assert torch.equal(caught.value.result, times_own()(torch.ones(2)))


def test_leaves_random_objects_under_torch_compile_alone(recording):
    dynamo(sine, recording)(torch.ones(2))
    compiled = torch.compile(times_own(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), times_own()(torch.ones(2)))


# Gradients


@pytest.mark.filterwarnings("ignore:small")
def test_gives_the_gradients_eager_gives(recording):
    module = small()
    reference = copy.deepcopy(module)
    compiled = dynamo(module, recording, name="small")
    with torch.enable_grad():
        for _ in range(2):
            x = torch.randn(5, 4, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            compiled(x).square().sum().backward()
            reference(y).square().sum().backward()
            assert torch.equal(x.grad, y.grad)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert served(compiled) == {"graph": 0, "eager": 2}
    assert recording.requests == []


def test_says_that_training_is_not_served_from_a_graph(recording):
    compiled = dynamo(small(), recording)
    with torch.enable_grad(), pytest.warns(errors.TorchbayWarning, match="needs gradients"):
        compiled(torch.randn(5, 4)).sum().backward()
    [report] = torchbay.explain(compiled).eager
    assert "training is not served from a graph yet" in report.reason
    assert report.calls == 1


def test_gives_gradients_through_an_input_that_is_changed(recording):
    def write(buffer, weight):
        buffer.copy_(weight * 3)

    compiled = dynamo(write, recording)
    with torch.enable_grad():
        buffer, weight = torch.zeros(2), torch.ones(2, requires_grad=True)
        with pytest.warns(errors.TorchbayWarning, match="gradients"):
            compiled(buffer, weight)
        buffer.sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 3.0))


def test_gives_gradients_made_by_a_block_inside(recording):
    def inside(x, weight):
        with torch.enable_grad():
            return x * weight

    compiled = dynamo(inside, recording)
    weight = torch.ones(2, requires_grad=True)
    with pytest.warns(errors.TorchbayWarning, match="gradients"):
        result = compiled(torch.full((2,), 5.0), weight)
    with torch.enable_grad():
        result.sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 5.0))


def test_serves_both_modes_of_one_module(recording):
    module = nn.Linear(2, 2)
    compiled = dynamo(module, recording)
    x = torch.ones(1, 2)
    assert not compiled(x).requires_grad
    with torch.enable_grad(), pytest.warns(errors.TorchbayWarning, match="gradients"):
        assert compiled(x).requires_grad
    assert not compiled(x).requires_grad
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_makes_inference_tensors_where_the_program_does(recording):
    @torch.inference_mode()
    def inferred(x):
        return x * 2

    compiled = dynamo(inferred, recording)
    for _ in range(2):
        assert compiled(torch.ones(2)).is_inference()


# Python


class Counter:
    def __init__(self):
        self.count = 0

    def step(self, x):
        self.count += 1
        return x * self.count


@pytest.mark.filterwarnings("ignore:step")
def test_keeps_a_counter_in_python_right_for_ten_calls(static):
    counter = Counter()
    compiled = dynamo(counter.step, static)
    for call in range(1, 11):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), float(call)))
    assert counter.count == 10
    assert served(compiled) == {"graph": 8, "eager": 2}


def test_keeps_a_counter_right_where_numbers_may_be_symbolic(recording):
    counter = Counter()
    compiled = dynamo(counter.step, recording)
    for call in range(1, 11):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), float(call)))
    assert counter.count == 10
    assert len(recording.requests) == 2
    assert served(compiled) == {"graph": 10, "eager": 0}


def test_serves_the_parts_around_a_graph_break(recording, capsys):
    compiled = dynamo(broken, recording)
    x = torch.randn(3)
    for _ in range(2):
        assert torch.equal(compiled(x), torch.cos(torch.sin(x)))
    assert capsys.readouterr().out == "between\n" * 2
    assert served(compiled) == {"graph": 2, "eager": 0}
    second, first = torchbay.explain(compiled).specializations
    assert "up to a graph break" in first.where
    assert f"{__file__}:{broken.__code__.co_firstlineno + 2}" in first.where
    assert "resume" in second.where
    assert "cos" in second.graph


def test_refuses_a_graph_break_where_the_whole_call_must_be_a_graph(recording, capsys):
    compiled = dynamo(broken, recording, fullgraph=True)
    x = torch.randn(3)
    with pytest.raises(errors.NotServed, match="print") as caught:
        compiled(x)
    assert f"{__file__}:{broken.__code__.co_firstlineno + 2}" in str(caught.value)
    assert torch.equal(caught.value.result, torch.cos(torch.sin(x)))
    assert capsys.readouterr().out == "between\n"
    assert recording.requests == []


@pytest.mark.parametrize("fullgraph", [False, True])
def test_lets_an_error_of_the_program_through(recording, fullgraph):
    class Mine(Exception):
        pass

    def fails(x):
        y = x + 1
        if y.shape[0] == 2:
            raise Mine("no twos")
        return y

    compiled = dynamo(fails, recording, fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(Mine, match="no twos"):
            compiled(torch.ones(2))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda x: x.sin().sum(7), IndexError), (lambda x: x @ torch.ones(9, 9), RuntimeError)],
)
def test_lets_an_error_of_an_operator_through(recording, fullgraph, function, kind):
    compiled = dynamo(function, recording, fullgraph=fullgraph)
    with pytest.raises(kind) as ours:
        compiled(torch.ones(2, 2))
    with pytest.raises(kind) as theirs:
        function(torch.ones(2, 2))
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value) == str(theirs.value)


def test_runs_nothing_twice_when_dynamo_gives_up_in_the_middle(recording):
    ran = []

    def note(module, args):
        ran.append(len(args))
        print("graph break")

    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(note)
    compiled = dynamo(module, recording)
    with pytest.raises(RuntimeError):
        compiled(torch.ones(2, 2))
    assert ran == [1]


def test_serves_a_call_without_any_graph_and_says_so(recording):
    def plain(x):
        print("nothing is computed")
        return x

    compiled, x = dynamo(plain, recording), torch.ones(2)
    with pytest.warns(errors.TorchbayWarning, match="no compiled graph"):
        assert compiled(x) is x
    assert served(compiled) == {"graph": 0, "eager": 1}


# What Dynamo leaves unwatched by default


def add_one(module, args, output):
    return output + 1


def test_sees_hooks_added_and_removed_after_the_first_call(recording):
    module = nn.Sequential(nn.Linear(2, 2))
    compiled = dynamo(module, recording)
    x = torch.ones(1, 2)
    compiled(x)
    for place in (module, module[0]):
        hook = place.register_forward_hook(add_one)
        assert torch.equal(compiled(x), module(x))
        hook.remove()
        assert torch.equal(compiled(x), module(x))
    assert torch._dynamo.config.skip_nnmodule_hook_guards is True


def test_runs_eagerly_while_hooks_stand_around_every_module(recording):
    module = nn.Linear(2, 2)
    compiled = dynamo(module, recording)
    x = torch.ones(1, 2)
    compiled(x)
    hook = nn.modules.module.register_module_forward_hook(add_one)
    try:
        with pytest.warns(errors.TorchbayWarning, match="hooks are registered for all modules"):
            assert torch.equal(compiled(x), module(x))
    finally:
        hook.remove()
    assert torch.equal(compiled(x), module(x))
    assert served(compiled) == {"graph": 2, "eager": 1}


def to_double(module, x):
    for parameter in module.parameters():
        parameter.data = parameter.data.double()
    return x.double()


def to_bfloat16(module, x):
    module.bfloat16()
    return x.bfloat16()


def reshape(module, x):
    module.weight.data, module.bias.data = torch.randn(3, 2), torch.randn(3)
    return x


def lay_out(module, x):
    module.weight.data = module.weight.data.t().contiguous().t()
    return x


@pytest.mark.parametrize("change", [to_double, to_bfloat16, reshape, lay_out])
def test_sees_parameters_of_another_form(recording, change):
    module = nn.Linear(2, 2)
    compiled = dynamo(module, recording)
    x = torch.ones(1, 2)
    compiled(x)
    x = change(module, x)
    assert torch.equal(compiled(x), module(x))
    assert len(recording.requests) == 2


def test_sees_that_a_parameter_is_to_be_trained(recording):
    module = nn.Linear(2, 2).requires_grad_(False)
    compiled = dynamo(module, recording)
    x = torch.ones(1, 2)
    with torch.enable_grad():
        assert not compiled(x).requires_grad
        module.weight.requires_grad_(True)
        with pytest.warns(errors.TorchbayWarning, match="gradients"):
            compiled(x).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 2))
    assert served(compiled) == {"graph": 1, "eager": 1}


# Limits


def scaled(x, k):
    return x * k


def test_serves_calls_beyond_the_limit_eagerly(static):
    compiled = dynamo(scaled, static, recompile_limit=2)
    with pytest.warns(errors.TorchbayWarning, match="recompile_limit=2"):
        for k in (2, 3, 4, 5):
            assert torch.equal(compiled(torch.ones(2), k), torch.full((2,), float(k)))
    assert served(compiled) == {"graph": 2, "eager": 2}
    assert torch._dynamo.config.recompile_limit == 8


@pytest.mark.parametrize("setting", ["fullgraph", "fail_on_recompile_limit"])
def test_raises_beyond_the_limit_where_asked_to(recording, setting):
    compiled = dynamo(scaled, recording, recompile_limit=1, **{setting: True})
    compiled(torch.ones(2), 2)
    with pytest.raises(errors.RecompileLimit, match="recompile_limit=1 is reached") as caught:
        compiled(torch.ones(2), 3)
    assert __file__ in caught.value.account
    assert torch.equal(compiled(torch.ones(2), 2), torch.full((2,), 2.0))
    assert torch._dynamo.config.fail_on_recompile_limit_hit is False


# Refusals


def test_names_the_known_tracers():
    with pytest.raises(errors.InvalidArgument, match="'dinamo'.*auto, make_fx, dynamo"):
        torchbay.compile(sine, tracer="dinamo")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dynamic_shapes": {"x": None}}, "takes no dynamic_shapes"),
        ({"dynamic": "yes"}, "dynamic is 'yes'"),
        ({"options": {"fusoin": 1}}, "no option.*'fusoin'"),
        ({"mode": "fast"}, "no modes"),
        ({"backend": "eagre"}, "no backend is called 'eagre'"),
        ({"fallback": "eagre"}, "no backend is called 'eagre'"),
        ({"recompile_limit": 0}, "recompile_limit is 0"),
    ],
)
def test_refuses_before_any_work(settings, complaint):
    with pytest.raises(errors.TorchbayError, match=complaint):
        torchbay.compile(sine, tracer="dynamo", **{"backend": "eager", **settings})


def test_is_eager_where_a_backend_declines(declining):
    compiled = dynamo(sine, declining)
    with pytest.warns(errors.TorchbayWarning, match="declines the graph.*no kernel"):
        assert torch.equal(compiled(torch.ones(2)), sine(torch.ones(2)))
    compiled(torch.ones(2))
    assert served(compiled) == {"graph": 0, "eager": 2}
    assert len(declining.requests) == 1


def test_refuses_where_a_backend_declines_and_the_call_must_be_a_graph(declining):
    compiled = dynamo(sine, declining, fullgraph=True)
    with pytest.raises(errors.NotServed, match="no kernel") as caught:
        compiled(torch.ones(2))
    assert torch.equal(caught.value.result, sine(torch.ones(2)))


def test_compiles_with_the_fallback_where_a_backend_declines(declining, recording):
    compiled = dynamo(sine, declining, fallback=recording)
    assert torch.equal(compiled(torch.ones(2)), sine(torch.ones(2)))
    assert torchbay.explain(compiled).specializations[0].backend == "recording"


def test_is_eager_for_inputs_that_an_executable_refuses(recording, guarded, monkeypatch):
    monkeypatch.setattr(type(recording), "compile", lambda _, request: guarded(request.graph))
    compiled, x = dynamo(sine, recording), torch.ones(2)
    assert torch.equal(compiled(x), sine(x))
    with pytest.warns(errors.TorchbayWarning, match="refuses the inputs: an input is not positive"):
        assert torch.equal(compiled(-x), sine(-x))
    assert served(compiled) == {"graph": 1, "eager": 1}


def test_names_a_backend_that_crashes(crashing):
    with pytest.raises(errors.BackendFailed, match="codegen bug"):
        dynamo(sine, crashing)(torch.ones(2))


def test_is_eager_for_higher_order_operators(recording):
    def branch(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    compiled = dynamo(branch, recording)
    with pytest.warns(errors.TorchbayWarning, match="higher-order operator cond"):
        assert torch.equal(compiled(torch.ones(2)), torch.sin(torch.ones(2)))
    assert torch.equal(compiled(-torch.ones(2)), torch.cos(-torch.ones(2)))


# The compiled object


def test_leaves_the_names_of_a_modules_state_alone(recording):
    module = small().eval()
    compiled = dynamo(module, recording)
    compiled(torch.randn(3, 4))
    assert compiled.state_dict().keys() == small().state_dict().keys()
    assert compiled.original is module
    assert isinstance(compiled, nn.Module)
    assert compiled.eval() is compiled


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    @torchbay.compile(backend="eager", tracer="dynamo")
    def scale(self, x):
        return x * self.factor


def test_binds_methods_to_their_instances():
    two, three = Scaler(2.0), Scaler(3.0)
    for _ in range(2):
        assert torch.equal(two.scale(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.equal(three.scale(torch.ones(2)), torch.full((2,), 3.0))
    assert served(two.scale) == {"graph": 2, "eager": 0}


def test_survives_copies_and_pickles():
    compiled = dynamo(nn.Linear(2, 2), "eager")
    x = torch.ones(1, 2)
    expected = compiled(x)
    for other in (copy.deepcopy(compiled), copy.copy(compiled), again(compiled)):
        assert torch.equal(other(x), expected)
        assert served(other) == {"graph": 1, "eager": 0}


def again(value):
    return pickle.load(io.BytesIO(pickle.dumps(value)))


def test_serves_callable_objects(recording):
    class Adder:
        def __call__(self, x):
            return x + 1

    compiled = dynamo(Adder(), recording)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert served(compiled) == {"graph": 1, "eager": 0}


def test_warms_up_without_the_calls_effects(recording):
    module = small()
    module.seen = []
    before = {name: value.clone() for name, value in module.state_dict().items()}
    compiled = dynamo(module, recording)
    state = torch.get_rng_state()
    x = torch.randn(5, 4)
    torch.set_rng_state(state)
    compiled.warmup(x)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert len(recording.requests) == 1
    assert served(compiled) == {"graph": 0, "eager": 0}
    compiled(x)
    assert len(recording.requests) == 1
    assert served(compiled) == {"graph": 1, "eager": 0}


def test_warms_up_without_the_calls_effects_on_python(recording):
    counter = Counter()
    compiled = dynamo(counter.step, recording)
    compiled.warmup(torch.ones(2))
    assert counter.count == 0
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert len(recording.requests) == 1


def test_explains_graphs_and_guards(recording):
    compiled = dynamo(scaled, recording)
    compiled(torch.ones(2), 3)
    explanation = torchbay.explain(compiled)
    assert "Dynamo owns the guards" in str(explanation)
    [report] = explanation.specializations
    assert "aten.mul.Tensor" in report.graph
    assert "L['k'] == 3" in report.guards
    assert "TENSOR_MATCH(L['x'])" in report.guards
    assert f"scaled at {__file__}" in report.where
    assert report.calls == 1
    assert report.compile_seconds > 0


def test_explains_each_graph_as_a_tree_of_one_leaf(recording):
    compiled = dynamo(broken, recording)
    for _ in range(2):
        compiled(torch.ones(2))
    explanation = torchbay.explain(compiled)
    assert [tree.numbers for tree in explanation.trees] == [(0,), (1,)]
    assert [tree.calls for tree in explanation.trees] == [2, 2]
    assert [tree.root for tree in explanation.trees] == list(explanation.specializations)
    assert str(explanation.trees[1]).startswith("specialization 1, served 2 calls, ")


def test_holds_what_dynamo_tells_of_its_guards_as_data(recording):
    compiled = dynamo(scaled, recording)
    compiled(torch.ones(2), 3)
    compiled(torch.ones(2), 4)
    second, first = torchbay.explain(compiled).specializations
    assert [guard.source for guard in first.guard_list] == first.guards.splitlines()
    assert {guard.kind for guard in first.guard_list} == {"dynamo"}
    assert "L['k'] == 3: true here, not guarded there" in first.guard_differences(second)
    dumped = first.as_dict()
    assert json.loads(json.dumps(dumped)) == dumped
    assert dumped["where"] == first.where


def test_leaves_it_to_dynamo_which_calls_pass(recording):
    compiled = dynamo(scaled, recording)
    compiled(torch.ones(2), 3)
    [report] = torchbay.explain(compiled).specializations
    [reason] = report.mismatches(torch.ones(2), 3)
    assert "Dynamo owns the guards" in reason


def test_forgets_what_it_compiled(recording):
    compiled = dynamo(broken, recording, recompile_limit=1)
    for _ in range(3):
        compiled(torch.ones(2))
        assert len(torchbay.explain(compiled).specializations) == 2
        torchbay.reset()
        assert torchbay.explain(compiled).specializations == ()
        assert served(compiled) == {"graph": 0, "eager": 0}
    assert len(recording.requests) == 6


def test_runs_inline_inside_another_trace(recording):
    compiled = dynamo(sine, recording)
    outer = torch.compile(lambda x: compiled(x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(outer(torch.ones(2)), sine(torch.ones(2)) * 2)
    assert torch.equal(torch.vmap(compiled)(torch.ones(2, 2)), sine(torch.ones(2, 2)))
    assert recording.requests == []


def test_serves_several_threads(recording):
    compiled = dynamo(sine, recording)
    x, results = torch.randn(3), []

    def call():
        with torch.no_grad():
            results.append(compiled(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, sine(x)) for result in results)
    assert len(results) == 4


def test_bakes_the_casts_of_autocast_in(recording):
    module = nn.Linear(4, 4)
    compiled = dynamo(module, recording)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert torch.equal(compiled(x), module(x))
    assert compiled(x).dtype == torch.float32
    assert served(compiled) == {"graph": 3, "eager": 0}
