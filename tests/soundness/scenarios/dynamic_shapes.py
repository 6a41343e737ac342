"""Dynamic shapes: sizes and numbers that change from call to call take one more graph, not one each."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from scenarios._scenario import calls, constant, each, given, growing, normal, scenario

GROWING = growing(2, 3, by=(1, 0))
TIMES = 8


def _mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))


@scenario(calls(GROWING, times=TIMES), at_most=2)
def serves_a_growing_batch():
    return _mlp()


@scenario(calls(growing(2, 2, 3, by=(1, 2, 0)), times=TIMES), at_most=2)
def serves_a_batch_and_a_length_that_grow_together():
    return _mlp()


@scenario(
    calls(growing(2, 4, 3, by=(1, 0, 0)), times=TIMES),
    calls(growing(4, 4, 3, by=(0, 1, 0)), times=TIMES),
    at_most=3,
)
def serves_first_a_growing_batch_and_then_a_growing_length():
    return _mlp()


@scenario(calls(GROWING, times=TIMES), at_most=1, dynamic=True)
def takes_one_graph_when_sizes_are_said_to_be_dynamic():
    return _mlp()


@scenario(calls(each(*(torch.ones(n, 3) for n in (2, 4, 6))), times=15), dynamic=False, at_most=3)
def takes_a_graph_per_size_when_sizes_are_said_to_be_static():
    return _mlp()


@scenario(
    calls(normal(3, 3)), calls(normal(1, 3)), calls(normal(0, 3)), calls(GROWING, times=TIMES)
)
def serves_batches_of_one_and_of_none():
    return _mlp()


@scenario(
    calls(given(lambda n: torch.randn(3, n + 2).t()), times=TIMES),
    calls(given(lambda n: torch.randn(n + 2, 3)), times=TIMES),
    at_most=4,
)
def tells_another_order_of_storage_from_a_growing_batch():
    return lambda x: (x * 2, x.reshape(-1), x.sum(0))


@scenario(
    calls(given(lambda n: torch.randn(n + 2, 3)), times=TIMES),
    calls(given(lambda n: torch.randn(1, 3).expand(n + 2, 3)), times=TIMES),
    at_most=4,
)
def tells_an_expanded_batch_from_a_growing_one():
    return lambda x: (x + 1, x.reshape(-1))


@scenario(
    calls(given(lambda n: torch.randn(n + 2)), given(lambda n: torch.randn(n + 2)), times=TIMES),
    calls(given(lambda n: torch.randn(n + 2)), constant([1.0]), times=TIMES),
)
def tells_equal_sizes_from_broadcast_ones():
    return lambda x, y: x + y


@scenario(calls(each(*(torch.ones(n) for n in (4, 6, 8, 5, 7, 9))), times=18), at_most=4)
def branches_on_whether_a_size_is_even():
    return lambda x: x.view(2, -1) * 2 if x.shape[0] % 2 == 0 else x * 3


@scenario(calls(each(*(torch.ones(n, 2) for n in (3, 4, 5, 6, 7))), times=20), at_most=4)
def branches_on_one_size():
    return lambda x: x * 2 if x.size(0) == 5 else x * 3


@scenario(calls(each(*(torch.ones(n, 2) for n in (3, 4, 12, 13, 14))), times=20), at_most=5)
def branches_on_an_order_of_sizes():
    return lambda x: x[:10] * 2 if len(x) > 10 else x * 3


@scenario(calls(normal(3), given(lambda n: n + 2), times=TIMES), at_most=2)
def serves_an_int_that_changes():
    return lambda x, n: x * n + 1


@scenario(calls(normal(3), given(lambda n: 0.1 * n + 0.3), times=TIMES), at_most=2)
def serves_a_float_that_changes():
    return lambda x, scale: x * scale + 1


@scenario(calls(normal(12), given(lambda n: n + 2), times=TIMES), at_most=2)
def serves_an_int_that_it_slices_by():
    return lambda x, n: x[:n] * 2


@scenario(calls(each(*(torch.ones(n) for n in (2, 3, 4, 5))), times=12), at_most=4)
def computes_with_a_size():
    return lambda x: x.sum() / x.shape[0] + len(x)


@scenario(calls(GROWING, times=TIMES), at_most=2)
def returns_a_size():
    return lambda x: (x * 2, x.shape[0], tuple(x.shape), x.numel())


@scenario(calls(GROWING, times=TIMES), at_most=2)
def makes_tensors_of_a_size():
    return lambda x: x + torch.arange(x.shape[0]).unsqueeze(1) + torch.ones_like(x)


@scenario(calls(growing(2, 4, by=(2, 0)), times=TIMES), at_most=2)
def reshapes_by_a_size():
    return lambda x: (x.view(x.shape[0] * 2, 2), x.reshape(-1), x.flatten(), x.unsqueeze(0))


@scenario(
    calls(
        given(lambda n: torch.randn(n + 2, 3)),
        given(lambda n: torch.randn(2 * n + 3, 3)),
        times=TIMES,
    ),
    at_most=2,
)
def joins_two_that_grow_apart():
    return lambda x, y: torch.cat([x, y]) * 2


@scenario(calls(given(lambda n: [torch.randn(n + 2), torch.randn(n + 4)]), times=TIMES), at_most=2)
def serves_a_list_of_growing_tensors():
    return lambda parts: torch.cat(parts) + 1


@scenario(calls(growing(2, 3, 6, 6, by=(0, 0, 2, 2)), times=TIMES), at_most=2)
def serves_images_that_grow():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


@scenario(calls(growing(5, by=(1,)), times=TIMES), at_most=3)
def pads_to_a_multiple():
    def program(x):
        missing = -x.shape[0] % 4
        return functional.pad(x, (0, missing)).view(-1, 4).sum(1)

    return program


@scenario(calls(given(lambda n: torch.randint(0, 10, (2, n + 2))), times=TIMES), at_most=2)
def embeds_sentences_that_grow():
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(10, 4), nn.Embedding(32, 4)

        def forward(self, words):
            places = torch.arange(words.shape[1])
            return self.words(words) + self.places(places)

    return Embedding()


@scenario(calls(growing(1, 2, 3, 4, by=(0, 0, 1, 0)), times=TIMES), at_most=2)
def attends_over_sentences_that_grow():
    def program(x):
        mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    return program


@scenario(calls(each(*(torch.arange(n * 2.0).view(n, 2) for n in (2, 3, 4))), times=15), at_most=3)
def iterates_over_the_rows_of_a_batch():
    return lambda x: sum(row * (n + 1) for n, row in enumerate(x))


@scenario(calls(GROWING, times=TIMES), at_most=2)
def changes_a_growing_batch_in_place():
    def program(x):
        x[1:].mul_(2)
        return x.sum()

    return program


@scenario(calls(GROWING, times=TIMES), at_most=2)
def draws_a_mask_for_a_growing_batch():
    return lambda x: functional.dropout(x, 0.5)


@scenario(calls(each(*(torch.randn(n, 3) for n in (7, 5, 3, 2))), times=12), at_most=2)
def serves_a_shrinking_batch():
    return _mlp()


def _marked(mark):
    def make(n):
        x = torch.randn(n + 3, 3)
        mark(x)
        return x

    return given(make)


def _mark_dynamic(x):
    torch._dynamo.mark_dynamic(x, 0)


def _mark_static(x):
    torch._dynamo.mark_static(x)


@scenario(calls(_marked(_mark_dynamic), times=TIMES), at_most=1)
def takes_one_graph_for_a_size_marked_dynamic():
    return _mlp()


@scenario(calls(_marked(lambda x: _mark_static(x) if x.shape[0] == 3 else None), times=TIMES))
def is_right_on_a_tensor_marked_static():
    return _mlp()


# A size, or a number, that has become symbolic is still a Python number


@scenario(calls(GROWING, times=TIMES), eagerly=True)
def writes_a_size_into_a_string():
    return lambda x: (x * 2, f"{x.shape[0]} rows", str(x.shape), repr(x.size(0)))


@scenario(calls(GROWING, times=TIMES), eagerly=True)
def looks_a_size_up_in_a_dict():
    names = {2: "two", 4: "four", 7: "seven"}
    return lambda x: (x * 2, names.get(x.shape[0], "other"), x.shape[0] in names)


@scenario(calls(GROWING, times=TIMES), eagerly=True)
def tells_the_type_of_a_size():
    def program(x):
        rows = x.shape[0]
        return x * 2 if isinstance(rows, int) and type(rows).__name__ != "bool" else x * 3

    return program


@scenario(calls(GROWING, times=TIMES), at_most=3)
def divides_sizes_as_python_does():
    def program(x):
        rows, columns = x.shape
        return x * 2, rows / columns, rows // columns, rows % columns, -rows // 2, rows**2

    return program


@scenario(calls(growing(2, 4, by=(1, 0)), times=TIMES), eagerly=True)
def takes_the_root_of_a_size():
    return lambda x: x * x.shape[0] ** -0.5 + math.sqrt(x.shape[0]) + math.log(len(x))


@scenario(calls(GROWING, times=12), at_most=4)
def takes_the_smaller_of_a_size_and_a_number():
    return lambda x: x[: min(x.shape[0], 5)] * max(x.shape[0], 7)


@scenario(calls(GROWING, times=12), eagerly=True)
def rounds_a_part_of_a_size():
    return lambda x: x[: int(x.shape[0] * 0.5)] + round(x.shape[0] / 3)


@scenario(calls(each(*(torch.ones(n, 3) for n in (0, 1, 2, 3, 4))), times=15), at_most=5)
def branches_on_whether_there_are_any_rows():
    return lambda x: x.sum(0) if x.shape[0] else torch.zeros(3)


@scenario(calls(GROWING, times=TIMES), at_most=2)
def uses_the_strides_of_a_growing_tensor():
    return lambda x: x.t().contiguous() * x.t().contiguous().stride(0)


@scenario(calls(each(*(torch.randn(n, n) for n in (2, 3, 4, 5))), times=12), at_most=2)
def serves_squares_that_grow():
    return lambda x: x @ x + torch.eye(x.shape[0])


@scenario(
    calls(each(*(torch.randn(n, n) for n in (2, 3, 4))), times=9),
    calls(each(*(torch.randn(n, 3) for n in (2, 5, 4))), times=9),
    at_most=5,
)
def tells_a_square_from_what_only_looks_like_one():
    return lambda x: x + x.t() if x.shape[0] == x.shape[1] else x * 3


@scenario(
    calls(given(lambda n: torch.randn(n + 2, 4)), given(lambda n: torch.randn(4, n + 2)), times=8),
    calls(normal(3, 4), normal(5, 2), times=2),
    calls(given(lambda n: torch.randn(n + 2, 4)), given(lambda n: torch.randn(4, n + 2)), times=8),
)
def raises_what_eager_raises_for_sizes_that_do_not_fit():
    return lambda x, y: x @ y


@scenario(calls(normal(3), each(0, 1, -1, 2, 7, 2**40), times=12), at_most=4)
def serves_ints_of_every_kind():
    return lambda x, n: (x * n, n + 1, -n)


@scenario(calls(normal(3), each(3, 4, 5, 6), times=12), eagerly=True)
def writes_an_int_that_changes_into_a_string():
    return lambda x, n: (x * n, f"{n:03d}", str(n), [10, 20, 30, 40, 50, 60, 70][n])


@scenario(calls(normal(3), each(3, 4, 5, 6), times=12), at_most=4)
def branches_on_an_int_that_changes():
    return lambda x, n: x * 2 if n == 4 else x * n


@scenario(calls(normal(3), each(2, 3, 4, 5), times=16), at_most=4)
def repeats_as_often_as_an_int_says():
    def program(x, n):
        for step in range(n):
            x = x * 2 + step
        return x

    return program


@scenario(calls(normal(3), 3), calls(normal(3), 4), calls(normal(3), True), calls(normal(3), 3.0))
def tells_kinds_of_numbers_apart_once_one_has_changed():
    return lambda x, n: (x * n, type(n).__name__, n)


@scenario(
    calls(normal(3), each(0.5, 1.5, float("inf"), -0.0, float("nan"), 2.5), times=12),
    at_most=6,
)
def serves_floats_of_every_kind():
    return lambda x, scale: (x * scale, scale, math.copysign(1.0, scale))


@scenario(calls(normal(3), each(0.25, 0.5, 0.75, 1.25), times=12), at_most=4)
def branches_on_a_float_that_changes():
    return lambda x, scale: x * 2 if scale > 0.6 else x * scale


@scenario(calls(normal(8), each(0.25, 0.5, 0.75), times=9), at_most=3)
def slices_by_a_part_that_changes():
    return lambda x, part: x[: int(part * x.shape[0])] * 2


@scenario(calls(normal(3), each(0.1, 0.2, 0.3), times=9), at_most=3)
def keeps_every_digit_of_a_float():
    return lambda x, scale: (x.double() * scale, torch.tensor(scale, dtype=torch.double), scale)


@scenario(calls(normal(3), each(0.1, 0.5, 0.9), times=9), at_most=3)
def drops_at_a_rate_that_changes():
    return lambda x, rate: functional.dropout(x, rate)
