"""The plugins that claim control flow compute what eager computes; the others are not given any."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as torch_map
from torch.nn.attention.flex_attention import flex_attention

import torchbay
from torchbay import errors
from torchbay._registry import choose
from torchbay.testing._subject import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")

CLAIMING = ["eager", pytest.param("inductor_triton", marks=pytest.mark.slow)]
WEIGHT = torch.tensor([0.5, 1.5, 2.5])


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def choosing(x):
    y = x * 2

    def left(v):
        inner = torch.cond(v.max() > y.min(), lambda u: u * y, lambda u: u - y, (v,))
        return inner + WEIGHT

    return torch.cond(x.sum() > 0, left, lambda v: (v * WEIGHT).relu_(), (x,))


def looping(x):
    limit = WEIGHT.sum() + 10
    return torch.while_loop(
        lambda i, v: v.sum() < limit, lambda i, v: (i + 1, v * 2), (torch.zeros(()), x.abs() + 1)
    )


def scanning(x):
    rows = torch.stack([x, x * 2, x * 3])
    return scan(lambda c, v: (c * 0.5 + v + WEIGHT, c * WEIGHT), x, rows)


def attending(x):
    q = x.reshape(1, 1, 3, 1).expand(1, 2, 3, 16).contiguous()
    return flex_attention(q, q * 2, q * 3, score_mod=lambda s, b, h, i, j: s + WEIGHT[i] * (i - j))


def counting(x):
    return torch.while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, v * 2), (0, x.abs() + 1))[1]


def mapping(x):
    return torch_map(lambda row, y: row * y, torch.stack([x, x * 2]), x)


def together(x):
    return choosing(x), looping(x), scanning(x), attending(x)


@pytest.mark.parametrize("name", CLAIMING)
def test_computes_what_eager_computes(name: str):
    compiled = torchbay.compile(together, backend=name, fullgraph=True)
    x = torch.tensor([0.5, -1.0, 2.0])
    for sign in (1, -1, 1):
        torch.testing.assert_close(compiled(x * sign), together(x * sign))
    assert dict(torchbay.explain(compiled).calls) == {"graph": 2, "eager": 1}


@pytest.mark.parametrize("function", [counting, mapping])
def test_eager_runs_what_else_is_kept(function):
    compiled = torchbay.compile(function, backend="eager", fullgraph=True)
    for factor in (1.0, 3.0):
        x = torch.full((3,), factor)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "named"), [(counting, "while_loop"), (mapping, "map_impl")])
def test_inductor_declines_what_it_does_not_take(function, named: str):
    compiled = torchbay.compile(function, backend="inductor_triton", fullgraph=True)
    with pytest.raises(errors.NotServed, match=f"{named}, is control flow") as caught:
        compiled(torch.ones(3))
    torch.testing.assert_close(caught.value.result, function(torch.ones(3)))


def test_aoti_is_given_none():
    compiled = torchbay.compile(choosing, backend="aoti", fullgraph=True)
    with pytest.raises(errors.NotServed, match="cond at .* is control flow"):
        compiled(torch.ones(3))


def request_for(name: str):
    recorder = Recorder(choose(name).capabilities)
    torchbay.compile(choosing, backend=recorder, fullgraph=True).warmup(torch.ones(3))
    [request] = recorder.requests
    return attrs.evolve(request, options=choose(name).options())


def nodes_of(module):
    graphs = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("name", CLAIMING)
def test_leaves_the_functions_of_a_request_alone(name: str):
    request = request_for(name)
    before = [(node.format_node(), sorted(node.meta)) for node in nodes_of(request.graph)]
    choose(name).compile(request)
    assert [(node.format_node(), sorted(node.meta)) for node in nodes_of(request.graph)] == before


def test_eager_keeps_no_fake_tensor():
    executable = choose("eager").compile(request_for("eager"))
    nodes = nodes_of(executable.run.__self__)
    assert len(nodes) > 20
    assert not any(node.meta for node in nodes)
