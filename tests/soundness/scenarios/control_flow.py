"""Data-dependent control flow: gates take the way that eager takes, without a graph break."""

from __future__ import annotations

import math

import torch
from torch import nn

from scenarios._scenario import (
    Program,
    calls,
    change,
    constant,
    each,
    given,
    normal,
    scenario,
)

UP, DOWN = constant([1.0, 2.0, 3.0]), constant([-1.0, -2.0, -3.0])
BOTH = each(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, -2.0, -3.0]))


def _branch(x):
    if x.sum() > 0:
        return x * 2
    return x * 3


@scenario(calls(UP), calls(DOWN), calls(UP), at_most=2)
def takes_a_branch_both_ways():
    return _branch


@scenario(calls(DOWN), calls(UP), calls(DOWN), at_most=2)
def takes_a_branch_both_ways_whichever_comes_first():
    return _branch


@scenario(calls(BOTH, times=12), at_most=2)
def takes_the_other_branch_on_every_call():
    return _branch


@scenario(calls(BOTH, BOTH), calls(UP, DOWN), calls(DOWN, UP), at_most=4)
def takes_nested_branches():
    def program(x, y):
        if x.sum() > 0:
            if (y > 0).all():
                return x + y
            return x - y
        return y * 2 if y.max() > 0 else y * 3

    return program


@scenario(calls(given(lambda n: torch.ones(2) * (n % 3 + 1)), times=12), at_most=3)
def runs_a_loop_until_the_data_says_stop():
    def program(x):
        steps = 0
        while x.sum() < 20:
            x, steps = x * 2, steps + 1
        return x, steps

    return program


@scenario(calls(given(lambda _: torch.rand(3) + 1), times=8), at_most=4)
def iterates_until_it_converges():
    def program(x):
        root = x
        while (root * root - x).abs().max() > 1e-4:
            root = 0.5 * (root + x / root)
        return root

    return program


@scenario(calls(UP), calls(DOWN), calls(UP), at_most=2)
def returns_early():
    def program(x):
        for _ in range(3):
            x = x * 1.5
            if x.abs().max() > 5 and x.sum() > 0:
                return x, "early"
        return x, "late"

    return program


@scenario(calls(UP), at_most=1)
def asserts_on_a_tensor():
    def program(x):
        assert (x > 0).all(), "must be positive"
        return x * 2

    return program


@scenario(calls(UP), calls(DOWN, times=2), calls(UP))
def raises_what_a_failed_assert_on_a_tensor_raises():
    def program(x):
        assert (x > 0).all(), "must be positive"
        return x * 2

    return program


@scenario(calls(given(lambda n: torch.tensor([n % 2, 1]))), at_most=2)
def reads_a_bool():
    return lambda x: x + 10 if bool(x[0]) else x


@scenario(calls(given(lambda n: torch.tensor([n % 2, 1])), times=8), at_most=2)
def reads_an_int_as_an_index_of_a_list():
    return lambda x: [x * 2, x * 3][int(x[0])]


@scenario(calls(given(lambda n: torch.tensor(n % 2)), times=8), at_most=2)
def reads_an_index():
    return lambda x: torch.arange(6).tolist()[x] + torch.ones(2)


@scenario(calls(given(lambda n: torch.randn(3)), times=10), at_most=2)
def computes_with_an_item_without_a_recompile_per_value():
    return lambda x: x * x.max().item() + x.mean().item()


@scenario(calls(given(lambda n: torch.randn(3)), times=10), at_most=12, eagerly=True)
def computes_with_what_float_made_of_a_tensor():
    return lambda x: x / (float(x.abs().sum()) + 1.0)


@scenario(calls(given(lambda n: torch.randint(1, 100, (2,))), times=10), at_most=12, eagerly=True)
def computes_with_what_int_made_of_a_tensor():
    return lambda x: x * int(x[0]) + int(x[1])


@scenario(calls(normal(4), times=10), at_most=2)
def computes_with_a_list_of_items_without_a_recompile_per_value():
    def program(x):
        first, *rest = x.tolist()
        return x * first + sum(rest)

    return program


@scenario(calls(given(lambda n: torch.tensor([n % 3 + 1, 2])), times=9), at_most=3)
def splits_by_the_sizes_that_a_tensor_holds():
    def program(sizes):
        rows = torch.arange(12.0).view(6, 2)
        return [rows[:n].sum(0) for n in sizes.tolist()]

    return program


@scenario(calls(UP), at_most=1)
def iterates_over_a_tensor():
    return lambda x: sum((row * n for n, row in enumerate(x)), torch.zeros(()))


@scenario(calls(UP), calls(DOWN), calls(UP), at_most=2)
def compares_tensors():
    pattern = torch.tensor([1.0, 2.0, 3.0])
    return lambda x: x * 2 if torch.equal(x, pattern) else x * 3


@scenario(calls(normal(6)), at_most=1)
def finds_where_it_is_not_zero():
    return lambda x: (x > 0).nonzero() + 1


@scenario(calls(normal(6)), at_most=1)
def selects_by_a_mask():
    return lambda x: (x[x > 0] * 2, torch.masked_select(x, x < 0))


@scenario(calls(normal(6)), at_most=1)
def averages_over_a_mask():
    def program(x):
        chosen = x[x > -10.0]
        return chosen.sum() / chosen.shape[0]

    return program


@scenario(calls(given(lambda n: torch.randint(0, 3, (8,)))), at_most=2)
def groups_what_is_unique():
    def program(x):
        values, counts = x.unique(return_counts=True)
        return values * counts

    return program


@scenario(calls(normal(8, 2)), at_most=1)
def scatters_to_experts_by_a_mask():
    experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = experts

        def forward(self, x):
            choice, result = (x.sum(1) * 7).long() % 3, torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (choice == number).nonzero().squeeze(1)
                result.index_add_(0, rows, expert(x[rows]))
            return result

    return Mixture()


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor(1.0))

    def forward(self, x):
        return x * 2 if x.sum() > self.limit else x * 3


@scenario(calls(UP), change(lambda net: net.limit.fill_(100.0)), calls(UP), at_most=2)
def branches_on_a_buffer_read_live():
    return Limited()


class Stepping(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        if self.steps % 2 == 0:
            return x * 2
        return x * 3


@scenario(calls(UP, times=12), at_most=2)
def branches_on_a_buffer_that_it_changes_first():
    return Stepping()


@scenario(calls(BOTH, times=12), at_most=2)
def changes_an_input_once_where_a_branch_goes_another_way():
    def program(x):
        x.add_(0.5)
        if x.sum() > 0:
            x.mul_(2)
        return x + 1

    return Program(program, None)


@scenario(calls(given(lambda n: torch.ones(3) * (-1) ** n), times=12), at_most=2)
def draws_random_numbers_once_where_a_branch_goes_another_way():
    def program(x):
        noise = torch.rand(3)
        return noise + torch.rand(3) if x.sum() > 0 else -noise

    return program


@scenario(
    calls(given(lambda n: torch.tensor([(-1.0) ** (n >> k) for k in range(4)])), times=48),
    at_most=16,
)
def takes_every_path_through_two_branches_in_a_loop_of_four():
    def program(x):
        total = x.new_zeros(3)
        for part in x.unbind():
            if part > 0:
                total = total * 2 + part
            if part < 0:
                total = total - 1
        return total

    return program


@scenario(calls(given(lambda n: torch.tensor(n % 3)), times=9), at_most=3)
def repeats_as_often_as_the_data_says():
    def program(n):
        x = torch.ones(2)
        for _ in range(int(n)):
            x = x * 2 + 1
        return x

    return program


@scenario(calls(UP), calls(DOWN, times=2), calls(UP))
def raises_what_the_program_raises_on_data():
    def program(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x + 1

    return program


@scenario(calls(UP), calls(DOWN), eagerly=True)
def keeps_the_conditional_operator():
    return lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


@scenario(calls(given(lambda n: torch.randint(0, 5, (4,))), times=8))
def finds_a_number_among_those_of_a_tensor():
    return lambda x: x * 2 if 3 in x else x * 3


@scenario(calls(normal(2, 4, 3)), at_most=1)
def packs_sequences_of_constant_lengths():
    lstm = nn.LSTM(3, 5, batch_first=True)

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = lstm

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [4, 2], batch_first=True)
            result, _ = self.lstm(packed)
            return nn.utils.rnn.pad_packed_sequence(result, batch_first=True)[0]

    return Packed()


# A number read from a tensor is a Python number, whatever the graph makes of it


@scenario(calls(normal(3), times=8), eagerly=True)
def returns_the_item_itself():
    return lambda x: (x * 2, x[0].item(), x.tolist(), type(x[0].item()).__name__)


@scenario(calls(normal(3), times=8), eagerly=True)
def writes_an_item_into_a_string():
    return lambda x: (x * 2, f"{x[0].item():.3f}", str(x[1].item()))


@scenario(calls(normal(3), times=10), at_most=2)
def branches_on_the_sign_of_an_item():
    return lambda x: x * 2 if x[0].item() > 0 else x * 3


@scenario(calls(each(torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(float("nan"))), times=9))
def asks_for_the_sign_of_a_zero():
    return lambda x: (x * 2, math.copysign(1.0, x.item()), math.isnan(x.item()))


@scenario(calls(given(lambda n: torch.tensor([2**53 + 1 + n, 5])), times=8), eagerly=True)
def keeps_ints_that_no_float_can_hold():
    return lambda x: (int(x[0]), x[0].item() + 1, x * 2)


@scenario(calls(given(lambda n: torch.tensor(n % 3)), times=9), at_most=3)
def looks_an_item_up_in_a_dict():
    return lambda x: x * {0: 2.0, 1: 3.0, 2: 4.0}[int(x)] + 1


@scenario(
    calls(given(lambda _: torch.tensor([3, 1, 2])[torch.randperm(3)]), times=12),
    at_most=6,
    eagerly=True,
)
def sorts_what_it_reads_from_a_tensor():
    return lambda x: (sorted(x.tolist()), x.tolist().index(3), max(x.tolist()), x * 2)


@scenario(calls(given(lambda _: torch.randn(3) > 0), times=8), eagerly=True)
def reads_booleans_as_booleans():
    return lambda x: (x.tolist(), x[0].item() is True, x.sum().item())


@scenario(calls(given(lambda _: torch.rand(()) * 3), times=9), at_most=4)
def rounds_an_item_to_a_size():
    return lambda x: torch.ones(6)[: round(x.item())] * 2


@scenario(calls(given(lambda n: torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0][n % 6])), times=12))
def makes_a_tensor_of_an_item():
    return lambda x: torch.full((2,), x.item()) + torch.tensor([x.item(), 1.0])


@scenario(calls(normal(4), times=10), at_most=3)
def reads_an_item_before_and_after_a_write():
    def program(x):
        before = x[0].item()
        x.add_(1)
        return x * before + x[0].item()

    return program


@scenario(calls(normal(4), times=10), at_most=3)
def reads_an_item_of_what_it_drew():
    return lambda x: x * torch.rand(()).item()


@scenario(calls(normal(4, dtype=torch.half), times=8), at_most=2)
def computes_with_an_item_of_half_precision():
    return lambda x: x * x.max().item() + x.float() * x.min().item()
