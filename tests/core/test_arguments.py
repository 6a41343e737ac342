"""Arguments: how they are passed, what holds them, and which values are told apart."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import gc
import pathlib
import types
import weakref

import attrs
import numpy as np
import pytest
import torch
from torch import nn

import torchbay


class Color(enum.Enum):
    RED = 1
    GREEN = 2


Pair = collections.namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - untyped on purpose


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    ids: torch.Tensor
    scale: float = 1.0


@attrs.define
class SlottedBatch:
    ids: torch.Tensor
    scale: float = 1.0


def compiled_and_counted(function, backend):
    compiled = torchbay.compile(function, backend=backend)
    return compiled, lambda: dict(torchbay.explain(compiled).calls)


def test_serves_every_way_of_passing_arguments(recording):
    def call(a, /, b, c=3.0, *rest, d, e=5.0, **others):
        total = a + b * c + d * e
        for value in rest:
            total = total + value
        for name, value in others.items():
            total = total * value + len(name)
        return total

    compiled, calls = compiled_and_counted(call, recording)
    one = torch.ones(2)
    ways = [
        ((one, one), {"d": one}),
        ((one,), {"b": one, "d": one}),
        ((one, one, 4.0), {"d": one}),
        ((one, one, 4.0, one, one), {"d": one, "e": 2.0}),
        ((one, one), {"d": one, "extra": one}),
        ((one, one), {"d": one, "other": one}),
    ]
    for _ in range(2):
        for args, kwargs in ways:
            assert torch.equal(compiled(*args, **kwargs), call(*args, **kwargs))
    assert calls() == {"graph": 6, "eager": 6}


CONTAINERS = [
    lambda t, k: [t, k],
    lambda t, k: (t, [k, (t,)]),
    lambda t, k: {"t": t, "k": k},
    lambda t, k: {1: t, (2, 3): k, None: t},
    lambda t, k: collections.OrderedDict(t=t, k=k),
    lambda t, k: collections.defaultdict(list, t=t, k=k),
    lambda t, k: Pair(t, k),
    lambda t, k: Batch(t, k),
    lambda t, k: FrozenBatch(t, k),
    lambda t, k: torch.max(t.reshape(1, -1), dim=0),
    lambda t, k: {"deep": [{"er": (Pair(Batch(t, k), [t]),)}]},
]


def leaves_of(value):
    if isinstance(value, torch.Tensor):
        return [value.float()]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves_of(item)]
    if isinstance(value, dict):
        return leaves_of(list(value.values()))
    return leaves_of(list(vars(value).values())) if hasattr(value, "__dict__") else [value]


@pytest.mark.parametrize("make", CONTAINERS)
def test_serves_nested_containers(make, recording):
    def total(container):
        return sum(leaves_of(container), torch.zeros(3))

    compiled, calls = compiled_and_counted(total, recording)
    for scale in (1.0, 2.0, 3.0):
        container = make(torch.arange(3.0) * scale, 4.0)
        assert torch.equal(compiled(container), total(container))
    assert calls() == {"graph": 2, "eager": 1}
    other = make(torch.arange(3.0), 5.0)
    assert torch.equal(compiled(other), total(other))


def test_tells_containers_of_another_form_apart(recording):
    compiled, calls = compiled_and_counted(lambda c: leaves_of(c)[0] + len(leaves_of(c)), recording)
    one = torch.ones(1)
    forms = [
        [one],
        (one,),
        [one, one],
        {"a": one},
        {"b": one},
        {"a": one, "b": one},
        Pair(one, one),
    ]
    for form in forms:
        assert compiled(form).item() == 1 + len(leaves_of(form))
    assert calls() == {"graph": 0, "eager": 7}


def test_tells_the_types_of_keys_apart(recording):
    def call(mapping):
        return {key: value * 2 for key, value in mapping.items()}

    compiled = torchbay.compile(call, backend=recording)
    for key in (1, True, 1.0, 0, False, 1, True, 1.0):
        (found,) = compiled({key: torch.ones(1)})
        assert type(found) is type(key)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_serves_dicts_keyed_by_tensors_or_runs_them_eagerly(recording):
    def call(mapping, x):
        return x + len(mapping)

    first, second = torch.ones(2), torch.zeros(2)
    compiled = torchbay.compile(call, backend=recording)
    for key in (first, second, first):
        assert torch.equal(compiled({key: 1}, torch.ones(2)), torch.full((2,), 2.0))


def test_tells_one_tensor_passed_twice_from_two(recording):
    def call(x, y):
        return x + y if x is y else x - y

    compiled, calls = compiled_and_counted(call, recording)
    one, other = torch.ones(2), torch.full((2,), 5.0)
    for args in ((one, one), (one, other), (one, one), (other, one), (other, other)):
        assert torch.equal(compiled(*args), call(*args))
    assert calls() == {"graph": 3, "eager": 2}


VALUES = [
    1, 1.0, True, 0, 0.0, -0.0, False, None, "1", b"1", 1j, ..., float("inf"), float("nan"),
    (1, 2), (1.0, 2), (True, 2), (0.0,), (-0.0,), frozenset({1}), frozenset({True}), range(3), slice(1), slice(True),
    slice(None, None, 2), Color.RED, Color.GREEN, torch.float32, torch.int64, torch.device("cpu"), torch.strided,
    torch.contiguous_format, int, float, torch.Size([1]), (1,),
]  # fmt: skip


def test_tells_values_apart_by_type_and_value(recording):
    compiled = torchbay.compile(
        lambda x, value: (x + 1, value),
        backend=recording,
        dynamic=False,
        recompile_limit=len(VALUES),
    )
    for value in VALUES:
        compiled(torch.ones(1), value)
    assert len(torchbay.explain(compiled).specializations) == len(VALUES)
    for value in VALUES:
        _, found = compiled(torch.ones(1), value)
        assert type(found) is type(value)
        assert repr(found) == repr(value)
    assert torchbay.explain(compiled).calls["graph"] == len(VALUES)


def test_lets_nan_hit_itself(recording):
    compiled, calls = compiled_and_counted(lambda x, k: x * k, recording)
    for _ in range(3):
        assert compiled(torch.ones(1), float("nan")).isnan().all()
    assert calls() == {"graph": 2, "eager": 1}


def test_compares_long_strings_and_big_numbers_by_value(recording):
    compiled, calls = compiled_and_counted(lambda x, s, n: x + len(s) + n % 7, recording)
    for _ in range(3):
        compiled(torch.ones(1), "".join(["a"] * 999), int("9" * 40))
    assert calls() == {"graph": 2, "eager": 1}


class Text(str):
    __slots__ = ()


class Number(int):
    pass


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: Text("ab"), lambda: Text("abc")),
        (lambda: Number(2), lambda: Number(3)),
        (lambda: decimal.Decimal(2), lambda: decimal.Decimal(3)),
        (lambda: fractions.Fraction(1, 2), lambda: fractions.Fraction(1, 3)),
        (lambda: pathlib.Path("a"), lambda: pathlib.Path("bc")),
        (lambda: dt.date(2020, 1, 1), lambda: dt.date(2020, 10, 10)),
    ],
    ids=["str", "int", "Decimal", "Fraction", "Path", "date"],
)
def test_compares_immutable_values_by_value(make, other, recording):
    compiled, calls = compiled_and_counted(lambda x, s: (x + 1, str(s)), recording)
    for value in (make(), make(), make(), other()):
        assert compiled(torch.ones(1), value)[1] == str(value)
    assert calls() == {"graph": 2, "eager": 2}


def test_compares_numpy_scalars_by_value(recording):
    compiled, calls = compiled_and_counted(lambda x, s: x * float(s), recording)
    for value in (2, 2, 2, 3, 3):
        assert compiled(torch.ones(1), np.float32(value)).item() == value
    assert calls() == {"graph": 3, "eager": 2}


class Opaque:
    def __init__(self, factor):
        self.factor = factor


def test_guards_opaque_objects_by_identity_and_attributes(recording):
    compiled, calls = compiled_and_counted(lambda x, o: x * o.factor, recording)
    first, second = Opaque(2.0), Opaque(3.0)
    for thing, expected in ((first, 2), (first, 2), (second, 3), (second, 3), (first, 2)):
        assert compiled(torch.ones(1), thing).item() == expected
    assert calls() == {"graph": 3, "eager": 2}
    first.factor = 7.0
    assert compiled(torch.ones(1), first).item() == 7


def test_drops_a_specialization_with_the_object_it_is_about(recording):
    compiled = torchbay.compile(lambda x, o: x * o.factor, backend=recording, recompile_limit=2)
    for factor in range(6):
        thing = Opaque(float(factor))
        gone = weakref.ref(thing)
        for _ in range(2):
            assert compiled(torch.ones(1), thing).item() == factor
        del thing
        gc.collect()
        assert gone() is None
        assert not torchbay.explain(compiled).specializations


@pytest.mark.parametrize(
    ("make", "change", "read"),
    [
        (lambda: types.SimpleNamespace(k=2.0), lambda o: setattr(o, "k", 5.0), lambda o: o.k),
        (lambda: argparse.Namespace(k=2.0), lambda o: setattr(o, "k", 5.0), lambda o: o.k),
        (lambda: collections.UserDict(k=2.0), lambda o: o.update(k=5.0), lambda o: o["k"]),
        (lambda: SlottedBatch(torch.ones(1), 2.0), lambda o: setattr(o, "scale", 5.0), lambda o: o.scale),
        (lambda: {2.0}, lambda o: o.add(5.0), max),
        (lambda: collections.deque([2.0]), lambda o: o.append(5.0), lambda o: o[-1]),
        (lambda: np.full(1, 2.0), lambda o: o.fill(5.0), lambda o: float(o[0])),
        (lambda: bytearray(b"\2"), lambda o: o.__setitem__(0, 5), lambda o: o[0]),
        (lambda: types.MappingProxyType({"k": [2.0]}), lambda o: o["k"].insert(0, 5.0), lambda o: o["k"][0]),
    ],
    ids=["SimpleNamespace", "Namespace", "UserDict", "slots", "set", "deque", "numpy", "bytearray", "proxy"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_sees_changes_inside_mutable_objects(make, change, read, recording):
    compiled = torchbay.compile(lambda x, o: x * read(o), backend=recording)
    thing = make()
    assert [compiled(torch.ones(1), thing).item() for _ in range(3)] == [2.0] * 3
    change(thing)
    assert [compiled(torch.ones(1), thing).item() for _ in range(3)] == [5.0] * 3


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_never_bakes_a_numpy_array(recording):
    array = np.ones(3, dtype=np.float32)
    compiled = torchbay.compile(lambda x, a: x * torch.tensor(a), backend=recording)
    assert [compiled(torch.ones(3), array).sum().item() for _ in range(3)] == [3.0] * 3
    array[:] = 2
    assert compiled(torch.ones(3), array).sum().item() == 6


def test_serves_functions_as_arguments(recording):
    factor = 2.0

    def scaled(x):
        return x * factor

    compiled, calls = compiled_and_counted(lambda x, f: f(x), recording)
    assert [compiled(torch.ones(1), scaled).item() for _ in range(3)] == [2.0] * 3
    factor = 3.0
    assert [compiled(torch.ones(1), scaled).item() for _ in range(2)] == [3.0] * 2
    assert compiled(torch.ones(1), torch.neg).item() == -1
    assert calls() == {"graph": 3, "eager": 3}


def test_compares_bound_methods_by_what_they_are_bound_to(recording):
    thing = Opaque(2.0)
    Opaque.scale = lambda self, x: x * self.factor
    try:
        compiled, calls = compiled_and_counted(lambda x, f: f(x), recording)
        for _ in range(4):
            assert compiled(torch.ones(1), thing.scale).item() == 2
    finally:
        del Opaque.scale
    assert calls() == {"graph": 3, "eager": 1}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_never_compiles_for_a_dict_of_a_users_class(recording):
    class Config(dict):
        pass

    compiled, calls = compiled_and_counted(lambda c: c["x"] * c["k"], recording)
    for k in (2.0, 2.0, 2.0, 3.0):
        assert compiled(Config(x=torch.ones(1), k=k)).item() == k
    assert calls() == {"graph": 0, "eager": 4}
    assert recording.requests == []


def test_serves_modules_as_arguments(recording):
    compiled, calls = compiled_and_counted(lambda m, x: m(x), recording)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(2)
    for module in (first, second, first, second):
        assert torch.equal(compiled(module, x), module(x))
    first.weight.zero_()
    assert torch.equal(compiled(first, x), first(x))
    assert calls() == {"graph": 3, "eager": 2}


@pytest.mark.parametrize("depth", [100, 5000])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_survives_deep_arguments(depth, recording):
    nested_list, nested_tuple = [torch.ones(1)], (1,)
    chain = head = Opaque(1.0)
    for _ in range(depth):
        nested_list, nested_tuple = [nested_list], (nested_tuple,)
        chain.next = Opaque(1.0)
        chain = chain.next
    compiled = torchbay.compile(lambda x, thing: x + 1, backend=recording)
    for thing in (nested_list, nested_tuple, head):
        for _ in range(2):
            assert compiled(torch.ones(1), thing).item() == 2
    chain = head
    while hasattr(chain, "next"):  # frees the chain without recursion
        chain.next, chain = None, chain.next
        if chain is None:
            break


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_survives_arguments_that_hold_themselves(recording):
    compiled = torchbay.compile(lambda x, thing: x + 1, backend=recording)
    itself = []
    itself.append(itself)
    assert compiled(torch.ones(1), itself).item() == 2
    assert compiled(torch.ones(1), itself).item() == 2

    def makes_one(x, thing):
        thing.append(thing)
        return x + 1

    compiled = torchbay.compile(makes_one, backend=recording)
    for _ in range(3):
        assert compiled(torch.ones(1), []).item() == 2


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_keeps_changes_to_containers_that_were_passed(recording):
    def call(x, out, batch):
        out.append(x + 1)
        batch["y"] = x + 2
        return x

    compiled = torchbay.compile(call, backend=recording)
    for value in range(5):
        out, batch = [], {"x": 0}
        compiled(torch.full((1,), float(value)), out, batch)
        assert [t.item() for t in out] == [value + 1]
        assert batch["y"].item() == value + 2
        assert type(out[0]) is torch.Tensor


def test_serves_a_model_output_of_transformers(recording):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    compiled, calls = compiled_and_counted(lambda o: o.last_hidden_state * 2, recording)
    for value in range(3):
        given = outputs.BaseModelOutput(last_hidden_state=torch.full((1,), float(value)))
        assert compiled(given).item() == 2 * value
    assert calls() == {"graph": 2, "eager": 1}
