"""Guards: values are told apart as Python tells them apart, and recompiles name what differs."""

from __future__ import annotations

import collections
import functools
import types

import torch

from scenarios._scenario import calls, change, each, given, normal, scenario

X = normal(3)


@scenario(calls(X, "relu"), calls(X, "tanh"), at_most=2, says=("kind", "relu", "tanh"))
def names_a_string_that_differs():
    return lambda x, kind: getattr(torch, kind)(x)


@scenario(calls(X, scale=2), calls(X, scale=2.0), calls(X, scale=True), says=("scale",))
def tells_an_int_from_a_float_and_a_bool():
    return lambda x, scale: (x.long() * scale, type(scale).__name__)


@scenario(calls(X, each(0.0, -0.0), times=12))
def tells_zero_from_negative_zero():
    return lambda x, zero: (x + zero, torch.full((2,), zero), str(zero))


@scenario(calls(X, float("nan"), times=8), at_most=1)
def lets_nan_equal_itself():
    return lambda x, fill: x + fill


@scenario(calls(X, torch.float64), calls(X, torch.int32), at_most=2, says=("float64", "int32"))
def names_a_dtype_that_differs():
    return lambda x, dtype: x.to(dtype)


@scenario(calls(X, slice(0, 2)), calls(X, slice(1, None)), at_most=2)
def tells_slices_apart():
    return lambda x, part: x[part] * 2


@scenario(calls(X, {"a": 1.0, "b": 2.0}), calls(X, {"b": 2.0, "a": 1.0}), at_most=2)
def tells_the_order_of_keys_apart():
    return lambda x, options: x * next(iter(options.values()))


@scenario(calls(X, collections.OrderedDict(a=1.0)), calls(X, {"a": 1.0}), at_most=2)
def tells_kinds_of_dicts_apart():
    return lambda x, options: x * (2 if type(options) is dict else 3)


@scenario(calls(X, X), calls(X, y=X), calls(X), at_most=3)
def serves_arguments_by_place_by_name_and_by_default():
    return lambda x, y=None: x if y is None else x - y


@scenario(calls(X), calls(X, X), calls(X, X, X), at_most=3)
def serves_any_number_of_arguments():
    return lambda *parts, **options: sum(parts) * len(parts) + len(options)


class Thing:
    def __init__(self, scale):
        self.scale = scale


ONE, TWO = Thing(2.0), Thing(3.0)


@scenario(calls(X, each(ONE, TWO), times=12), at_most=2)
def tells_objects_apart():
    return lambda x, thing: x * thing.scale


@scenario(calls(X, torch.relu), calls(X, torch.tanh), at_most=2, says=("activation",))
def tells_functions_apart():
    return lambda x, activation: activation(x)


@scenario(calls(normal(3)), calls(normal(3, dtype=torch.double)), at_most=2, says=("x", "float64"))
def names_a_dtype_of_a_tensor_that_differs():
    return lambda x: x * 2


@scenario(calls(normal(3)), calls(normal(3, 1)), at_most=2, says=("x",))
def names_a_rank_that_differs():
    return lambda x: x * 2


@scenario(
    calls(X, {"deep": [1.0, {"scale": 2.0}]}),
    calls(X, {"deep": [1.0, {"scale": 3.0}]}),
    at_most=2,
    says=(r"options\['deep'\]\[1\]\['scale'\]", "2.0", "3.0"),
)
def names_the_path_of_what_differs():
    return lambda x, options: x * options["deep"][1]["scale"]


@scenario(calls(X, times=12), at_most=1)
def compiles_once_for_identical_calls():
    config = types.SimpleNamespace(name="a", sizes=[1, 2, 3], scale=2.0)
    return lambda x: x * config.scale + len(config.name) + sum(config.sizes)


@scenario(
    calls(X, Thing), change(lambda _: setattr(Thing, "kind", 3.0)), calls(X, Thing), at_most=2
)
def follows_an_attribute_of_a_class_it_is_given():
    Thing.kind = 2.0
    return lambda x, kind: x * kind.kind


def _two_lists():
    return torch.randn(3), [1.0], [1.0]


def _one_list_twice():
    items = [1.0]
    return torch.randn(3), items, items


@scenario(calls(together=lambda _: _two_lists()), calls(together=lambda _: _one_list_twice()))
def tells_one_list_passed_twice_from_two():
    return lambda x, one, two: x * 2 if one is two else x * 3


@scenario(
    calls(together=lambda _: _two_lists()),
    calls(together=lambda _: _one_list_twice()),
    eagerly=True,
)
def writes_to_one_list_passed_twice():
    def program(x, one, two):
        one.append(2.0)
        return x * sum(two)

    return program


@scenario(
    calls(X, given(lambda _: collections.defaultdict(lambda: 2.0))),
    calls(X, given(lambda _: collections.defaultdict(lambda: 3.0))),
    eagerly=True,
)
def tells_the_defaults_of_dicts_apart():
    return lambda x, options: x * options["missing"]


@scenario(
    calls(X, given(lambda _: functools.partial(torch.add, alpha=2))),
    calls(X, given(lambda _: functools.partial(torch.add, alpha=3))),
    eagerly=True,
)
def tells_partial_functions_apart():
    return lambda x, combine: combine(x, x)


def _tagged(scale):
    def make(_):
        x = torch.randn(3)
        x.scale = scale
        return x

    return given(make)


@scenario(calls(_tagged(2.0)), calls(_tagged(3.0)), eagerly=True)
def follows_an_attribute_of_a_tensor_it_is_given():
    return lambda x: x * x.scale


@scenario(calls(normal(3)), calls(_tagged(3.0)), calls(normal(3)), eagerly=True)
def follows_whether_a_tensor_it_is_given_has_an_attribute():
    return lambda x: x * 2 if hasattr(x, "scale") else x * 3
