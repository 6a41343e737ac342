"""Gradients of PyTorch's operators, as its own database of them describes it.

    python -m pytest tests/gradients/test_operators.py -m "not slow"
    python -m pytest tests/gradients/test_operators.py -k "test_operator and cumsum"

The default run tries two sample inputs of each operator in float32 and one in complex64, where it
takes those, and the variants that write to their first argument. The slow one tries all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from trials import (
    BROKEN,
    Arguments,
    Trial,
    copied,
    play,
    share_from_graphs,
    spread,
    table,
    with_passes,
)

from torchbay.testing._groups import quietly
from torchbay.testing._torch_compat import operator_database

REFUSED = "sparse."
"""Operators whose names begin so take sparse tensors, which are refused."""

SAMPLES = {torch.float32: 2, torch.complex64: 1}


def dtypes_of(operator: Any) -> list[torch.dtype]:
    """Return the dtypes to try, of those that an operator has gradients in."""
    differentiable = operator.supported_backward_dtypes("cpu")
    return [dtype for dtype in SAMPLES if dtype in differentiable]


NAMES = [
    name
    for name, operator in operator_database().items()
    if operator.supports_autograd and dtypes_of(operator) and not name.startswith(REFUSED)
]


def samples_of(operator: Any, dtype: torch.dtype, count: int | None) -> list[Any]:
    torch.manual_seed(0)
    with quietly():
        return spread(operator.sample_inputs("cpu", dtype, requires_grad=True), count)


def called(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return what makes a program of a function that is no Python function."""

    def program(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return lambda: program


def on_a_copy(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return what makes a program that writes to a copy of its first argument."""

    def program(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(first.clone(), *args, **kwargs)

    return lambda: program


def writing_a_result(program: Callable[..., Any]) -> Callable[..., Any]:
    """Have a program write to a tensor that was computed before."""

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        computed = first.clone()
        return program(computed, *args, **kwargs), computed

    return call


def without_gradient(arguments: Arguments) -> Arguments:
    (first, *rest), kwargs = arguments
    return (first.detach(), *rest), kwargs


def trials_of(name: str, *, full: bool) -> Iterator[Trial]:
    """Try an operator on samples of its inputs."""
    operator = operator_database()[name]
    for dtype in dtypes_of(operator):
        count = None if full else SAMPLES[dtype]
        for number, sample in enumerate(samples_of(operator, dtype, count)):
            label = f"{name}, {str(dtype)[6:]}, sample {number}"
            arguments: Arguments = ((sample.input, *sample.args), dict(sample.kwargs))
            yield play(label, called(operator.op), passes_over(arguments))
            if operator.get_inplace() and not sample.broadcasts_input and (full or not number):
                yield from writing_trials(label, operator.get_inplace(), arguments)


def writing_trials(label: str, write: Any, arguments: Arguments) -> Iterator[Trial]:
    """Try the variant of an operator that writes to its first argument."""
    yield play(f"{label}, on a copy", on_a_copy(write), passes_over(arguments))
    passes = with_passes(lambda _, number: copied(arguments, number), writing_a_result)
    yield play(f"{label}, on a result", called(write), passes)
    bare = without_gradient(arguments)
    yield play(f"{label}, on an input without gradient", called(write), passes_over(bare))


def passes_over(arguments: Arguments) -> list[Any]:
    return with_passes(lambda _, number: copied(arguments, number))


tried = functools.cache(lambda name: tuple(trials_of(name, full=False)))


@pytest.mark.parametrize("name", NAMES)
def test_operator(name):
    assert [str(trial) for trial in tried(name) if trial.verdict in BROKEN] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_operator_on_every_sample(name):
    assert [str(t) for t in trials_of(name, full=True) if t.verdict in BROKEN] == []


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return [trial for name in NAMES for trial in tried(name)]


def test_prints_the_counts_and_is_never_wrong(trials, capsys):
    with capsys.disabled():
        print(f"\n\n{table('operators', trials)}\n")
    assert [str(trial) for trial in trials if trial.verdict in BROKEN] == []


def test_serves_most_programs_from_graphs(trials):
    assert share_from_graphs(trials) >= 0.9
