"""Branches on tensor data: outcomes are checked before anything with an effect runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def branch(x):
    if x.sum() > 0:
        return x * 2
    return x * 3


def check(function, backend, inputs, expected_calls=None):
    compiled = torchbay.compile(function, backend=backend)
    for given in inputs:
        arguments = given if isinstance(given, tuple) else (given,)
        assert_same(compiled(*arguments), function(*arguments))
    if expected_calls is not None:
        assert served(compiled) == expected_calls
    return compiled


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


UP, DOWN = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])


@pytest.mark.parametrize("order", [(UP, DOWN), (DOWN, UP)])
def test_takes_a_branch_both_ways_in_both_orders(order, recording):
    compiled = check(branch, recording, [*order, *order, UP, UP, DOWN], {"graph": 5, "eager": 2})
    reports = torchbay.explain(compiled).specializations
    assert len(reports) == 2
    assert all(__file__ in report.gates[0] for report in reports)


def loop(x):
    count = 0
    while x.sum() < 100:
        x = x * 2
        count += 1
    return x, count


def test_unrolls_a_loop_on_data(recording):
    compiled = check(
        loop, recording, [UP, UP, UP * 3, UP, UP * 50, UP * 3], {"graph": 3, "eager": 3}
    )
    assert sorted(len(r.gates) for r in torchbay.explain(compiled).specializations) == [1, 5, 7]


READERS = {
    "item": lambda x: x * x[0].item(),
    "tolist": lambda x: x * x.tolist()[0],
    "nested tolist": lambda x: x * x.reshape(1, 2).tolist()[0][1],
    "bool": lambda x: x + bool(x[0] > 0),
    "int": lambda x: x + int(x[0]),
    "float": lambda x: x + float(x[0]),
    "complex": lambda x: x + complex(x[0]).real,
    "index": lambda x: [10, 20, 30][(x[0].abs().long() % 3)] + x,
    "range": lambda x: sum((x for _ in range(x[0].abs().long())), x),
    "equal": lambda x: x * 2 if torch.equal(x, UP) else x * 3,
    "is_nonzero": lambda x: x * 2 if torch.is_nonzero(x[0]) else x * 3,
    "all": lambda x: x * 2 if (x > 0).all() else x * 3,
    "allclose": lambda x: x * 2 if torch.allclose(x, UP) else x * 3,
    "max": lambda x: x * 2 if max(x[0], x[1]) is not None and x[1] > x[0] else x * 3,
    "slice": lambda x: x[: x[0].abs().long()] + 1,
    "repeat": lambda x: x.repeat(int(x[0].abs())),
    "not": lambda x: x * 2 if not (x < 0).any() else x * 3,
    "and": lambda x: x * 2 if x[0] > 0 and x[1] > 1 else x * 3,
    "assert": lambda x: (_assert(x[0] != 0), x * 2)[1],
    "format": lambda x: (x * 2, f"{x[0].item():.2f}"),
}


def _assert(condition):
    assert condition


@pytest.mark.parametrize("name", READERS)
def test_checks_a_value_read_by(name, recording):
    inputs = [UP, UP, DOWN, UP * 2, DOWN, UP, UP * 2]
    check(READERS[name], recording, inputs)


@pytest.mark.parametrize(
    "name", ["item", "tolist", "bool", "int", "float", "index", "equal", "is_nonzero", "all"]
)
def test_serves_a_value_read_by(name, recording):
    check(READERS[name], recording, [UP, UP, UP], {"graph": 2, "eager": 1})


def test_tells_nan_and_signed_zeros_apart(recording):
    def call(x):
        return x.nan_to_num(), str(x[0].item())

    inputs = [torch.tensor([value]) for value in (0.0, -0.0, float("nan"), 0.0, -0.0, float("nan"))]
    check(call, recording, inputs, {"graph": 3, "eager": 3})


SIZES = {
    "nonzero": lambda x: x.nonzero() + 1,
    "mask": lambda x: x[x > 0] * 2,
    "unique": lambda x: x.unique() + 1,
    "size used": lambda x: torch.zeros(x.nonzero().shape[0]) + 1,
    "size returned": lambda x: x.nonzero().shape[0],
    "branch on a size": lambda x: x * 2 if x.nonzero().shape[0] > 1 else x * 3,
    "size of a mask": lambda x: (x[x > 0] * 2, len(x[x > 0])),
    "loop": lambda x: sum((row.sum() for row in x.nonzero()), x),
    "where": lambda x: torch.where(x > 0)[0],
    "repeat_interleave": lambda x: x.repeat_interleave((x > 0).long()),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_follows_sizes_that_depend_on_data(name, recording):
    check(SIZES[name], recording, [UP, UP, torch.tensor([0.0, 3.0]), UP, torch.tensor([0.0, 0.0])])


def test_serves_data_dependent_sizes_from_one_graph(recording):
    inputs = [UP, torch.tensor([0.0, 3.0]), UP]
    check(SIZES["nonzero"], recording, inputs, {"graph": 2, "eager": 1})


def test_replays_what_was_read_before_it_changed(recording):
    def call(x):
        y, total = x.clone(), x.sum()
        if total > 0:
            y.zero_()
            total.zero_()
        if total > 0:
            return y + 1
        return y, total

    check(call, recording, [UP, UP, DOWN, DOWN, UP], {"graph": 3, "eager": 2})


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        if x.sum() > 0:
            return x + self.count
        self.count += 10
        if self.count > 30:
            self.count.zero_()
        return x - self.count


@pytest.mark.parametrize("backend", ["recording", "writing"])
def test_moves_a_buffer_once_per_call_also_on_a_miss(backend, request):
    module = Counting()
    expected = copy.deepcopy(module)
    compiled = torchbay.compile(module, backend=request.getfixturevalue(backend))
    for x in (UP, UP, DOWN, UP, DOWN, DOWN, DOWN, UP, DOWN):
        assert torch.equal(compiled(x), expected(x))
        assert torch.equal(module.count, expected.count)


def test_changes_an_input_once_also_on_a_miss(recording):
    def call(x):
        x.add_(1)
        if x.sum() > 3:
            x.mul_(2)
        return x

    compiled = torchbay.compile(call, backend=recording)
    for given in (UP, UP, DOWN, UP, DOWN):
        mine, theirs = given.clone(), given.clone()
        assert compiled(mine) is mine
        call(theirs)
        assert torch.equal(mine, theirs)


def test_leaves_generators_alone_on_a_miss(recording):
    def call(x):
        noise = torch.rand(2)
        if x.sum() > 0:
            return noise + torch.rand(2)
        return -noise

    compiled = torchbay.compile(call, backend=recording)
    given = (UP, UP, DOWN, UP, DOWN, DOWN, UP)
    torch.manual_seed(3)
    found = [compiled(x) for x in given]
    torch.manual_seed(3)
    assert all(torch.equal(one, call(x)) for one, x in zip(found, given, strict=True))
    assert served(compiled) == {"graph": 5, "eager": 2}


def test_draws_once_for_a_branch_on_random_numbers(recording):
    def call(x):
        noise = torch.rand(2)
        return x * 2 + noise if torch.rand(1).item() > 0.5 else x * 3

    compiled = torchbay.compile(call, backend=recording)
    torch.manual_seed(0)
    found = [compiled(UP) for _ in range(12)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert all(torch.equal(result, call(UP)) for result in found)
    assert torch.equal(torch.get_rng_state(), state)
    assert served(compiled) == {"graph": 10, "eager": 2}


def test_reads_state_in_branches_live(recording):
    threshold = nn.Parameter(torch.zeros(1))

    def call(x):
        return x * 2 if x.sum() > threshold else x * 3

    compiled = torchbay.compile(call, backend=recording)
    for value in (0.0, 0.0, 50.0, 50.0, 0.0):
        threshold.fill_(value)
        assert torch.equal(compiled(UP), call(UP))
    assert served(compiled) == {"graph": 3, "eager": 2}


def test_stops_at_64_outcomes(recording):
    def call(x, n):
        return x + int(n)

    compiled = torchbay.compile(call, backend=recording)
    with pytest.warns(errors.TorchbayWarning, match="64 outcomes") as caught:
        for number in range(70):
            assert compiled(torch.zeros(1), torch.tensor(number)).item() == number
    assert len(caught) == 1
    assert len(torchbay.explain(compiled).specializations) == 64
    assert compiled(torch.zeros(1), torch.tensor(3)).item() == 3
    assert served(compiled) == {"graph": 1, "eager": 70}


def test_counts_outcomes_of_one_set_of_guards_once(recording):
    compiled = torchbay.compile(lambda x, k: branch(x) + k, backend=recording, recompile_limit=2)
    for k in (1, 2):
        for x in (UP, DOWN, UP, DOWN):
            assert torch.equal(compiled(x, k), branch(x) + k)
    assert served(compiled) == {"graph": 4, "eager": 4}


def test_says_in_a_recompile_which_branch_went_another_way(recording):
    compiled = check(branch, recording, [UP, DOWN])
    (reasons,) = torchbay.explain(compiled).recompiles
    assert "branch on data" in reasons[0]
    assert __file__ in reasons[0]


def test_raises_what_the_user_raises_on_data(recording):
    def call(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x + 1

    compiled = torchbay.compile(call, backend=recording)
    compiled(UP)
    compiled(UP)
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            compiled(DOWN)
    assert torch.equal(compiled(UP), UP + 1)
