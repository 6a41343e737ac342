"""What happens around one compilation: many of them, several threads, and the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch

import torchbay
from torchbay.testing._contract import assert_right, step, step_inputs
from torchbay.testing._groups import quietly
from torchbay.testing._subject import Subject

__all__ = ["LifecycleTests"]


def other_step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute something else from the inputs of `step`."""
    hidden, total, doubled = step(*inputs)
    return hidden - 1, total * 3, doubled + 1


class LifecycleTests:
    """One test for each thing that goes wrong only the second time."""

    family = "lifecycle"

    def test_compiles_again(self, subject: Subject) -> None:
        """Makes an executable of its own from every request, whatever it compiled before.

        `Backend.compile`: "Compile ``request.graph``."
        """
        inputs = step_inputs(subject)
        functions: list[Callable[..., Any]] = [step, other_step, step]
        requests = [subject.request(function, *inputs) for function in functions]
        # Names are for messages; two graphs may share one.
        requests = [attrs.evolve(request, name="same") for request in requests]
        executables = [subject.build(request) for request in requests]
        for executable, function in zip(executables, functions, strict=True):
            assert_right(executable.run(list(inputs)), *inputs, function=function)

    def test_compiles_for_several_threads(self, subject: Subject) -> None:
        """Serves compiled objects that are first called from several threads at once.

        `Backend.compile`: "When called: on a miss, under the core's build lock, with grad mode off."
        """
        inputs = step_inputs(subject)
        compiled = [subject.compile(function) for function in (step, other_step)]

        def call(function: Callable[..., Any]) -> Any:
            with quietly():
                function(*inputs)
                return function(*inputs)

        with ThreadPoolExecutor(len(compiled)) as threads:
            results = list(threads.map(call, compiled))
        for result, function in zip(results, (step, other_step), strict=True):
            assert_right(result, *inputs, function=function)

    def test_lets_go_of_what_it_compiled(self, subject: Subject) -> None:
        """Keeps neither weights nor requests when the compiled object is gone.

        `Executable.run`: "keep an input or an output alive once it has returned."
        """
        layer = torch.nn.Linear(4, 3).to(subject.device)
        compiled, x = subject.compile(layer), subject.randn(2, 4)
        compiled.warmup(x)
        compiled(x)
        weight = weakref.ref(layer.weight)
        del layer, compiled
        torchbay.reset()
        gc.collect()
        assert weight() is None
