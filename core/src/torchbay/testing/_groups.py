"""Many small computations compiled as one graph, because some compilers take seconds for each.

Every computation is judged by itself. When a graph is declined or fails, its halves are tried, down
to the computation that is the cause.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch.fx import GraphModule

from torchbay.testing import tolerance
from torchbay.testing._subject import Subject, tensors_in

__all__ = ["Case", "Groups", "Unavailable", "quietly", "selected"]


class Unavailable(Exception):
    """This PyTorch cannot make the computation, on any backend."""


@attrs.frozen(eq=False)
class Case:
    """One computation.

    Attributes:
        module: What is compiled; it may write to its inputs and its buffers.
        inputs: What it is called with.
        truth: The same computation, which takes float64.
    """

    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    truth: Callable[..., Any]


class _Together(torch.nn.Module):
    """Calls several modules, each with inputs of its own."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(modules)

    def forward(self, inputs: Sequence[Sequence[torch.Tensor]]) -> tuple[Any, ...]:
        return tuple(part(*given) for part, given in zip(self.parts, inputs, strict=True))


@attrs.define(eq=False)
class Groups:
    """The results of many cases, computed group by group when first asked for.

    Attributes:
        subject: The backend they run on.
        makers: Name -> what makes the case.
        size: How many go into one graph.
    """

    subject: Subject
    makers: Mapping[str, Callable[[], Case]]
    size: int = 40
    _results: dict[str, str | Exception] = attrs.field(factory=dict, init=False)

    def check(self, name: str) -> None:
        """Fail, or be refused, as the backend did with this case."""
        if name not in self._results:
            self._run(self._group_of(name))
        result = self._results[name]
        if isinstance(result, Unavailable):
            pytest.skip(str(result))
        if isinstance(result, Exception):
            raise result
        if result:
            pytest.fail(f"{name}: {result}", pytrace=False)

    def _group_of(self, name: str) -> dict[str, Case]:
        names = list(self.makers)
        start = names.index(name) // self.size * self.size
        cases = {}
        for other in names[start : start + self.size]:
            try:
                cases[other] = self.makers[other]()
            except Unavailable as reason:
                self._results[other] = reason
        return cases

    def _run(self, cases: Mapping[str, Case]) -> None:
        if not cases:
            return
        try:
            name = next(iter(cases)) if len(cases) == 1 else f"group of {len(cases)}"
            found = _results_of(self.subject, list(cases.values()), name)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is a result
            self._narrow(cases, error)
            return
        for (name, case), actual in zip(cases.items(), found, strict=True):
            self._results[name] = _judged(case, actual)

    def _narrow(self, cases: Mapping[str, Case], error: Exception) -> None:
        names = list(cases)
        if len(names) == 1:
            self._results[names[0]] = error.with_traceback(None)
            return
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            self._run({name: cases[name] for name in half})


def _results_of(subject: Subject, cases: Sequence[Case], name: str) -> list[list[torch.Tensor]]:
    """Compile cases together; return for each its outputs and everything it can have changed."""
    modules = copy.deepcopy([case.module for case in cases])
    compiled = subject.compile(_Together(modules), name=name)
    with quietly():
        compiled.warmup([copy.deepcopy(case.inputs) for case in cases])
        inputs = [copy.deepcopy(case.inputs) for case in cases]
        outputs = compiled(inputs)
    return [_changed(*parts) for parts in zip(outputs, inputs, modules, strict=True)]


def _changed(outputs: Any, inputs: Sequence[torch.Tensor], module: Any) -> list[torch.Tensor]:
    # A traced graph keeps its literals as buffers; nothing writes those.
    is_model = isinstance(module, torch.nn.Module) and not isinstance(module, GraphModule)
    buffers = module.buffers() if is_model else ()
    return [*tensors_in(outputs), *inputs, *buffers]


def _judged(case: Case, actual: list[torch.Tensor]) -> str:
    with quietly():
        eager = _observed(copy.deepcopy(case.module), copy.deepcopy(case.inputs))
        try:
            inputs = tuple(map(tolerance.precise, copy.deepcopy(case.inputs)))
            truth = _observed(copy.deepcopy(case.truth), inputs)
        except RuntimeError:  # not every operator has a float64 kernel
            truth = eager
    if [t.shape for t in truth] != [t.shape for t in eager]:
        truth = eager
    return tolerance.complaint(actual, eager, truth)


def _observed(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    outputs = function(*inputs)
    return _changed(outputs, inputs, function)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Run without gradients, and without PyTorch's advice about single operators."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Return the values of a parameter in the tests of this class that are to run, in order."""
    values: list[str] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.cls is request.cls:
            given = item.callspec.params if hasattr(item, "callspec") else {}
            values += [str(given[parameter])] if parameter in given else []
    return values
