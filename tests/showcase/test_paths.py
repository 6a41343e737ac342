"""Sixteen paths through one function: each right, and nothing computed twice in one call."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torchbay

STEPS = 4


def walk(x, weight):
    """Branch on data in a loop of four; the two branches of a step differ in their operators."""
    taken = []
    for step in range(STEPS):
        scores = torch.mm(x, weight).tanh()
        if scores[:, step].sum() > 0:
            x = x * 1.01 - scores * 0.02
            taken.append(True)
        else:
            x = x + scores.sin().exp() * 0.01
            taken.append(False)
    return x.cumsum(dim=0), taken


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def weight():
    return torch.randn(STEPS, STEPS, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def by_path(weight):
    """Return inputs that take each path: two for each."""
    generator, found = torch.Generator().manual_seed(2), {}
    for _ in range(1000):
        x = torch.randn(3, STEPS, generator=generator)
        found.setdefault(tuple(walk(x, weight)[1]), []).append(x)
    assert len(found) == 2**STEPS
    return {path: inputs[:2] for path, inputs in sorted(found.items())}


ORDERS = {
    "sorted": sorted,
    "reversed": lambda paths: sorted(paths, reverse=True),
    "shuffled": lambda paths: random.Random(3).sample(sorted(paths), len(paths)),
    "alternating": lambda paths: sorted(paths, key=lambda path: path[::-1]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_is_right_on_every_path_whichever_comes_first(order, weight, by_path):
    compiled = torchbay.compile(walk, backend="eager")
    paths = ORDERS[order](by_path)
    for turn, path in itertools.product((0, 1, 1, 0), paths):
        x = by_path[path][turn]
        (found, taken), (expected, _) = compiled(x, weight), walk(x, weight)
        assert tuple(taken) == path
        assert torch.equal(found, expected)
    explanation = torchbay.explain(compiled)
    assert dict(explanation.calls) == {"graph": 3 * 2**STEPS, "eager": 2**STEPS}
    assert explanation.eager == ()


def test_executes_on_each_path_what_eager_executes(weight, by_path, capsys):
    compiled = torchbay.compile(walk, backend="eager")
    for first, _ in by_path.values():
        compiled(first, weight)
    rows = []
    for path, (_, x) in by_path.items():
        expected = executed(lambda x=x: walk(x, weight))
        rows.append((path, executed(lambda x=x: compiled(x, weight)), expected))
    explanation = torchbay.explain(compiled)
    with capsys.disabled():
        print(f"\n{len(explanation.specializations)} paths, {len(explanation.graphs)} graphs")
        for path, found, expected in rows:
            taken = "".join("01"[branch] for branch in path)
            more = ", ".join(f"{name} {n:+}" for name, n in sorted(differences(found, expected)))
            print(f"{taken}: {found.total()} operators, eager {expected.total()}  {more}")
    assert explanation.calls["graph"] == 2**STEPS
    assert all(found == expected for _, found, expected in rows)


def differences(found, expected):
    return [
        (name, found[name] - expected[name])
        for name in found | expected
        if found[name] != expected[name]
    ]


UNCOUNTED = {
    "alias", "as_strided", "detach", "expand", "permute", "reshape", "select", "slice", "squeeze",
    "t", "transpose", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
    "empty", "empty_like", "empty_strided", "resize_",
    "item", "is_nonzero", "_local_scalar_dense",
}  # fmt: skip
"""Views, allocations, and what hands a value to Python."""


def executed(call):
    """Count the operators a call executes, wherever it does, those inside others left aside."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    events = [event for event in profiler.events() if event.name.startswith("aten::")]
    names = (event.name.removeprefix("aten::") for event in events if not is_nested(event))
    return Counter(name for name in names if name not in UNCOUNTED)


def is_nested(event):
    return event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
