"""``torch.cond`` and its like stay in the graph, for backends that claim them."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import utils as torch_hops
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.print import print as torch_print
from torch.nn.attention import flex_attention as flex
from torch.utils._pytree import tree_leaves

import torchbay
from torchbay import errors

SCALE = 2.0
GLOBAL = torch.tensor([0.5, 1.5, 2.5])
BIAS = torch.tensor([0.25, -0.5])
HIGHER_ORDER = torch._ops.HigherOrderOperator

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


def calls_of(compiled):
    return dict(torchbay.explain(compiled).calls)


def reason_of(compiled):
    return str(torchbay.explain(compiled))


def operators(module):
    return [str(n.target) for n in module.graph.nodes if isinstance(n.target, HIGHER_ORDER)]


def run_quietly(compiled, *args, times=3):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.TorchbayWarning)
        return [compiled(*args) for _ in range(times)]


def assert_right(function, compiled, x):
    """Compare with eager on both sides of the predicates, from one seed each."""
    for sign in (1, -1, 1, -1):
        torch.manual_seed(3)
        expected = tree_leaves(function(x * sign))
        torch.manual_seed(3)
        actual = tree_leaves(compiled(x * sign))
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected))


def plain(x):
    return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))


def closing_over_tensors(x):
    y = x * 2

    def left(v):
        return v * y + GLOBAL

    return torch.cond(x.sum() > 0, left, lambda v: (v - y).relu(), (x,)) + 1


def without_operands(x):
    return torch.cond(x.sum() > 0, lambda: x + 1, lambda: x - GLOBAL)


def nested(x):
    y = x * 2

    def left(v):
        return torch.cond(v.max() > y.min() + 1, lambda u: u * y + GLOBAL, lambda u: u - y, (v,))

    return torch.cond(x.sum() > 0, left, lambda v: v - GLOBAL, (x,))


def with_containers(x):
    return torch.cond(
        x.sum() > 0,
        lambda d, e: {"a": d["a"] + 1, "b": [e[0] * 2]},
        lambda d, e: {"a": d["a"] - 1, "b": [e[0] * 3]},
        ({"a": x}, [x * 2]),
    )


def with_literals(x):
    return torch.cond(
        x.sum() > 0,
        lambda v: v * torch.tensor(3.0),
        lambda v: v - torch.tensor([1.0, 2.0, 3.0]),
        (x,),
    )


def changing_what_it_made(x):
    return torch.cond(
        x.sum() > 0, lambda v: (v * 2).add_(1).relu_(), lambda v: (v * 2).sub_(1), (x,)
    )


def changed_around_it(x):
    x = x.clone()
    y = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))
    x.add_(y)
    return x, y


def of_two_sizes(x):
    return torch.cond(x.sum() > 0, lambda v: v[:2] + 1, lambda v: v - 1, (x,)) + 1


def drawing(x):
    return torch.cond(
        x.sum() > 0,
        lambda v: v + torch.rand_like(v),
        lambda v: v - torch.rand_like(v) - torch.rand_like(v),
        (x,),
    )


def looping(x):
    limit = GLOBAL.abs().sum() + 10
    return torch.while_loop(
        lambda i, v: v.sum() < limit, lambda i, v: (i + 1, v * 2), (torch.zeros(()), x.abs() + 1)
    )


def counting(x):
    return torch.while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, v * 2), (0, x.abs() + 1))[1]


def scanning(x):
    rows = torch.stack([x, x * 2, x * 3])
    return scan(lambda c, v: (c * 0.5 + v + GLOBAL, c * GLOBAL), x, rows)


def scanning_backwards(x):
    rows = torch.stack([x, x * 2, x * 3])
    return scan(lambda c, v: (c * 0.5 + v, c * GLOBAL), x, rows, reverse=True)


def mapping(x):
    return torch_map(lambda row, y: row * y + GLOBAL, torch.stack([x, x * 2, x * 3]), x)


def associating(x):
    rows = torch.stack([x, x * 2, x * 3])
    return associative_scan(lambda a, b: a * b, rows, 0, combine_mode="generic")


def attending(x):
    q = x.reshape(1, 1, 3, 1).expand(1, 2, 3, 4).contiguous()
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu")

    def score(s, b, h, i, j):
        return s + BIAS[h] * x[i] + (i - j)

    return flex.flex_attention(q, q * 2, q * 3, score_mod=score, block_mask=mask)


KEPT = {
    plain: "cond",
    closing_over_tensors: "cond",
    without_operands: "cond",
    nested: "cond",
    with_containers: "cond",
    with_literals: "cond",
    changing_what_it_made: "cond",
    changed_around_it: "cond",
    of_two_sizes: "cond",
    drawing: "cond",
    looping: "while_loop",
    counting: "while_loop",
    scanning: "scan",
    scanning_backwards: "scan",
    mapping: "map_impl",
    attending: "flex_attention",
}


@pytest.mark.parametrize("function", KEPT, ids=lambda function: function.__name__)
def test_keeps_an_operator_in_one_graph(function, claiming):
    compiled = torchbay.compile(function, backend=claiming, fullgraph=True)
    assert_right(function, compiled, torch.tensor([0.5, -1.0, 2.0]))
    [request] = claiming.requests
    assert operators(request.graph) == [KEPT[function]]
    assert calls_of(compiled) == {"graph": 3, "eager": 1}


@pytest.mark.parametrize("function", KEPT, ids=lambda function: function.__name__)
def test_is_right_after_decomposing_inside_the_functions(function, decomposing):
    compiled = torchbay.compile(function, backend=decomposing, fullgraph=True)
    x = torch.tensor([0.5, -1.0, 2.0])
    for sign in (1, -1, 1):
        torch.manual_seed(3)
        expected = tree_leaves(function(x * sign))
        torch.manual_seed(3)
        for actual, wanted in zip(tree_leaves(compiled(x * sign)), expected, strict=True):
            torch.testing.assert_close(actual, wanted)
    [request] = decomposing.requests
    assert operators(request.graph) == [KEPT[function]]


def test_hands_over_functional_functions_in_simple_operators(decomposing):
    def branch(x):
        return torch.cond(
            x.sum() > 0, lambda v: nn.functional.silu(v).add_(1), lambda v: v.relu(), (x,)
        )

    torchbay.compile(branch, backend=decomposing, fullgraph=True)(torch.ones(3))
    [request] = decomposing.requests
    functions = request.graph.children()
    targets = {str(node.target) for inner in functions for node in inner.graph.nodes}
    assert "aten.silu.default" not in targets
    assert "aten.exp.default" in targets
    assert not any(target.endswith("add_.Tensor") for target in targets)


def test_gives_every_node_of_the_functions_a_fake_value(claiming):
    torchbay.compile(nested, backend=claiming)(torch.ones(3))
    [request] = claiming.requests
    graphs = [m for m in request.graph.modules() if isinstance(m, torch.fx.GraphModule)]
    assert len(graphs) == 5
    for graph in graphs:
        graph.graph.lint()
        for node in graph.graph.nodes:
            assert node.op in ("output", "get_attr") or "val" in node.meta


def test_names_the_line_of_the_operator(claiming):
    torchbay.compile(plain, backend=claiming)(torch.ones(3))
    [request] = claiming.requests
    [node] = [n for n in request.graph.graph.nodes if isinstance(n.target, HIGHER_ORDER)]
    line = plain.__code__.co_firstlineno + 1
    assert f'{__file__}", line {line}, in plain' in node.stack_trace


@pytest.mark.parametrize("goes_left", [True, False])
def test_does_not_recompile_when_the_predicate_flips(goes_left, claiming):
    compiled = torchbay.compile(
        lambda p, x: torch.cond(p, lambda v: v.sin(), lambda v: v.cos(), (x,)), backend=claiming
    )
    x = torch.randn(3)
    for way in (goes_left, not goes_left, goes_left):
        expected = x.sin() if way else x.cos()
        assert torch.equal(compiled(torch.tensor(way), x), expected)
    assert len(claiming.requests) == 1
    assert torchbay.explain(compiled).recompiles == ()


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = 2.0

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.go_left, lambda v: self.right(v) * self.scale, (x,))

    def go_left(self, v):
        return self.left(v) / self.scale


@pytest.mark.parametrize("first", [1, -1])
def test_reads_the_parameters_of_both_branches_on_every_call(first, claiming):
    module, x = Chooser(), torch.ones(2, 3)
    compiled = torchbay.compile(module, backend=claiming, fullgraph=True)
    compiled(x * first)
    module.left.weight.mul_(3)
    module.right.weight.mul_(-2)
    for sign in (1, -1):
        assert torch.equal(compiled(x * sign), module(x * sign))
    assert len(claiming.requests) == 1


@pytest.mark.parametrize("first", [1, -1])
def test_sees_what_either_branch_reads_of_python(first, claiming):
    module, x = Chooser(), torch.ones(2, 3)
    compiled = torchbay.compile(module, backend=claiming, fullgraph=True)
    compiled(x * first)
    module.scale = 5.0
    for sign in (1, -1):
        assert torch.equal(compiled(x * sign), module(x * sign))


@pytest.mark.parametrize("first", [1, -1])
def test_sees_a_global_that_either_branch_reads(first, claiming, monkeypatch):
    def branch(x):
        return torch.cond(x.sum() > 0, lambda v: v * SCALE, lambda v: v - SCALE, (x,))

    compiled, x = torchbay.compile(branch, backend=claiming, fullgraph=True), torch.ones(3)
    compiled(x * first)
    monkeypatch.setattr(f"{__name__}.SCALE", 7.0)
    for sign in (1, -1):
        assert torch.equal(compiled(x * sign), branch(x * sign))


def test_drops_an_operator_whose_result_nobody_needs(claiming):
    def call(x):
        plain(x)
        return x * 2

    torchbay.compile(call, backend=claiming, fullgraph=True)(torch.ones(3))
    [request] = claiming.requests
    assert operators(request.graph) == []


def test_keeps_an_operator_that_draws_though_nobody_needs_its_result(claiming):
    def call(x):
        drawing(x)
        return torch.rand_like(x)

    assert_right(call, torchbay.compile(call, backend=claiming, fullgraph=True), torch.ones(3))


def test_chooses_a_gate_by_the_result_of_an_operator(claiming):
    def call(x):
        return x * 2 if plain(x).sum() > 3 else x * 3

    assert_right(call, torchbay.compile(call, backend=claiming, fullgraph=True), torch.ones(3))


def test_reads_a_gate_that_depends_on_numbers_drawn_in_a_branch(claiming):
    def call(x):
        return x * 2 if drawing(x).sum() > 4.5 else x * 3

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    for seed in range(8):
        torch.manual_seed(seed)
        expected = call(torch.ones(3)), torch.rand(1)
        torch.manual_seed(seed)
        assert all(map(torch.equal, (compiled(torch.ones(3)), torch.rand(1)), expected))
    assert calls_of(compiled)["eager"] == 2


def between_gates(x):
    y = x * 2
    if y.sum() > 3:
        y = y + 1
    z = torch.cond(x.sum() > 0, lambda v: v * y + GLOBAL, lambda v: v - GLOBAL, (y,))
    return (z * 2, y) if z.max() > 5 else (z - 1, y)


WAYS = [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [-1.0, -1.0, -1.0], [-9.0, 0.0, 8.5], [0.1, 0.1, 3.0]]


def test_runs_between_branches_on_data(claiming):
    compiled = torchbay.compile(between_gates, backend=claiming, fullgraph=True)
    for values in WAYS * 2:
        x = torch.tensor(values)
        assert all(map(torch.equal, compiled(x), between_gates(x)))
    graphs = [operators(request.graph) for request in claiming.requests]
    assert graphs.count(["cond"]) >= 1
    assert calls_of(compiled)["graph"] >= len(WAYS)


def test_shares_what_leads_to_a_branch(claiming):
    def call(x):
        z = torch.cond(x.sum() > 0, lambda v: v + GLOBAL, lambda v: v - GLOBAL, (x,))
        return z * 2 if z.max() > 3 else z * 3

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    for sign in (1, -1, 1, -1):
        x = torch.ones(3) * sign
        assert torch.equal(compiled(x), call(x))
    assert [operators(request.graph) for request in claiming.requests].count(["cond"]) == 1
    assert calls_of(compiled) == {"graph": 2, "eager": 2}


def of_rows(x):
    y, rows = x * 2, x.shape[0]
    return torch.cond(x.sum() > 0, lambda v: v * y + rows, lambda v: v - GLOBAL, (x,))


def test_leaves_the_number_of_rows_open():
    compiled = torchbay.compile(of_rows, backend="eager", fullgraph=True)
    for rows in (2, 5, 7):
        for sign in (1, -1):
            x = torch.ones(rows, 3) * sign
            assert torch.equal(compiled(x), of_rows(x))
    assert calls_of(compiled) == {"graph": 4, "eager": 2}


def test_fixes_a_size_that_a_function_alone_uses(claiming):
    def call(x):
        rows = x.shape[0]
        return torch.cond(x.sum() > 0, lambda: GLOBAL * rows, lambda: GLOBAL - rows)

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    for rows in (2, 5, 7, 5):
        for sign in (1, -1):
            x = torch.ones(rows, 3) * sign
            assert torch.equal(compiled(x), call(x))
    assert calls_of(compiled) == {"graph": 5, "eager": 3}


def test_decides_by_a_size_as_python_does(claiming):
    def call(x):
        return torch.cond(x.shape[0] > 4, lambda v: v + 1, lambda v: v - 1, (x,))

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    for rows in (2, 5, 7, 3, 9):
        x = torch.ones(rows, 3)
        assert torch.equal(compiled(x), call(x))
    assert all(operators(request.graph) == [] for request in claiming.requests)
    assert calls_of(compiled)["graph"] >= 2


def scaled_before(x):
    return torch.cond(x.max() > 0, lambda v: v + 1, lambda v: v - 1, (x * x.sum().item(),))


def scaled_after(x):
    z = torch.cond(x.max() > 0, lambda v: v + 1, lambda v: v - 1, (x,))
    return z * z.sum().item()


@pytest.mark.parametrize("function", [scaled_before, scaled_after])
def test_reads_a_number_beside_it_without_another_graph(function, claiming):
    compiled = torchbay.compile(function, backend=claiming, fullgraph=True)
    for values in WAYS * 2:
        assert torch.equal(compiled(torch.tensor(values)), function(torch.tensor(values)))
    assert calls_of(compiled) == {"graph": 9, "eager": 1}


def test_fixes_a_number_that_a_function_uses(claiming):
    def call(x):
        number = x.sum().item()
        return torch.cond(x.max() > 0, lambda v: v + number, lambda v: v - number, (x,))

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    for values in [*WAYS, *WAYS]:
        assert torch.equal(compiled(torch.tensor(values)), call(torch.tensor(values)))
    assert calls_of(compiled) == {"graph": 5, "eager": 5}


def returning_a_count(x):
    return torch.while_loop(lambda i, v: v.sum() < 50, lambda i, v: (i + 1, v * 2), (0, x.abs()))


def branching_on_a_count(x):
    count, y = returning_a_count(x)
    return y + 1 if count > 3 else y * count


@pytest.mark.parametrize("function", [returning_a_count, branching_on_a_count])
def test_leaves_to_eager_a_number_that_a_loop_computes(function, claiming):
    compiled = torchbay.compile(function, backend=claiming)
    for values in ([1.0, 2.0, 3.0], [20.0, 20.0, 20.0]):
        x = torch.tensor(values)
        for found in run_quietly(compiled, x):
            assert tree_leaves(found)[0].__class__ is tree_leaves(function(x))[0].__class__
            assert all(map(_is_equal, tree_leaves(found), tree_leaves(function(x))))
    assert calls_of(compiled)["graph"] == 0


def _is_equal(one, other):
    return one is other or torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("is_wanted", [True, False])
def test_refuses_a_log_sum_exp_of_flash_kernels(is_wanted, claiming):
    def call(x):
        q = x.reshape(1, 1, 3, 1).expand(1, 2, 3, 16).contiguous()
        options = {"BACKEND": "FLASH"}
        aux = flex.AuxRequest(lse=True) if is_wanted else None
        return flex.flex_attention(q, q, q, kernel_options=options, return_aux=aux)

    compiled, x = torchbay.compile(call, backend=claiming), torch.ones(3)
    for found in run_quietly(compiled, x):
        assert all(map(_is_equal, tree_leaves(found), tree_leaves(call(x))))
    assert "flex_attention" in reason_of(compiled)
    assert bool(claiming.requests) is not is_wanted


def test_refuses_the_operator_itself_for_flash_kernels(claiming):
    def call(x):
        q = x.reshape(1, 1, 3, 1).expand(1, 2, 3, 16).contiguous()
        options = {"BACKEND": "FLASH", "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 3, 3, "cpu").as_tuple()
        score = lambda s, b, h, i, j: s  # noqa: E731 - as users write it
        operator = torch.ops.higher_order.flex_attention
        return operator(q, q, q, score, mask, 0.25, options)[0]

    compiled = torchbay.compile(call, backend=claiming)
    run_quietly(compiled, torch.ones(3))
    assert claiming.requests == []
    assert "FLASH" in reason_of(compiled)


def test_undoes_nothing_wrong_in_a_warmup(claiming):
    def call(total, x):
        total.add_(plain(x))
        return total * 2

    compiled, total = torchbay.compile(call, backend=claiming, fullgraph=True), torch.zeros(3)
    compiled.warmup(total, torch.ones(3))
    assert total.tolist() == [0, 0, 0]
    assert compiled(total, torch.ones(3)).tolist() == [4, 4, 4]
    assert total.tolist() == [2, 2, 2]


def test_serves_calls_without_entering_torch_compile(claiming, monkeypatch):
    def entered(*args, **kwargs):
        raise AssertionError("torch.compile was entered")

    compiled = torchbay.compile(nested, backend=claiming, fullgraph=True)
    monkeypatch.setattr(torch, "compile", entered)
    for sign in (1, -1):
        compiled(torch.ones(3) * sign)


@pytest.mark.parametrize("function", KEPT, ids=lambda function: function.__name__)
def test_names_what_an_unclaiming_backend_is_not_given(function, recording):
    compiled = torchbay.compile(function, backend=recording)
    x = torch.tensor([0.5, -1.0, 2.0])
    with pytest.warns(errors.TorchbayWarning, match=KEPT[function]):
        compiled(x)
    assert_right(function, compiled, x)
    assert recording.requests == []
    assert f"{__file__}:" in reason_of(compiled)


def test_raises_where_nothing_but_a_graph_is_accepted(recording):
    compiled = torchbay.compile(plain, backend=recording, fullgraph=True)
    line = plain.__code__.co_firstlineno + 1
    for _ in range(2):
        with pytest.raises(errors.NotServed, match=rf"cond at .*{line} is control flow") as caught:
            compiled(torch.ones(3))
        assert caught.value.result.tolist() == [2, 2, 2]


def test_hands_it_to_the_fallback_that_was_named(recording):
    compiled = torchbay.compile(plain, backend=recording, fallback="eager", fullgraph=True)
    assert_right(plain, compiled, torch.ones(3))
    assert recording.requests == []
    assert calls_of(compiled) == {"graph": 3, "eager": 1}


def test_leaves_it_to_the_fallback_of_a_partial_backend(recording):
    class Partial(type(recording)):
        def supports(self, node):
            return True

    backend = Partial()
    compiled = torchbay.compile(closing_over_tensors, backend=backend, fullgraph=True)
    assert_right(closing_over_tensors, compiled, torch.ones(3))
    assert backend.requests
    assert all(operators(request.graph) == [] for request in backend.requests)


def returning_its_operand(x):
    return torch.cond(x.sum() > 0, lambda v: v, lambda v: v - 1, (x,))


def returning_a_view(x):
    return torch.cond(x.sum() > 0, lambda v: v[:2], lambda v: v[:2] - 1, (x,))


def changing_its_operand(x):
    y = x.clone()
    return torch.cond(x.sum() > 0, lambda v: v.add_(1) * 1, lambda v: v - 1, (y,)), y


def reading_a_number(x):
    return torch.cond(x.sum() > 0, lambda v: v * v.sum().item(), lambda v: v - 1, (x,))


def changing_a_tensor_around_it(x):
    y = x.clone()
    return torch.cond(x.sum() > 0, lambda v: v + y.add_(1), lambda v: v - 1, (x,)), y


@pytest.mark.parametrize(
    "function",
    [
        returning_its_operand,
        returning_a_view,
        changing_its_operand,
        changing_a_tensor_around_it,
        reading_a_number,
    ],
)
def test_leaves_to_eager_what_a_graph_cannot_say(function, claiming):
    compiled, x = torchbay.compile(function, backend=claiming), torch.ones(3)
    run_quietly(compiled, x, times=1)
    assert_right(function, compiled, x)
    assert claiming.requests == []
    assert "cond: a function given to it" in reason_of(compiled)


def test_returns_the_operand_itself_as_eager_does(claiming):
    x = torch.ones(3)
    found = run_quietly(torchbay.compile(returning_its_operand, backend=claiming), x)
    assert all(value is x for value in found)


LOG = []


def logging_branch(v):
    LOG.append(1)
    return v + 1


def reading_data(v):
    return v + 1 if v.sum() > 0 else v


REFUSED_BY_TORCH = {
    "changes Python state": logging_branch,
    "branches on data": reading_data,
    "prints": lambda v: (print("called"), v + 1)[1],
    "returns another dtype": lambda v: v.double(),
    "returns another form": lambda v: (v, v),
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
@pytest.mark.parametrize("is_left", [True, False])
def test_raises_what_eager_raises_when_a_branch(name, is_left, claiming):
    ways = (REFUSED_BY_TORCH[name], lambda v: v - 1)

    def call(x):
        return torch.cond(x.sum() > 0, *(ways if is_left else ways[::-1]), (x,))

    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        call(torch.ones(3))
    LOG.clear()
    for fullgraph in (True, False):
        compiled = torchbay.compile(call, backend=claiming, fullgraph=fullgraph)
        for _ in range(2):
            with pytest.raises(expected.type):
                compiled(torch.ones(3))
    assert claiming.requests == []
    assert LOG == []


def test_computes_the_gradients_of_eager(claiming):
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)

    def call(x):
        return torch.cond(x.sum() > 0, lambda v: v * weight, lambda v: v - weight, (x,))

    compiled = torchbay.compile(call, backend=claiming)
    with torch.enable_grad():
        for sign in (1, -1, 1):
            [result] = run_quietly(compiled, x * sign, times=1)
            [gradient] = torch.autograd.grad(result.sum(), [weight])
            [expected] = torch.autograd.grad(call(x * sign).sum(), [weight])
            assert torch.equal(gradient, expected)
    assert "needs gradients" in reason_of(compiled)


def test_serves_a_graph_with_gradients_enabled_where_none_is_needed(claiming):
    with torch.enable_grad():
        compiled = torchbay.compile(plain, backend=claiming, fullgraph=True)
        assert_right(plain, compiled, torch.ones(3))


def test_serves_a_graph_in_inference_mode(claiming):
    with torch.inference_mode():
        compiled = torchbay.compile(nested, backend=claiming, fullgraph=True)
        assert_right(nested, compiled, torch.ones(3))
        assert compiled(torch.ones(3)).is_inference()


@pytest.mark.parametrize("is_failing", [True, False])
def test_puts_everything_of_torch_back(is_failing, claiming):
    before = torch_hops._hop_compile_and_call, flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG

    def call(x):
        y = attending(x)
        if is_failing:
            raise ZeroDivisionError
        return y

    compiled = torchbay.compile(call, backend=claiming)
    if is_failing:
        with pytest.raises(ZeroDivisionError):
            compiled(torch.ones(3))
    else:
        compiled(torch.ones(3))
    now = torch_hops._hop_compile_and_call, flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    assert now == before


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_leaves_other_threads_to_torch(claiming):
    inside, done, found = threading.Event(), threading.Event(), []

    def call(x):
        y = plain(x)
        inside.set()
        done.wait(60)
        return y + plain(y)

    def other():
        inside.wait(60)
        try:
            # Mistakes that only torch.compile finds.
            torch.cond(torch.tensor(True), reading_data, lambda v: v, (torch.ones(3),))
        except Exception as error:  # noqa: BLE001 - whatever torch raises
            found.append(type(error).__name__)
        with torch.no_grad():
            found.append(plain(torch.ones(3)).tolist())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    result = torchbay.compile(call, backend=claiming)(torch.ones(3))
    thread.join()
    assert found == ["UncapturedHigherOrderOpError", [2, 2, 2]]
    assert result.tolist() == [5, 5, 5]


def test_captures_in_several_threads_at_once(claiming):
    start, results = threading.Barrier(4), {}

    def run(index):
        compiled = torchbay.compile(nested, backend=claiming, fullgraph=True)
        start.wait()
        with torch.no_grad():
            results[index] = [compiled(torch.ones(3) * sign) for sign in (1, -1, 1)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [nested(torch.ones(3) * sign) for sign in (1, -1, 1)]
    for index in range(4):
        assert all(map(torch.equal, results[index], expected))


def test_refuses_an_operator_with_an_effect_by_name(claiming, capsys):
    def call(x):
        torch_print("sum {}", x.sum())
        return x + 1

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    with pytest.raises(errors.NotServed, match=r"print .*test_control_flow.py"):
        compiled(torch.ones(3))
    assert capsys.readouterr().out.count("sum") == 1


def test_refuses_an_operator_with_an_effect_inside_a_branch(claiming):
    def left(v):
        torch_print("in a branch")
        return v + 1

    def call(x):
        return torch.cond(x.sum() > 0, left, lambda v: v - 1, (x,))

    compiled = torchbay.compile(call, backend=claiming)
    run_quietly(compiled, torch.ones(3))
    assert claiming.requests == []
    assert "print" in reason_of(compiled)


def test_refuses_an_unknown_operator_by_name(claiming):
    def call(x):
        return torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    with pytest.raises(errors.NotServed, match=r"out_dtype .*test_control_flow.py"):
        compiled(torch.ones(3, 3, dtype=torch.int8))


def test_names_a_function_under_torch_compile(claiming):
    @torch.compile(backend="eager")
    def inner(x):
        return x * 2

    def call(x):
        return inner(x) + 1

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    with pytest.raises(errors.NotServed, match=r"inner, under torch.compile.*test_control_flow"):
        compiled(torch.ones(3))


def test_runs_a_predicate_of_python_as_python(claiming):
    def call(x):
        return torch.cond(x.shape[0] > 2, lambda v: v + 1, lambda v: v - 1, (x,))

    compiled = torchbay.compile(call, backend=claiming, fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert compiled(torch.ones(2)).tolist() == [0, 0]
    assert all(operators(request.graph) == [] for request in claiming.requests)


def test_serves_associative_scan_in_plain_operators(recording):
    compiled = torchbay.compile(associating, backend=recording, fullgraph=True)
    assert_right(associating, compiled, torch.tensor([0.5, -1.0, 2.0]))
