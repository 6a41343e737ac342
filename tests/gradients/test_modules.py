"""Gradients of PyTorch's modules, as its own database of them describes it.

    python -m pytest tests/gradients/test_modules.py -m "not exhaustive"
    python -m pytest tests/gradients/test_modules.py -k BatchNorm

The default run tries two sample inputs of each module with ``backward()`` outside, and one inside a
compiled training step; in training mode, and in evaluation mode where that differs. The exhaustive one
tries up to 30 of each. Parameters and buffers are compared after each call, as are results and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from passes import PASSES, tensors_among
from scenarios._scenario import Call, Change, Program
from torch import nn
from torch.testing._internal.common_modules import module_db
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

MODULES = {entry.name: entry for entry in module_db}
OUTSIDE, INSIDE, MANY = 2, 1, 30


def samples_of(name: str, count: int, *, training: bool) -> list[Any]:
    torch.manual_seed(0)
    entry = MODULES[name]
    with quietly(), torch.enable_grad():
        found = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
    usable = [sample for sample in found if sample.forward_input is not None]
    return spread(usable, count)


def makes(name: str, sample: Any, *, training: bool) -> Callable[[], nn.Module]:
    given = sample.constructor_input

    def make() -> nn.Module:
        module = MODULES[name].module_cls(*given.args, **given.kwargs)
        return module.to(torch.float32).train(training)

    return make


def between_calls(module: nn.Module) -> None:
    """Take away gradients, and give parameters other values."""
    module.zero_grad()
    with torch.no_grad():
        for parameter in module.parameters():
            if not nn.parameter.is_lazy(parameter):
                parameter.mul_(0.875)


def steps_outside(arguments: Arguments) -> list[Call | Change]:
    """Return calls with a backward pass after each."""
    calls = with_passes(lambda _, number: copied(arguments, number))
    return [step for call in calls for step in (Change(between_calls), call)]


def training_step(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute a loss and write its gradients."""
    outputs = [tensor for tensor in tensors_among(module(*args, **kwargs)) if tensor.requires_grad]
    loss = sum((output * projection_for(output)).sum() for output in outputs)
    loss.backward()
    return loss.detach()


def projection_for(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).reshape(output.shape)


def steps_inside(arguments: Arguments) -> list[Call | Change]:
    """Return training steps: three with no gradients to begin with, three that add to them."""

    def make(module: nn.Module, number: int) -> Arguments:
        args, kwargs = copied(arguments, number)
        return (module, *args), kwargs

    first, *rest = with_passes(make, passes=PASSES[:6])
    return [first, Change(between_calls), rest[0], Change(between_calls), *rest[1:]]


def in_a_step(make: Callable[[], nn.Module]) -> Callable[[], Program]:
    return lambda: Program(training_step, make())


def modes_of(name: str) -> tuple[bool, ...]:
    return (True, False) if MODULES[name].train_and_eval_differ else (True,)


def trials_of(name: str, *, full: bool) -> Iterator[Trial]:
    """Try a module on samples of its inputs."""
    for training in modes_of(name):
        samples = samples_of(name, MANY if full else OUTSIDE, training=training)
        for number, sample in enumerate(samples):
            label = f"{name}, {'training' if training else 'evaluation'}, sample {number}"
            given = sample.forward_input
            arguments: Arguments = (given.args, given.kwargs)
            make = makes(name, sample, training=training)
            yield play(label, make, steps_outside(arguments))
            if full or number < INSIDE:
                yield play(f"{label}, a step", in_a_step(make), steps_inside(arguments))


tried = functools.cache(lambda name: tuple(trials_of(name, full=False)))


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    assert [str(trial) for trial in tried(name) if trial.verdict in BROKEN] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
def test_module_on_many_samples(name):
    assert [str(t) for t in trials_of(name, full=True) if t.verdict in BROKEN] == []


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return [trial for name in MODULES for trial in tried(name)]


def test_prints_the_counts_and_is_never_wrong(trials, capsys):
    with capsys.disabled():
        print(f"\n\n{table('modules', trials)}\n")
    assert [str(trial) for trial in trials if trial.verdict in BROKEN] == []


def test_serves_most_programs_from_graphs(trials):
    assert share_from_graphs(trials) >= 0.98
