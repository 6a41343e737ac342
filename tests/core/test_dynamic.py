"""Sizes and numbers that change: which become symbols, what the caller may declare of them."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch._dynamo import mark_dynamic, mark_static, maybe_mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch.export import Dim
from torch.nn import functional

import torchbay
from torchbay import errors
from torchbay.plugin import Capabilities


def graphs(compiled):
    return len(torchbay.explain(compiled).specializations)


def from_graphs(compiled):
    return torchbay.explain(compiled).calls["graph"]


def line_of(function, text):
    """Return file:line of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def assert_right(compiled, function, *calls):
    for args in calls:
        torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)


def scale(x):
    return x * 2 + x.size(0)


def test_serves_every_size_from_the_first_graph_with_dynamic_true(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=True, fullgraph=True)
    assert_right(compiled, scale, *((torch.randn(n, m),) for n, m in ((3, 4), (7, 2), (5, 5))))
    assert graphs(compiled) == 1
    assert from_graphs(compiled) == 2


def test_makes_numbers_symbols_from_the_first_call_with_dynamic_true(recording):
    def function(x, n, eps):
        return torch.arange(n) * eps + x.sum()

    compiled = torchbay.compile(function, backend=recording, dynamic=True, fullgraph=True)
    assert_right(compiled, function, *((torch.ones(2), n, n / 3) for n in (4, 9, 6)))
    assert graphs(compiled) == 1


def test_keeps_what_is_no_size_of_the_call_fixed_with_dynamic_true(recording):
    module = torch.nn.Linear(4, 3)
    compiled = torchbay.compile(module, backend=recording, dynamic=True, fullgraph=True)
    assert_right(compiled, module, (torch.randn(2, 4),), (torch.randn(5, 4),))
    assert graphs(compiled) == 1
    weight = next(i for i in recording.requests[0].example_inputs if i.shape[0] == 3)
    assert all(isinstance(size, int) for size in weight.shape)


@pytest.mark.parametrize("setting", [{"dynamic": True}, {"dynamic_shapes": {"x": {0: Dim.AUTO}}}])
def test_refuses_symbolic_sizes_for_a_backend_that_takes_none(setting, recording):
    recording.capabilities = Capabilities()
    with pytest.raises(errors.InvalidArgument, match="fixed sizes only") as caught:
        torchbay.compile(scale, backend=recording, **setting)
    assert next(iter(setting)) in str(caught.value)
    assert "inductor_triton" in caught.value.remedy


def test_gives_each_size_a_graph_for_a_backend_that_takes_no_symbols(recording):
    recording.capabilities = Capabilities()
    compiled = torchbay.compile(scale, backend=recording, fullgraph=True)
    assert_right(compiled, scale, *((torch.randn(n),) for n in (2, 3, 4, 2)))
    assert graphs(compiled) == 3


# dynamic_shapes


def test_takes_dims_by_name(recording):
    compiled = torchbay.compile(
        scale, backend=recording, dynamic_shapes={"x": {0: Dim("batch")}}, fullgraph=True
    )
    assert_right(compiled, scale, *((torch.randn(n, 4),) for n in (3, 7, 5)))
    assert graphs(compiled) == 1
    compiled(torch.randn(3, 6))
    assert graphs(compiled) == 2


@pytest.mark.parametrize(
    "shapes",
    [
        ({0: Dim("n")},),
        [{0: Dim.AUTO}],
        {"x": (Dim.DYNAMIC, None)},
        {"x": [Dim.AUTO, 4]},
        {"x": {0: Dim.AUTO, 1: Dim.STATIC}},
        {"x": {0: Dim.DYNAMIC(min=2, max=100)}},
    ],
    ids=str,
)
def test_takes_every_form_of_torch_export(shapes, recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic_shapes=shapes, fullgraph=True)
    assert_right(compiled, scale, *((torch.randn(n, 4),) for n in (3, 7, 5)))
    assert graphs(compiled) == 1
    compiled(torch.randn(3, 5))
    compiled(torch.randn(3, 6))
    assert graphs(compiled) == 3


def test_takes_dims_of_tensors_in_containers(recording):
    def function(batch, *rest, **named):
        return batch["ids"].sum() + batch["pair"][1] + rest[0].sum() + named["mask"].sum()

    batch = Dim("batch")
    shapes = {
        "batch": {"ids": {0: batch}, "pair": (None, {0: batch})},
        "rest": ({0: Dim("other")},),
        "mask": {0: Dim.AUTO},
    }
    compiled = torchbay.compile(function, backend=recording, dynamic_shapes=shapes, fullgraph=True)
    for n, m in ((3, 2), (5, 6), (4, 3)):
        ids = {"ids": torch.randn(n, 2), "pair": (torch.randn(2), torch.randn(n))}
        rest, mask = torch.randn(m), torch.randn(m + 1)
        expected = function(ids, rest, mask=mask)
        assert torch.equal(compiled(ids, rest, mask=mask), expected)
    assert graphs(compiled) == 1


def test_takes_dims_for_a_module(recording):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    compiled = torchbay.compile(
        module, backend=recording, dynamic_shapes={"input": {0: Dim("n")}}, fullgraph=True
    )
    assert_right(compiled, module, *((torch.randn(n, 4),) for n in (3, 7, 5)))
    assert graphs(compiled) == 1


def test_takes_a_number_declared_dynamic(recording):
    def function(x, n, k):
        return x[:n] * k

    compiled = torchbay.compile(
        function, backend=recording, dynamic_shapes={"n": Dim.DYNAMIC}, fullgraph=True
    )
    x = torch.randn(9)
    assert_right(compiled, function, (x, 3, 2), (x, 5, 2), (x, 7, 2))
    assert graphs(compiled) == 1
    assert_right(compiled, function, (x, 3, 4), (x, 3, 5))
    assert graphs(compiled) == 3


def test_keeps_a_dim_in_its_range(recording):
    shapes = {"x": {0: Dim("n", min=4, max=8)}}
    compiled = torchbay.compile(scale, backend=recording, dynamic_shapes=shapes, fullgraph=True)
    assert_right(compiled, scale, *((torch.randn(n),) for n in (5, 4, 8)))
    assert graphs(compiled) == 1
    source = torchbay.explain(compiled).specializations[0].guards
    assert "4 <= inputs[0].size()[0] <= 8" in source
    assert_right(compiled, scale, *((torch.randn(n),) for n in (9, 3, 9, 3)))
    assert 2 <= graphs(compiled) <= 3


def test_ties_the_sizes_that_one_dim_names(recording):
    batch = Dim("batch")

    def function(x, y):
        return x.sum() + y.sum()

    compiled = torchbay.compile(
        function,
        backend=recording,
        dynamic_shapes={"x": {0: batch}, "y": {0: batch}},
        fullgraph=True,
    )
    pairs = ((3, 3), (5, 5))
    assert_right(compiled, function, *((torch.randn(n), torch.randn(m)) for n, m in pairs))
    assert graphs(compiled) == 1
    assert_right(compiled, function, (torch.randn(3), torch.randn(5)))
    assert graphs(compiled) == 2
    (reasons,) = torchbay.explain(compiled).recompiles
    assert "x.size()[0]" in str(reasons)
    assert "y.size()[0]" in str(reasons)


def test_takes_a_dim_derived_from_another(recording):
    half = Dim("half")

    def function(x, y):
        return x.sum() + y.sum()

    shapes = {"x": {0: half}, "y": {0: 2 * half + 1}}
    compiled = torchbay.compile(function, backend=recording, dynamic_shapes=shapes, fullgraph=True)
    assert_right(compiled, function, *((torch.randn(n), torch.randn(2 * n + 1)) for n in (3, 5)))
    assert graphs(compiled) == 1
    assert_right(compiled, function, (torch.randn(3), torch.randn(8)))
    assert graphs(compiled) == 2


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        ({"z": {0: Dim("n")}}, ["'z'", "Arguments: x, y"]),
        ("x", ["'x'", "dict"]),
        ({"x": {0: "batch"}}, ["['x'][0]", "'batch'", "Dim.AUTO"]),
        ({"x": {0: 2 * Dim("n")}}, ["'n'", "no argument has"]),
        ({"x": {0: Dim("n", min=2)}, "y": {0: Dim("n", max=9)}}, ["'n'", "different ranges"]),
    ],
    ids=str,
)
def test_refuses_dims_that_no_call_can_have(shapes, parts, recording):
    with pytest.raises(errors.InvalidArgument) as caught:
        torchbay.compile(lambda x, y: x + y, backend=recording, dynamic_shapes=shapes)
    for part in parts:
        assert part in str(caught.value)


def test_refuses_dynamic_beside_dynamic_shapes(recording):
    for dynamic in (True, False):
        with pytest.raises(errors.InvalidArgument, match=r"both dynamic and dynamic_shapes"):
            torchbay.compile(scale, backend=recording, dynamic=dynamic, dynamic_shapes={})


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        ({"x": {2: Dim("n")}}, ["dimension 2 of x", "has 2"]),
        ({"x": {-1: Dim("n")}}, ["dimension -1 of x", "has 2"]),
        ({"x": (Dim("n"),)}, ["1 dimensions for x", "has 2"]),
        ({"x": Dim("n")}, ["for x", "a tensor"]),
        ({"y": {"b": {0: Dim("n")}}}, ["y['b']", "'a'"]),
        ({"y": ({0: Dim("n")},) * 2}, ["for y", "dict of 1"]),
        ({"flag": Dim.DYNAMIC}, ["for flag", "bool"]),
        (({}, {}, True, {}), ["dynamic_shapes[2]", "True"]),
        (({}, None, None, {}), ["4 entries for 3 arguments"]),
    ],
    ids=str,
)
def test_refuses_dims_that_do_not_fit_the_call_before_it_runs(shapes, parts, recording):
    runs = []

    def function(x, y, flag=False):
        runs.append(x)
        return x + y["a"]

    with pytest.raises(errors.InvalidArgument) as caught:
        torchbay.compile(function, backend=recording, dynamic_shapes=shapes)(
            torch.ones(2, 3), {"a": torch.ones(3)}, True
        )
    for part in parts:
        assert part in str(caught.value)
    assert runs == []


# a dimension that was declared dynamic, and that the program fixes


def branching(x):
    if x.size(0) == 5:
        return x + 1
    return x - 1


@pytest.mark.parametrize("fullgraph", [True, False])
def test_names_the_line_that_fixes_a_declared_dim(fullgraph, recording):
    compiled = torchbay.compile(
        branching,
        backend=recording,
        dynamic_shapes={"x": {0: Dim("batch")}},
        fullgraph=fullgraph,
    )
    with pytest.raises(errors.DimensionFixed, match="dimension 0 of x") as caught:
        compiled(torch.ones(5))
    assert caught.value.account == line_of(branching, "== 5")
    assert "Dim.AUTO" in caught.value.remedy
    assert torch.equal(caught.value.result, torch.full((5,), 2.0))
    assert recording.requests == []
    assert_right(compiled, branching, (torch.ones(4),), (torch.ones(6),))
    assert graphs(compiled) == 1


def test_names_the_line_that_fixes_a_marked_dim(recording):
    compiled = torchbay.compile(branching, backend=recording)
    x = torch.ones(5)
    mark_dynamic(x, 0)
    with pytest.raises(errors.DimensionFixed, match="dimension 0 of x.*mark_dynamic") as caught:
        compiled(x)
    assert caught.value.account == line_of(branching, "== 5")


def test_names_a_weight_that_fixes_a_declared_dim(recording):
    module = torch.nn.Linear(4, 3)
    compiled = torchbay.compile(
        module, backend=recording, dynamic_shapes={"input": {1: Dim("width")}}
    )
    with pytest.raises(errors.DimensionFixed, match="dimension 1 of input") as caught:
        compiled(torch.ones(2, 4))
    assert caught.value.account


def test_allows_a_dim_to_be_fixed_where_that_was_asked_for(recording):
    compiled = torchbay.compile(
        branching, backend=recording, dynamic_shapes={"x": {0: Dim.AUTO}}, fullgraph=True
    )
    assert_right(compiled, branching, *((torch.ones(n),) for n in (5, 4, 6, 5)))
    assert graphs(compiled) == 2


def test_says_what_keeps_a_declared_dim_from_being_left_open(recording):
    def function(x):
        return x + len(f"{x.size(0)}")

    compiled = torchbay.compile(function, backend=recording, dynamic_shapes={"x": {0: Dim("n")}})
    with pytest.raises(errors.DimensionFixed, match="dimension 0 of x"):
        compiled(torch.ones(5))


# marks


def test_honours_mark_dynamic(recording):
    compiled = torchbay.compile(scale, backend=recording, fullgraph=True)
    x = torch.randn(5, 3)
    mark_dynamic(x, 0)
    assert_right(compiled, scale, (x,), (torch.randn(7, 3),), (torch.randn(2, 3),))
    assert graphs(compiled) == 1


def test_honours_mark_dynamic_with_dynamic_false(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=False, fullgraph=True)
    x = torch.randn(5, 3)
    mark_dynamic(x, [0, 1])
    assert_right(compiled, scale, (x,), (torch.randn(7, 4),))
    assert graphs(compiled) == 1


def test_honours_the_range_of_mark_dynamic(recording):
    compiled = torchbay.compile(scale, backend=recording, fullgraph=True)
    x = torch.randn(5)
    mark_dynamic(x, 0, min=4, max=8)
    assert_right(compiled, scale, (x,), (torch.randn(8),))
    assert graphs(compiled) == 1
    assert_right(compiled, scale, (torch.randn(9),), (torch.randn(3),))
    assert graphs(compiled) == 2


def test_honours_maybe_mark_dynamic(recording):
    compiled = torchbay.compile(branching, backend=recording, fullgraph=True)
    x, y = torch.ones(4), torch.ones(5)
    maybe_mark_dynamic(x, 0)
    maybe_mark_dynamic(y, 0)
    assert_right(compiled, branching, (x,), (y,), (torch.ones(7),))
    assert graphs(compiled) == 2


def test_honours_mark_static(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=True, fullgraph=True)
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    mark_static(x, 1)
    mark_static(y, 1)
    assert_right(compiled, scale, (x,), (torch.randn(7, 3),), (y,), (torch.randn(7, 4),))
    assert graphs(compiled) == 2


def test_lets_mark_dynamic_win_over_mark_static(recording):
    compiled = torchbay.compile(scale, backend=recording, fullgraph=True)
    x = torch.randn(5, 3)
    mark_static(x)
    mark_dynamic(x, 0)
    assert_right(compiled, scale, (x,), (torch.randn(7, 3),))
    assert graphs(compiled) == 1


def test_serves_zero_and_one_with_the_rest_for_mark_unbacked(recording):
    def function(x):
        return x.new_zeros(3) + x.size(0) * 2

    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    x = torch.randn(5)
    mark_unbacked(x, 0)
    assert_right(compiled, function, (x,), (torch.randn(0),), (torch.randn(7),))
    assert from_graphs(compiled) == 2
    assert_right(compiled, function, (torch.randn(1),))
    assert graphs(compiled) <= 2


def test_refuses_to_fix_a_strict_unbacked_dim(recording):
    compiled = torchbay.compile(branching, backend=recording)
    x, y = torch.ones(5), torch.ones(5)
    mark_unbacked(x, 0, strict=True)
    with pytest.raises(errors.DimensionFixed, match="strict=True") as caught:
        compiled(x)
    assert caught.value.account == line_of(branching, "== 5")
    mark_unbacked(y, 0)
    assert torch.equal(compiled(y), y + 1)


def test_ties_unbacked_dims_of_one_shape_id(recording):
    def function(x, y):
        return x.sum() + y.sum()

    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    x, y = torch.randn(5), torch.randn(5)
    for tensor in (x, y):
        mark_unbacked(tensor, 0, shape_id="batch", min=2, max=9)
    assert_right(compiled, function, (x, y), (torch.randn(7), torch.randn(7)))
    assert graphs(compiled) == 1
    assert_right(compiled, function, (torch.randn(7), torch.randn(6)))
    assert graphs(compiled) == 2


def test_hands_hints_on(recording):
    compiled = torchbay.compile(scale, backend=recording)
    x = torch.randn(5, 3)
    mark_dynamic(x, 0, hint_override=1024)
    compiled(x)
    size = recording.requests[0].example_inputs[0].size(0)
    assert size.node.shape_env.var_to_hint_override[size.node.expr] == 1024
    assert_right(compiled, scale, (torch.randn(7, 3),))
    assert graphs(compiled) == 1


@pytest.mark.parametrize("mark", [mark_dynamic, mark_unbacked])
def test_refuses_specialize_on_by_name(mark, recording):
    runs = []
    compiled = torchbay.compile(lambda x: runs.append(1) or x + 1, backend=recording)
    x = torch.randn(8)
    mark(x, 0, specialize_on=[lambda size: size == 8])
    with pytest.raises(errors.InvalidArgument, match="dimension 0 of x has specialize_on"):
        compiled(x)
    assert runs == []


@pytest.mark.parametrize("mark", [mark_dynamic, mark_unbacked, maybe_mark_dynamic, mark_static])
def test_refuses_marks_of_dimensions_that_are_not_there(mark, recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    x = torch.randn(8)
    mark(x, 1)
    with pytest.raises(errors.InvalidArgument, match="dimension 1 of x, which has 1"):
        compiled(x)


def test_refuses_demanded_marks_for_a_backend_that_takes_no_symbols(recording):
    recording.capabilities = Capabilities()
    compiled = torchbay.compile(scale, backend=recording)
    x, y = torch.randn(8), torch.randn(8)
    mark_dynamic(x, 0)
    with pytest.raises(errors.InvalidArgument, match="mark_dynamic of dimension 0 of x"):
        compiled(x)
    maybe_mark_dynamic(y, 0)
    assert_right(compiled, scale, (y,))


def test_honours_marks_on_tensors_in_containers_and_on_state(recording):
    class Lookup(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(6, 2))

        def forward(self, batch):
            return batch["x"].sum(0) + self.table.sum(0)

    module = Lookup()
    compiled = torchbay.compile(module, backend=recording, fullgraph=True)
    x = torch.randn(4, 2)
    mark_dynamic(x, 0)
    mark_dynamic(module.table, 0)
    assert_right(compiled, module, ({"x": x},), ({"x": torch.randn(5, 2)},))
    module.table = torch.nn.Parameter(torch.randn(9, 2))
    assert_right(compiled, module, ({"x": x},))
    assert graphs(compiled) == 1


def test_reads_marks_without_importing_dynamo():
    program = """
        import sys, torch, torchbay
        x = torch.ones(3)
        x._dynamo_static_indices = {3}
        try:
            torchbay.compile(lambda x: x + 1, backend="eager")(x)
        except torchbay.errors.InvalidArgument as error:
            print(error.what, "torch._dynamo" in sys.modules)
    """
    found = subprocess.run(
        [sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip().endswith("dimension 3 of x, which has 1 False"), found.stderr


# strides, zero and one


def images(n):
    return torch.randn(n, 3, 4, 5)


def flat(x):
    return (x * 2).sum(1) + x.size(0)


@pytest.mark.parametrize(
    "layout",
    [
        lambda n: images(n),
        lambda n: images(n).to(memory_format=torch.channels_last),
        lambda n: torch.randn(4, 3, n).permute(2, 1, 0),
        lambda n: torch.randn(n, 1, 4).expand(n, 3, 4),
        lambda n: torch.randn(1, 3, 4).expand(n, 3, 4),
        lambda n: torch.randn(n, 6, 4)[:, ::2],
        lambda n: torch.randn(2 * n, 3, 4)[::2],
    ],
    ids=["contiguous", "channels_last", "permuted", "expanded", "batch_expanded", "cut", "strided"],
)
def test_lets_a_batch_grow_in_any_storage_order(layout, recording):
    compiled = torchbay.compile(flat, backend=recording, fullgraph=True)
    for n in (2, 5, 9, 7):
        x = layout(n)
        result, expected = compiled(x), flat(x)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    assert graphs(compiled) == 2
    for n in (1, 0, 1, 0, 4):
        x = layout(n)
        assert torch.equal(compiled(x), flat(x))
    assert graphs(compiled) <= 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.pad(x, (0, 1)),
        lambda x: functional.unfold(x, 2),
        lambda x: functional.local_response_norm(x, 2),
        lambda x: torch.fft.rfft(x).real,
        lambda x: torch.polar(x, x).imag,
    ],
    ids=["pad", "unfold", "response_norm", "fft", "polar"],
)
def test_leaves_sizes_open_that_operators_do_not_fix(function, recording):
    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    for n in (2, 5, 9, 7):
        x = torch.rand(n, 3, 4, 4)
        result, expected = compiled(x), function(x)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    assert graphs(compiled) == 2


def test_gives_another_storage_order_another_graph(recording):
    compiled = torchbay.compile(flat, backend=recording, dynamic=True, fullgraph=True)
    for n in (2, 5, 3):
        compiled(images(n))
    assert graphs(compiled) == 1
    for n in (4, 6):
        x = images(n).to(memory_format=torch.channels_last)
        result, expected = compiled(x), flat(x)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    assert graphs(compiled) == 2


# relations of sizes


def equal_sizes(x, y):
    if x.shape[0] == y.shape[0]:
        return x.sum() + y.sum()
    return x.sum() - y.sum()


def even(x):
    return x.view(2, -1).sum(0) if x.shape[0] % 2 == 0 else x * 3


def fours(x):
    return x.view(-1, 4).sum(1)


def shorter(x, y):
    n = min(x.size(0), y.size(0))
    return x[:n] + y[:n] * max(x.size(0), y.size(0))


@pytest.mark.parametrize(
    ("function", "sizes", "most"),
    [
        (equal_sizes, ((3, 4), (5, 7), (6, 2), (4, 4), (8, 8), (9, 9)), 3),
        (even, ((4,), (6,), (8,), (5,), (7,), (9,), (10,)), 3),
        (fours, ((4,), (8,), (12,), (40,)), 2),
        (shorter, ((3, 5), (4, 6), (9, 2), (7, 3), (4, 4), (5, 5)), 4),
    ],
    ids=["equal", "even", "divisible", "min"],
)
def test_guards_relations_of_sizes(function, sizes, most, recording):
    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    assert_right(compiled, function, *((tuple(map(torch.randn, each))) for each in sizes * 2))
    assert graphs(compiled) <= most


def test_survives_relations_that_divide_by_zero(recording):
    def function(x):
        return torch.chunk(x, 2, 0)[-1].sum()

    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    assert_right(compiled, function, *((torch.randn(n, 3),) for n in (2, 5, 4, 0, 1, 7)))


def test_names_the_line_that_relates_sizes(recording):
    compiled = torchbay.compile(equal_sizes, backend=recording, dynamic=True)
    compiled(torch.ones(3), torch.ones(3))
    compiled(torch.ones(3), torch.ones(4))
    ((reason,),) = torchbay.explain(compiled).recompiles
    assert "x.size()[0]" in reason
    assert "y.size()[0]" in reason
    assert line_of(equal_sizes, "==") in reason


def test_blames_no_line_for_a_size_of_one(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=True)
    compiled(torch.ones(3))
    compiled(torch.ones(1))
    ((reason,),) = torchbay.explain(compiled).recompiles
    assert "2 <= x.size()[0]" in reason
    assert "relies on" not in reason


# sizes and numbers as values


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.shape,
        lambda x: x.size(0) * 2,
        lambda x: (x.size(0), x.numel(), x + 1),
        lambda x: {"rows": x.size(0), "sum": x.sum()},
        lambda x: torch.arange(x.size(0)) + x.size(1),
        lambda x: f"{x.size(0)} rows",
        lambda x: {x.size(0): x + 1},
        lambda x: sum(x[i] for i in range(x.size(0))),
        lambda x: x[x.size(0) - 1] + x[x.size(0) // 2],
        lambda x: x / x.size(0) ** 0.5,
        lambda x: [1, 2, 3, 4, 5, 6, 7, 8, 9][x.size(0)] * x,
        lambda x: torch.cat([x, x.new_zeros(x.size(0) % 3, x.size(1))]),
    ],
    ids=list("abcdefghijkl"),
)
def test_serves_sizes_that_are_values(function, recording):
    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    for n in (2, 5, 4, 7, 5):
        x = torch.randn(n, 3)
        result, expected = compiled(x), function(x)
        assert type(result) is type(expected)
        if isinstance(expected, dict):
            assert [*map(type, result)] == [*map(type, expected)]
        if isinstance(expected, str):
            assert result == expected
        else:
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ([0.1, 0.25, 0.3, 7.5], 2),
        ([3, 4, 9, 2**31, 2**40, -5], 2),
        ([1.0, -0.0, 0.0, -2.5], 3),
        ([1.5, math.inf, -math.inf, math.nan, 2.5, math.nan, 3.5], 5),
        ([True, False, True], 2),
        ([1, 1.0, True, 2, 2.0, False], 6),
        ([0, 1, 2, 3], 2),
    ],
    ids=str,
)
def test_serves_numbers_that_change(values, most, recording):
    def function(x, k):
        return x * k, x / k if k != 0 else x

    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    for k in values:
        x = torch.randn(3, dtype=torch.float64)
        torch.testing.assert_close(compiled(x, k), function(x, k), rtol=0, atol=0, equal_nan=True)
        for one, other in zip(compiled(x, k), function(x, k), strict=True):
            assert torch.equal(one.signbit(), other.signbit())
    assert graphs(compiled) <= most + 1


def test_serves_numbers_that_are_sizes(recording):
    def function(x, n, eps):
        return x.new_ones(n, 2) * eps + torch.arange(n)[:, None]

    compiled = torchbay.compile(function, backend=recording, fullgraph=True)
    assert_right(compiled, function, *((torch.ones(1), n, n / 10) for n in (2, 5, 9, 6)))
    assert graphs(compiled) == 2


def test_leaves_numbers_open_where_inputs_are_written(recording):
    def moved(weight, rate):
        return weight.add_(torch.ones(3), alpha=-rate)

    compiled = torchbay.compile(moved, backend=recording)
    weight, expected = torch.ones(3), torch.ones(3)
    for rate in (0.5, 0.25, 0.75, 1.5):
        assert torch.equal(compiled(weight, rate), moved(expected, rate))
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 2}
