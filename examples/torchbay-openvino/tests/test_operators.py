"""Every conversion gives PyTorch's results, for numbers and for what is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from torchbay_openvino import torchbay_make_backend

import torchbay

aten = torch.ops.aten
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.5, 0.5, -0.3, 7.0, 1e-40, 3e38)


def odd(*sizes):
    """A tensor of odd numbers in an order of their own, long enough for every vector width."""
    count = math.prod(sizes)
    generator = torch.Generator().manual_seed(count)
    order = torch.randint(len(ODD), (count,), generator=generator)
    return torch.tensor(ODD)[order].reshape(sizes)


def plain(*sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def truth(*sizes):
    return plain(*sizes) > 0


def same(function, *inputs):
    """Assert that OpenVINO alone serves the function, twice, and gives eager's results."""
    compiled = torchbay.compile(function, backend="openvino", fullgraph=True, fallback=None)
    before = [each.clone() for each in inputs]
    expected = function(*inputs)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(*inputs), expected, equal_nan=True)
    assert torchbay.explain(compiled).calls["graph"] == 2
    torch.testing.assert_close(list(inputs), before, equal_nan=True, rtol=0, atol=0)


ELEMENTWISE = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_max": lambda x: x.clamp_max(0.5),
    "clamp_min": lambda x: x.clamp_min(0.5),
    "clone": torch.clone,
    "cos": lambda x: torch.cos(x.clamp(-100, 100)),
    "div": lambda x: x / 3,
    "elu": lambda x: functional.elu(x, 0.5),
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "gelu": lambda x: functional.gelu(x.clamp(-100, 100)),
    "gelu_tanh": lambda x: functional.gelu(x.clamp(-100, 100), approximate="tanh"),
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "isnan": torch.isnan,
    "leaky_relu": functional.leaky_relu,
    "log": torch.log,
    "masked_fill": lambda x: x.masked_fill(x > 0, -math.inf),
    "neg": torch.neg,
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "pow_minus": lambda x: x**-1.5,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "round": torch.round,
    "rsqrt": torch.rsqrt,
    "rsub": lambda x: 2 - x,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": lambda x: torch.sin(x.clamp(-100, 100)),
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "to_bool": lambda x: x.bool(),
    "to_float": lambda x: (x > 0).float(),
}


@pytest.mark.parametrize("sizes", [(), (1,), (37,), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_computes_elementwise(name, sizes):
    same(ELEMENTWISE[name], odd(*sizes))


BINARY = {
    "add": torch.add,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "div": lambda x, y: x / torch.where(y.abs() < 1e-30, 1.0, y),
    "eq": torch.eq,
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
    "lt": torch.lt,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "ne": torch.ne,
    "pow": torch.pow,
    "sub": torch.sub,
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_number": lambda x, y: torch.where(x > y, x, 0.0),
}


@pytest.mark.parametrize("sizes", [((), ()), ((4, 3), (1,)), ((5,), ())], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_computes_and_broadcasts(name, sizes):
    first, second = sizes
    same(BINARY[name], odd(*first), odd(*second))


@pytest.mark.parametrize("name", BINARY)
def test_computes_every_pair_of_odd_numbers(name):
    same(BINARY[name], torch.tensor(ODD)[:, None], torch.tensor(ODD))


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_compares_with_numbers(name):
    same(lambda x: getattr(torch, name)(x, 0.5), odd(37))


@pytest.mark.parametrize(
    "function",
    [
        torch.logical_and,
        torch.logical_or,
        torch.logical_xor,
        lambda x, y: x & ~y,
        lambda x, y: x | y,
    ],
)
def test_computes_truth(function):
    same(function, truth(5, 7), truth(7))


REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(-1),
    "sum_keep": lambda x: x.sum((0, 2), keepdim=True),
    "mean": lambda x: x.mean(),
    "mean_dim": lambda x: x.mean((0, 1)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, dim=1),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x > -9).all(),
    "softmax": lambda x: x.softmax(-1),
    "softmax_inner": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
}


@pytest.mark.parametrize("fill", [None, *ODD[:3]])
@pytest.mark.parametrize("width", [1, 7, 33])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduces(name, width, fill):
    x = plain(2, 3, width)
    if fill is not None:
        x[0, 1, width // 2] = fill
        x[1] = fill
    same(REDUCTIONS[name], x)


SHAPES = {
    "view": lambda x: x.view(6, -1) + 1,
    "permute": lambda x: x.permute(2, 0, 1).contiguous(),
    "transpose": lambda x: x.transpose(0, -1) * 2,
    "expand": lambda x: x[:, :1].expand(-1, 5, -1) + 1,
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "unsqueeze": lambda x: x.unsqueeze(-2) + 1,
    "squeeze": lambda x: x[:, :1].squeeze(1) + 1,
    "select": lambda x: x[:, -1] + 1,
    "slice": lambda x: x[1:, ::2, -3:-1] + 1,
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "stack": lambda x: torch.stack([x, x + 1], -1),
    "split": lambda x: [part + 1 for part in x.split(2, 1)],
    "split_sizes": lambda x: [part + 1 for part in x.split([1, 2], 1)],
    "chunk": lambda x: [part.contiguous() for part in x.chunk(2, 2)],
    "unbind": lambda x: [part + 1 for part in x.unbind(1)],
    "pad": lambda x: functional.pad(x, (1, 2, 0, 1), value=-1.0),
    "ones_like": lambda x: x + torch.ones_like(x),
    "full": lambda x: x + torch.full((4,), 2.5),
}


@pytest.mark.parametrize("name", SHAPES)
def test_moves(name):
    same(SHAPES[name], odd(2, 3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.t(), x + 1),
        lambda x: (x.clone(), x.clone()),
        lambda x: [y := x + 1, y.t(), y[1:]],
        lambda x: [*(x * 2).split(2)],
        lambda x: x.t() * 2,
        lambda x: (x.t().clone(), x @ x.t()),
    ],
)
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t(), lambda x: x[::2, 1:]])
def test_lays_results_out_as_pytorch_does(function, layout):
    x = layout(plain(4, 6))
    compiled = torchbay.compile(function, backend="openvino", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        results, expected = compiled(x), function(x)
    for result, wanted in zip([*results], [*expected], strict=True):
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride()


MODULES = {
    "linear": (torch.nn.Linear(6, 3), (5, 6)),
    "linear_3d": (torch.nn.Linear(6, 3, bias=False), (2, 5, 6)),
    "layer_norm": (torch.nn.LayerNorm(6), (2, 5, 6)),
    "group_norm": (torch.nn.GroupNorm(2, 6), (2, 6, 4, 4)),
    "batch_norm": (torch.nn.BatchNorm2d(6).eval(), (2, 6, 4, 4)),
    "conv1d": (torch.nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (torch.nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 8)),
    "conv_groups": (torch.nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False), (2, 4, 9, 8)),
    "avg_pool": (torch.nn.AvgPool2d(2, padding=1), (2, 4, 8, 8)),
    "global_pool": (torch.nn.AdaptiveAvgPool2d(1), (2, 4, 8, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_runs_modules(name):
    module, sizes = MODULES[name]
    same(module.requires_grad_(requires_grad=False), plain(*sizes))


@pytest.mark.parametrize("odd_one", ODD[:3])
@pytest.mark.parametrize("name", MODULES)
def test_runs_modules_on_an_odd_number(name, odd_one):
    module, sizes = MODULES[name]
    x = plain(*sizes)
    x.view(-1)[x.numel() // 2] = odd_one
    same(module.requires_grad_(requires_grad=False), x)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_attends_to_nan(place):
    # PyTorch's own kernel loses the NaN where there are fewer keys than fit a vector.
    inputs = [*plain(3, 2, 4, 16, 8)]
    inputs[place][1, 2, 3, 4] = math.nan
    same(functional.scaled_dot_product_attention, *inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attends(causal, masked):
    query, key, value = plain(3, 2, 4, 5, 8)
    mask = torch.zeros(2, 1, 5, 5)
    mask[..., 3:] = -math.inf
    mask[0, 0, 1] = -math.inf
    if causal and masked:
        pytest.skip("PyTorch takes one or the other")
    given = {"attn_mask": mask} if masked else {}
    same(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **given),
        query,
        key,
        value,
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embeds(dtype):
    same(functional.embedding, torch.tensor([[0, 3], [1, 3]], dtype=dtype), plain(4, 5))


@pytest.mark.parametrize("row", [-1, 4, 2**32 + 1])
def test_embedding_refuses_a_row_that_does_not_exist(row):
    table = plain(4, 5)
    compiled = torchbay.compile(functional.embedding, backend="openvino", fullgraph=True)
    compiled(torch.tensor([0, 3]), table)
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([0, row]), table)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.long() + 1,
        lambda x: x.double() + 1,
        lambda x: torch.cumsum(x, 0),
        lambda x: x[:0] + 1,
        torch.rand_like,
        lambda x: functional.dropout(x, 0.5),
    ],
)
def test_declines_what_it_would_get_wrong(function):
    compiled = torchbay.compile(function, backend="openvino", fullgraph=True, fallback=None)
    with pytest.raises(torchbay.errors.TorchbayError):
        compiled(plain(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cumsum(x.exp(), 0).t() + 1,
        lambda x: torch.cat([x * 2, x[:0]]).relu() + x[:0].sum(),
        lambda x: (x * 3, x.argmax(-1) + 1, (x + 1).long()),
        lambda x: [part.sort().values * 2 for part in (x + 1).split(2)],
    ],
)
def test_leaves_the_rest_to_the_fallback(function):
    x = plain(4, 6)
    compiled = torchbay.compile(function, backend="openvino", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        torch.testing.assert_close(compiled(x), function(x))
    assert torchbay.explain(compiled).calls["graph"] == 1


def test_reads_weights_that_changed_since():
    linear = torch.nn.Linear(3, 3).requires_grad_(requires_grad=False)
    compiled = torchbay.compile(linear, backend="openvino", fullgraph=True)
    x = plain(2, 3)
    compiled(x), compiled(x)
    linear.weight.mul_(2)
    torch.testing.assert_close(compiled(x), linear(x))
    linear.weight = torch.nn.Parameter(plain(3, 3), requires_grad=False)
    torch.testing.assert_close(compiled(x), linear(x))


def test_keeps_results_of_earlier_calls():
    double = torchbay.compile(lambda x: x * 2, backend="openvino", fullgraph=True)
    results = [double(torch.full((64,), float(number))) for number in range(5)]
    assert [result[0].item() for result in results] == [0, 2, 4, 6, 8]


def test_names_itself():
    assert torchbay_make_backend().name == "openvino"
