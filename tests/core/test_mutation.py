"""What a call changes, the graph changes as well: once, in the same place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchbay


@pytest.fixture(params=["recording", "writing"])
def backend(request):
    return request.getfixturevalue(request.param)


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def swap(x, y):
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return x


CALLS = {
    "in-place": lambda x, y: x.add_(y),
    "in-place and result": lambda x, y: (x.mul_(2), x + y),
    "two writes": lambda x, y: (x.add_(1), y.mul_(x), x.sub_(3)),
    "through a view": lambda x, y: x[1:].add_(y[1:]) * 2,
    "through a view of a view": lambda x, y: x.view(1, 3)[:, 1:].t().mul_(5).sum(),
    "index": lambda x, y: (x.__setitem__(0, 7.0), x + y)[1],
    "mask": lambda x, y: (x.__setitem__(x > 0, 7.0), x + y)[1],
    "out": lambda x, y: torch.add(x, y, out=y),
    "out of three": lambda x, y: (torch.mul(x, 2, out=x), torch.mul(x, 2, out=y), x + y)[2],
    "copy": lambda x, y: x.copy_(y),
    "copy there and back": lambda x, y: (x.copy_(y + 1), y.copy_(x + 1), x.copy_(y))[0],
    "swap": swap,
    "data": lambda x, y: (x.data.mul_(2), x + y)[1],
    "detach": lambda x, y: (x.detach().mul_(2), x + y)[1],
    "fill": lambda x, y: (x.zero_(), y.fill_(3))[1],
    "written with another input's value": lambda x, y: (x.copy_(y), None)[1],
    "relu_": lambda x, y: nn.functional.relu_(x) + y,
    "scatter": lambda x, y: x.scatter_(0, torch.tensor([0]), y[:1]) * 1,
    "index_put": lambda x, y: x.index_put_((torch.tensor([0, 0]),), torch.ones(2), accumulate=True) * 1,
    "foreach": lambda x, y: (torch._foreach_add_([x, y], 1.0), x * y)[1],
    "transposed there and back": lambda x, y: (x.unsqueeze_(0), x.squeeze_(0), x + y)[2],
    "nothing in the end": lambda x, y: (x.add_(1), x.sub_(1), y)[2],
    "in chunks": lambda x, y: sum(part.add_(1) for part in x.chunk(3)) * 1,
    "normal": lambda x, y: (x.normal_(), y.uniform_(), x.bernoulli_(0.5))[0],
    "dropout off": lambda x, y: nn.functional.dropout(x, 0.5, False).add_(y),
    "dropout in place": lambda x, y: nn.functional.dropout(x, 0.5, True, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_changes_inputs_as_eager_does(name, backend):
    function = CALLS[name]
    compiled = torchbay.compile(function, backend=backend)
    for seed in range(4):
        mine, theirs = ((torch.arange(3.0) - seed, torch.ones(3) * seed) for _ in range(2))
        torch.manual_seed(seed)
        found = compiled(*mine)
        torch.manual_seed(seed)
        expected = function(*theirs)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        check_results(found, expected, mine, theirs)


def check_results(found, expected, mine, theirs):
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            check_results(one, other, mine, theirs)
    elif expected is not None:
        assert torch.equal(found, expected)
        for one, other in zip(mine, theirs, strict=True):
            assert (found is one) == (expected is other)
            assert (found.data_ptr() == one.data_ptr()) == (expected.data_ptr() == other.data_ptr())


@pytest.mark.parametrize(
    "name",
    [
        "in-place",
        "in-place and result",
        "two writes",
        "index",
        "out",
        "copy",
        "data",
        "swap",
        "normal",
    ],
)
def test_serves_changes_from_a_graph(name, backend):
    compiled = torchbay.compile(CALLS[name], backend=backend)
    for _ in range(3):
        compiled(torch.ones(3), torch.ones(3))
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_doubles_the_callers_tensor_behind_a_dropout_that_does_nothing(backend):
    """https://github.com/pytorch/pytorch/issues/195422"""

    def call(x):
        y = nn.functional.dropout(x, 0.5, False)
        y += y
        return y

    compiled = torchbay.compile(call, backend=backend)
    for _ in range(3):
        x = torch.ones(3)
        assert compiled(x) is x
        assert (x == 2).all()


def test_gives_the_graph_its_writes_only_if_the_backend_claims_mutation(recording, writing):
    def call(x, y):
        y.add_(x)
        return x + 1

    for backend in (recording, writing):
        torchbay.compile(call, backend=backend)(torch.ones(1), torch.ones(1))
    (plain,), (claimed,) = recording.requests, writing.requests
    copy_ = torch.ops.aten.copy_.default
    assert not plain.mutated
    assert not plain.graph.graph.find_nodes(op="call_function", target=copy_)
    assert len(plain.graph.graph.output_node().args[0]) == 2
    assert claimed.mutated == {1}
    assert len(claimed.graph.graph.find_nodes(op="call_function", target=copy_)) == 1
    assert len(claimed.graph.graph.output_node().args[0]) == 1


def test_moves_statistics_of_a_batch_norm_once_per_call(backend):
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    expected = copy.deepcopy(module)
    compiled = torchbay.compile(module, backend=backend)
    for call in range(4):
        x = torch.randn(2, 2, 4, 4)
        assert torch.equal(compiled(x), expected(x))
        assert module[1].num_batches_tracked.item() == call + 1
        for mine, theirs in zip(module.buffers(), expected.buffers(), strict=True):
            assert torch.equal(mine, theirs)
    assert served(compiled) == {"graph": 3, "eager": 1}


@pytest.mark.parametrize("momentum", [None, 0.3])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_moves_statistics_whatever_the_momentum(momentum, backend):
    module = nn.BatchNorm1d(3, momentum=momentum)
    expected = copy.deepcopy(module)
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(4):
        x = torch.randn(5, 3)
        assert torch.equal(compiled(x), expected(x))
        assert torch.equal(module.running_var, expected.running_var)


def test_writes_buffers_of_the_module(backend):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count += 1
            return x * self.count

    module = Counter()
    compiled = torchbay.compile(module, backend=backend)
    assert [compiled(torch.ones(1)).item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert module.count.item() == 5
    assert served(compiled) == {"graph": 4, "eager": 1}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_never_serves_overlapping_inputs_from_a_graph_for_distinct_ones(backend):
    """https://github.com/pytorch/pytorch/issues/139789"""

    def call(x, y):
        x.mul_(2)
        return x + y

    compiled = torchbay.compile(call, backend=backend)
    for _ in range(2):
        for overlaps in (False, True, True):
            bases = [torch.arange(6.0) for _ in range(2)]
            pairs = [(b[:4], b[2:]) if overlaps else (b[:4], b[2:].clone()) for b in bases]
            assert torch.equal(compiled(*pairs[0]), call(*pairs[1]))
            assert torch.equal(*bases)


@pytest.mark.parametrize("first", ["same", "distinct"])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_tells_one_tensor_given_twice_from_two(first, backend):
    def call(x, y):
        x.add_(1)
        y.mul_(2)
        return x - y

    compiled = torchbay.compile(call, backend=backend)
    kinds = ["same", "distinct"] if first == "same" else ["distinct", "same"]
    for kind in kinds * 2:
        mine, theirs = torch.ones(3), torch.ones(3)
        other = [mine, theirs] if kind == "same" else [torch.ones(3), torch.ones(3)]
        assert torch.equal(compiled(mine, other[0]), call(theirs, other[1]))
        assert torch.equal(mine, theirs)
        assert torch.equal(*other)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_sees_an_input_that_is_the_modules_own_buffer(backend):
    class Adder(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total.add_(1)
            return x + self.total

    modules = [Adder(), Adder()]
    compiled = torchbay.compile(modules[0], backend=backend)
    for given in ("other", "own", "view", "other", "own", "view"):
        inputs = [
            {"other": torch.ones(3), "own": module.total, "view": module.total.view(3)}[given]
            for module in modules
        ]
        assert torch.equal(compiled(inputs[0]), modules[1](inputs[1]))
        assert torch.equal(modules[0].total, modules[1].total)


REFUSED = {
    "resize_": lambda x: x.resize_(12).zero_(),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": lambda x: x.unsqueeze_(0),
    "data": lambda x: (setattr(x, "data", torch.full((2, 3), 5.0)), x + 1)[1],
    "set_": lambda x: x.set_(torch.ones(2, 3)),
    "requires_grad_": lambda x: x.requires_grad_(),
    "requires_grad": lambda x: setattr(x, "requires_grad", True),
    "grad": lambda x: setattr(x, "grad", torch.ones(2, 3)),
    "attribute": lambda x: setattr(x, "note", 1),
    "view of what was changed": lambda x: x.add_(1)[0],
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_keeps_changes_no_graph_can_make(name, backend):
    function = REFUSED[name]
    compiled = torchbay.compile(function, backend=backend)
    for _ in range(3):
        mine, theirs = torch.ones(2, 3), torch.ones(2, 3)
        found, expected = compiled(mine), function(theirs)
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
        assert mine.requires_grad == theirs.requires_grad
        assert (mine.grad is None) == (theirs.grad is None)
        assert vars(mine) == vars(theirs)
        assert (found is mine) == (expected is theirs)
        if expected is not None:
            assert torch.equal(found, expected)
            found.fill_(9)
            expected.fill_(9)
            assert torch.equal(mine, theirs)


def test_keeps_what_happened_before_an_exception(backend):
    def call(x, y):
        x.add_(1)
        if y.sum() > 0:
            raise KeyError("late")
        return x

    compiled = torchbay.compile(call, backend=backend)
    compiled(torch.ones(1), torch.zeros(1))
    compiled(torch.ones(1), torch.zeros(1))
    x = torch.ones(1)
    with pytest.raises(KeyError):
        compiled(x, torch.ones(1))
    assert x.item() == 2


def test_changes_expanded_and_strided_inputs_in_place(backend):
    compiled = torchbay.compile(lambda x: x.add_(1), backend=backend)
    for _ in range(3):
        base = torch.zeros(6)
        compiled(base[::2])
        assert torch.equal(base, torch.tensor([1.0, 0, 1, 0, 1, 0]))


def test_bumps_versions_so_that_autograd_notices(backend):
    compiled = torchbay.compile(lambda x: x.add_(1), backend=backend)
    compiled(torch.zeros(3))
    weight, factor = nn.Parameter(torch.ones(3)), torch.ones(3)
    with torch.enable_grad():
        loss = (weight * factor).sum()
    compiled(factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
