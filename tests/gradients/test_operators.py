"""Gradients of PyTorch's operators, as its own database of them describes it.

    python -m pytest tests/gradients/test_operators.py -m "not exhaustive"
    python -m pytest tests/gradients/test_operators.py -k "test_operator and cumsum"

The default run tries one sample input of each operator in float32 and one in complex64, where it
takes those, and the variants that write to their first argument. The exhaustive one tries up to 30.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from passes import (
    EXPANDED,
    FEW,
    PASSES,
    STRIDED,
    TWICE,
    WITHOUT_FIRST,
    WITHOUT_LAST,
    Pass,
)
from scenarios._scenario import Call
from trials import (
    BROKEN,
    Arguments,
    Trial,
    Wrap,
    copied,
    play,
    share_from_graphs,
    spread,
    table,
    unchanged,
    with_passes,
)

from torchbay.testing._groups import quietly
from torchbay.testing._torch_compat import operator_database

REFUSED = "sparse."
"""Operators whose names begin so take sparse tensors, which are refused."""

SAMPLES = {torch.float32: 1, torch.complex64: 1}
MANY = 30


def dtypes_of(operator: Any) -> list[torch.dtype]:
    """Return the dtypes to try, of those that an operator has gradients in."""
    differentiable = operator.supported_backward_dtypes("cpu")
    return [dtype for dtype in SAMPLES if dtype in differentiable]


GAUGES = {"linalg.eig", "linalg.eigh", "linalg.svd", "svd", "svd_lowrank", "pca_lowrank"}
"""Vectors that are defined up to a sign or phase: a loss is to be of what the database says."""

UNLIKE_EAGER = {
    # Eager has no gradient of one statistic unless the other one has one as well.
    "native_group_norm": (WITHOUT_FIRST, WITHOUT_LAST),
    # Eager makes a gradient that it cannot add to: "ZeroTensors are immutable".
    "sgn": (TWICE,),
    # Slices of a tangent that had to be laid out anew share its memory, where eager copies each.
    "hstack": (STRIDED, EXPANDED),
    "vstack": (STRIDED, EXPANDED),
}
"""Passes in which a graph does otherwise than eager, with the reason."""

NAMES = [
    name
    for name, operator in operator_database().items()
    if operator.supports_autograd and dtypes_of(operator) and not name.startswith(REFUSED)
]


def samples_of(operator: Any, dtype: torch.dtype, count: int) -> list[Any]:
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


def processed(sample: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what has a program end in what the database takes the gradients of."""
    return lambda program: (
        lambda *args, **kwargs: sample.output_process_fn_grad(program(*args, **kwargs))
    )


def drawing_as_it_finds(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for the database's function that seeds the generator inside an operator."""
    return operator(*args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def _unseeded():
    with pytest.MonkeyPatch.context() as patch:
        for name, module in sys.modules.items():
            if name.startswith("torch.testing") and hasattr(module, "wrapper_set_seed"):
                patch.setattr(module, "wrapper_set_seed", drawing_as_it_finds)
        yield


def without_gradient(arguments: Arguments) -> Arguments:
    (first, *rest), kwargs = arguments
    return (first.detach(), *rest), kwargs


def trials_of(name: str, *, full: bool) -> Iterator[Trial]:
    """Try an operator on samples of its inputs."""
    operator = operator_database()[name]
    left_out = UNLIKE_EAGER.get(name, ())
    every, few = ([one for one in group if one not in left_out] for group in (PASSES, FEW))
    for dtype in dtypes_of(operator):
        count = MANY if full else SAMPLES[dtype]
        for number, sample in enumerate(samples_of(operator, dtype, count)):
            label = f"{name}, {str(dtype)[6:]}, sample {number}"
            is_first = dtype == torch.float32 and not number
            passes = every if full or is_first else few
            through = processed(sample) if name in GAUGES else unchanged
            calls = calls_over(arguments_of(sample), passes, through)
            yield play(label, called(operator.op), calls)
            if full or is_first:
                yield from writing_trials(label, operator.get_inplace(), sample)


def writing_trials(label: str, write: Any, sample: Any) -> Iterator[Trial]:
    """Try the variant of an operator that writes to its first argument, if there is one."""
    if write is None or sample.broadcasts_input:
        return
    arguments = arguments_of(sample)
    yield play(f"{label}, on a copy", on_a_copy(write), calls_over(arguments, FEW))
    on_a_result = calls_over(arguments, FEW, writing_a_result)
    yield play(f"{label}, on a result", called(write), on_a_result)
    bare = calls_over(without_gradient(arguments), FEW)
    yield play(f"{label}, on an input without gradient", called(write), bare)


def arguments_of(sample: Any) -> Arguments:
    return (sample.input, *sample.args), dict(sample.kwargs)


def calls_over(
    arguments: Arguments, passes: Sequence[Pass], through: Wrap = unchanged
) -> list[Call]:
    return with_passes(lambda _, number: copied(arguments, number), through, passes)


tried = functools.cache(lambda name: tuple(trials_of(name, full=False)))


@pytest.mark.parametrize("name", NAMES)
def test_operator(name):
    assert [str(trial) for trial in tried(name) if trial.verdict in BROKEN] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_operator_on_many_samples(name):
    assert [str(t) for t in trials_of(name, full=True) if t.verdict in BROKEN] == []


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return [trial for name in NAMES for trial in tried(name)]


def test_prints_the_counts_and_is_never_wrong(trials, capsys):
    with capsys.disabled():
        print(f"\n\n{table('operators', trials)}\n")
    assert [str(trial) for trial in trials if trial.verdict in BROKEN] == []


def test_serves_most_programs_from_graphs(trials):
    assert share_from_graphs(trials) >= 0.88
