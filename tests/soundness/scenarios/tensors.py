"""Tensors: writes, views, identity, layouts and kinds come out as in eager."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from scenarios._scenario import Program, calls, change, constant, each, given, normal, scenario

X = normal(4)
SQUARE = normal(3, 3)

# Writes


@scenario(calls(X, X), at_most=1)
def changes_an_input_in_place():
    return lambda x, y: x.add_(y)


@scenario(calls(X, X), at_most=1)
def changes_an_input_through_a_view():
    def program(x, y):
        x[1:3].mul_(2).add_(y[:2])
        return x.sum()

    return program


@scenario(calls(SQUARE), at_most=1)
def changes_an_input_through_a_transposed_view():
    def program(x):
        x.t()[0] = 7.0
        return x + 1

    return program


@scenario(calls(X, X), at_most=1)
def writes_out_into_an_input():
    return lambda x, y: torch.add(x, y, out=y)


@scenario(calls(X), at_most=1)
def writes_the_data_of_an_input():
    def program(x):
        x.data.mul_(2)
        return x + 1

    return program


@scenario(calls(X, X), at_most=1)
def copies_one_input_into_another():
    def program(x, y):
        before = x.clone()
        x.copy_(y)
        y.copy_(before)

    return program


class Accumulating(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total += x
        return x + self.total


@scenario(calls(X), at_most=1)
def changes_a_buffer_in_place():
    return Accumulating()


@scenario(calls(X), calls(together=lambda net: (net.total,)), calls(X))
def notices_an_input_that_is_the_buffer_it_changes():
    return Accumulating()


@scenario(calls(X), at_most=1)
def assigns_to_a_slice():
    def program(x):
        x[::2] = x[1::2]
        return x * 2

    return program


@scenario(calls(X), at_most=1)
def assigns_under_a_mask():
    def program(x):
        x[x < 0] = 0.0
        return x * 2

    return program


@scenario(calls(X, X), at_most=1)
def doubles_what_a_dropout_that_does_nothing_returns():
    def program(x, y):
        z = functional.dropout(x, 0.5, training=False)
        z += y
        return z

    return program


@scenario(calls(X), eagerly=True)
def resizes_an_input():
    def program(x):
        x.resize_(8)
        x.zero_()
        return x + 1

    return program


@scenario(calls(X), eagerly=True)
def puts_an_input_onto_other_memory():
    def program(x):
        x.set_(torch.ones(6).untyped_storage(), 1, (2,), (2,))
        return x + 1

    return program


@scenario(calls(given(lambda _: torch.ones(1).expand(4))), eagerly=True)
def raises_what_eager_raises_for_a_write_to_an_expanded_input():
    return lambda x: x.add_(torch.arange(4.0))


@scenario(calls(X), at_most=1)
def writes_several_tensors_at_once():
    weights = [torch.ones(4), torch.zeros(4)]

    def program(x):
        torch._foreach_add_(weights, [x, x + 1])
        return weights[0] * weights[1]

    return Program(program, weights)


# Identity and memory


@scenario(calls(X), at_most=1)
def returns_the_input_itself():
    return lambda x: (x, x * 2)


@scenario(calls(X), at_most=1)
def returns_the_input_where_an_operator_does():
    return lambda x: (x.contiguous(), x.to(torch.float32), x.float(), x.cpu())


@scenario(calls(X), at_most=1)
def returns_a_parameter_itself():
    linear = nn.Linear(4, 4)

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x), self.linear.weight

    return Returning()


@scenario(calls(SQUARE), at_most=1)
def returns_views_of_the_input():
    return lambda x: (x.t(), x[1], x.flatten(), x.diagonal(), x.unsqueeze(0))


@scenario(calls(X), at_most=1)
def returns_outputs_that_share_memory():
    def program(x):
        y = x * 2
        return y, y[1:], y.view(2, 2)

    return program


@scenario(calls(X), at_most=1)
def returns_one_tensor_twice_as_one():
    def program(x):
        y = x + 1
        return y, {"again": y}

    return program


@scenario(calls(normal(6)), at_most=1)
def returns_chunks_of_one_tensor():
    return lambda x: (x * 2).chunk(3)


@scenario(calls(SQUARE), at_most=1)
def returns_a_detached_alias():
    return lambda x: (x.detach(), (x + 1).detach())


def _same():
    x = torch.randn(4)
    return x, x


def _overlapping():
    base = torch.randn(6)
    return base[:4], base[2:]


def _apart():
    base = torch.randn(8)
    return base[:4], base[4:]


@scenario(calls(X, X), calls(together=lambda _: _same()), calls(X, X))
def tells_one_tensor_passed_twice_from_two():
    def program(x, y):
        x.mul_(2)
        return x + y

    return program


@scenario(calls(X, X), calls(together=lambda _: _overlapping()), calls(X, X), eagerly=True)
def notices_that_the_tensor_it_changes_overlaps_another():
    def program(x, y):
        x.mul_(2)
        return x + y

    return program


@scenario(calls(X, X), calls(together=lambda _: _overlapping()), at_most=1)
def serves_overlapping_tensors_that_it_only_reads():
    return lambda x, y: x + y


@scenario(calls(together=lambda _: _apart()), at_most=1)
def serves_two_halves_of_one_tensor():
    return lambda x, y: x * y


@scenario(calls(X), change(lambda table: table.mul_(3)), calls(X), at_most=1)
def reads_a_free_tensor_live_after_it_was_changed_in_place():
    table = torch.ones(4)
    return Program(lambda x: x + table, table)


# Layouts


def _summed():
    return lambda x: (x * 2, x.sum(-1), x.reshape(-1) + 1)


@scenario(calls(normal(3, 4)), calls(given(lambda _: torch.randn(4, 3).t())), at_most=2)
def recompiles_for_a_transposed_input():
    return _summed()


@scenario(calls(normal(3, 4)), calls(given(lambda _: torch.randn(3, 1).expand(3, 4))), at_most=2)
def recompiles_for_an_expanded_input():
    return _summed()


@scenario(calls(normal(3, 4)), calls(given(lambda _: torch.randn(3, 8)[:, ::2])), at_most=2)
def recompiles_for_a_strided_input():
    return _summed()


@scenario(calls(given(lambda _: torch.randn(5, 4)[2:])), calls(normal(3, 4)), at_most=1)
def serves_an_input_that_starts_within_its_memory():
    return _summed()


@scenario(
    calls(normal(2, 3, 4, 4)),
    calls(given(lambda _: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))),
    at_most=2,
)
def keeps_channels_last():
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())


@scenario(calls(normal(0, 4)), at_most=1)
def serves_a_tensor_without_elements():
    return _summed()


@scenario(calls(given(lambda n: torch.tensor(float(n)))), at_most=1)
def serves_a_tensor_without_dimensions():
    return lambda x: (x * 2, x + torch.ones(3), x.to(torch.int64))


@scenario(calls(given(lambda _: torch.randn(4, dtype=torch.cfloat).conj())), at_most=1)
def serves_a_conjugate_view():
    return lambda x: (x * 2, x.imag, x.resolve_conj())


@scenario(calls(given(lambda _: torch.randn(4, dtype=torch.cfloat).conj().imag)), at_most=1)
def serves_a_negative_view():
    return lambda x: (x * 2, x.resolve_neg(), -x)


@scenario(
    calls(normal(4, dtype=torch.cfloat)),
    calls(given(lambda _: torch.randn(4, dtype=torch.cfloat).conj())),
    at_most=2,
)
def recompiles_for_a_conjugate_view():
    return lambda x: (x * 2, x.is_conj())


# What a program may ask about a tensor


def _from(start):
    return given(lambda _: torch.randn(8)[start : start + 4])


@scenario(calls(_from(0)), calls(_from(2)), eagerly=True)
def follows_where_in_its_memory_a_tensor_starts():
    return lambda x: x * (2 + x.storage_offset())


@scenario(calls(X), calls(_from(0)), eagerly=True)
def follows_whether_a_tensor_is_a_view():
    return lambda x: x * 2 if x._base is None else x * 3


@scenario(calls(X), calls(given(lambda _: torch.randn(4).add_(1))), eagerly=True)
def follows_how_often_a_tensor_was_written():
    return lambda x: x * (2 + x._version)


@scenario(calls(_from(0)), calls(_from(2)), eagerly=True)
def returns_what_it_asks_about_a_tensor():
    return lambda x: (x * 2, x.storage_offset(), x.is_leaf, x._base is None)


def _with_gradient(_):
    x = torch.randn(4, requires_grad=True)
    x.grad = torch.ones(4)
    return x


@scenario(
    calls(normal(4, requires_grad=True)), calls(given(_with_gradient)), at_most=2, eagerly=True
)
def follows_whether_a_tensor_has_a_gradient():
    return lambda x: x.detach() * (2 if x.grad is None else 3)


@scenario(
    calls(normal(4, requires_grad=True), under=torch.enable_grad),
    calls(given(lambda _: torch.randn(4, requires_grad=True) * 2), under=torch.enable_grad),
    eagerly=True,
)
def follows_whether_a_tensor_is_a_leaf():
    return lambda x: x.detach() * (2 if x.is_leaf else 3)


@scenario(calls(normal(4, requires_grad=True), under=torch.enable_grad), eagerly=True)
def returns_the_data_of_an_input_that_needs_a_gradient():
    return lambda x: (x.detach() * 2, x.data, x.detach())


@scenario(calls(_from(2)), eagerly=True)
def reads_memory_around_a_view():
    return lambda x: x.as_strided((6,), (1,), 0) * 2


@scenario(calls(_from(2)), eagerly=True)
def writes_what_an_input_is_a_view_of():
    def program(x):
        x._base.add_(1)
        return x * 2

    return program


@scenario(calls(X), eagerly=True)
def writes_the_memory_of_an_input_past_its_operators():
    def program(x):
        x.untyped_storage().fill_(0)
        return x + 1

    return program


@scenario(calls(X, X), eagerly=True)
def swaps_two_tensors_themselves():
    def program(x, y):
        torch.utils.swap_tensors(x, y)
        return x * 2

    return program


@scenario(calls(SQUARE), eagerly=True)
def changes_the_form_of_an_input():
    def program(x):
        x.t_()
        return x * 2

    return program


@scenario(calls(normal(4, dtype=torch.cfloat)), at_most=1)
def writes_the_parts_of_complex_numbers():
    def program(x):
        x.real.add_(1)
        torch.view_as_real(x)[..., 1].mul_(3)
        return x * 2

    return program


@scenario(calls(given(lambda _: torch.randn(4, dtype=torch.cfloat).conj())))
def changes_a_conjugate_view_in_place():
    return lambda x: x.add_(1j)


@scenario(calls(X), at_most=1)
def returns_a_view_taken_before_a_write():
    def program(x):
        tail = x[1:]
        x.add_(1)
        return tail, x

    return program


@scenario(calls(X, given(lambda _: torch.empty(0))), eagerly=True)
def resizes_an_empty_tensor_that_it_writes_out_into():
    return lambda x, out: torch.add(x, 1, out=out)


@scenario(calls(given(lambda _: torch.randint(0, 4, (3,)))))
def renormalizes_the_rows_of_an_embedding():
    return nn.Embedding(4, 3, max_norm=0.5)


# Kinds


@scenario(calls(normal(4, dtype=torch.cfloat)), at_most=1)
def serves_complex_numbers():
    return lambda x: (x * (1 + 2j), x.abs(), torch.view_as_real(x))


@scenario(calls(given(lambda _: torch.randn(4) > 0)), at_most=1)
def serves_booleans():
    return lambda x: (~x, x & True, x.sum(), x * 2)


@scenario(calls(given(lambda _: torch.randn(4).to(torch.float8_e4m3fn))), at_most=1)
def serves_eight_bit_floats():
    return lambda x: (x.to(torch.float32) * 2, (x.float() + 1).to(torch.float8_e5m2))


@scenario(
    calls(normal(4)),
    calls(normal(4, dtype=torch.bfloat16)),
    calls(constant([1, 2, 3])),
    at_most=3,
)
def promotes_as_eager_does():
    scalar = torch.tensor(2.0, dtype=torch.double)
    return lambda x: (x + 1, x * 2.5, x / 3, x + scalar, x // 2, x > 0)


@scenario(calls(given(lambda _: nn.Parameter(torch.randn(4)))), at_most=1)
def takes_a_parameter_as_an_argument():
    return lambda x: x * 2


@scenario(
    calls(given(lambda _: torch.randn(4, requires_grad=True) * 2), under=torch.enable_grad),
    calls(given(lambda _: torch.randn(4, requires_grad=True) * 2)),
)
def takes_an_input_that_is_no_leaf():
    return lambda x: x.detach() * 2


class Tagged(torch.Tensor):
    """A tensor subclass with nothing of its own."""


@scenario(calls(given(lambda _: torch.randn(4).as_subclass(Tagged))), eagerly=True)
def keeps_the_class_of_a_tensor_subclass():
    return lambda x: x * 2


def _plain():
    return lambda x: x * 2


@scenario(calls(given(lambda _: torch.eye(3).to_sparse())), refused=True)
def refuses_a_sparse_tensor():
    return _plain()


@scenario(
    calls(
        given(
            lambda _: torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            )
        )
    ),
    refused=True,
)
def refuses_a_nested_tensor():
    return _plain()


@scenario(
    calls(given(lambda _: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))),
    refused=True,
)
def refuses_a_quantized_tensor():
    return lambda x: x.dequantize()


@scenario(calls(given(lambda _: torch.ones(4, device="meta"))), refused=True)
def refuses_a_tensor_on_the_meta_device():
    return _plain()


@scenario(calls(given(lambda _: FakeTensorMode().from_tensor(torch.ones(4)))), refused=True)
def refuses_a_fake_tensor():
    return _plain()


@scenario(calls(X), at_most=1)
def casts_within_the_program():
    return lambda x: (x.half().float(), x.double() + x, x.to(torch.int32), x.bool())


# Containers


class Pair(NamedTuple):
    """Two values."""

    left: Any
    right: Any


@scenario(calls(together=lambda _: ([torch.randn(4), {"b": torch.randn(4)}],)), at_most=1)
def takes_nested_containers():
    return lambda items: Pair(items[0] + items[1]["b"], {"list": [items[0] * 2, None, 3]})


@scenario(calls(given(lambda _: Pair(torch.randn(4), torch.randn(4)))), at_most=1)
def takes_and_returns_named_tuples():
    return lambda pair: pair._replace(left=pair.left + pair.right)


@scenario(calls(X, None), calls(X, X), calls(X, None), at_most=2)
def tells_a_tensor_from_none():
    return lambda x, mask: x if mask is None else x * mask


@scenario(calls(each((1.0, 2.0), [1.0, 2.0])), at_most=2)
def tells_a_tuple_from_a_list():
    return lambda values: torch.tensor(values) * (2 if isinstance(values, tuple) else 3)
