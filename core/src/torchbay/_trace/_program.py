"""The call that is traced, as a function of the inputs of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchbay._call import Call, Item
from torchbay._observe import Observation, Reading, put
from torchbay._source import Names
from torchbay._torch_autograd import in_this_thread
from torchbay._torch_checkpoint import checkpoints_replaced
from torchbay._torch_compat import fake_tolist, fakes_as_tensors, operators_called_directly
from torchbay._torch_symbols import bind
from torchbay._trace._checkpoints import Checkpoints
from torchbay._trace._epilogue import Epilogue
from torchbay._trace._gates import GateAnswers
from torchbay._trace._gradients import GradientWriter
from torchbay._trace._inputs import Inputs
from torchbay._trace._joint import Differentiation
from torchbay._trace._modes import OpTracer, Substitution
from torchbay._trace._packing import KnownTensors

__all__ = ["Program"]


class Program:
    """Runs a call again around fakes; what it returns are the outputs of the graph.

    Attributes:
        ops: The operators that it issued.
        epilogue: What surrounds the graph.
        differentiation: The gradients of what it returned.
        results: How many of the outputs belong to effects and the result.
    """

    def __init__(
        self,
        call: Call,
        observation: Observation,
        inputs: Inputs,
        answers: GateAnswers,
        names: Names,
        mode: Any,
        *,
        asks_each: bool,
    ) -> None:
        self._call = call
        self._observation = observation
        self._inputs = inputs
        self._answers = answers
        self._mode = mode
        self._by_tensor, self._known = inputs.by_tensor, KnownTensors()
        self._tracer = OpTracer(self._by_tensor, answers, self._known, observation.ops)
        self._gradients = GradientWriter(observation, inputs)
        self._checkpoints = Checkpoints(observation)
        positions = inputs.positions
        self.ops = self._tracer.ops
        self.epilogue = Epilogue(call, observation, positions, names, self._gradients)
        self.differentiation = Differentiation(observation, inputs, asks_each=asks_each)
        self.results = 0

    @property
    def roots(self) -> int:
        """How many outputs come before those that gradients are computed with."""
        return self.results + sum(len(gate.reads) for gate in self._answers.gates)

    def __call__(self, *given: Any) -> list[Any]:
        """Run it."""
        args, kwargs = self._arguments(given[len(self._inputs.tensors) :])
        self.epilogue.expect(args, kwargs)
        self._gradients.hold()
        with self._active():
            value = self._call.function(*args, **kwargs)
        self.epilogue.read(value)
        made = self.epilogue.tensors
        self.results = len(made)
        with self._active():
            differentiated = self.differentiation.outputs(made, self._tracer)
        self._answers.finish(self._mode, self._inputs.fakes)
        reads = (read for gate in self._answers.gates for read in gate.reads)
        return [*map(self._known.lifted, made), *reads, *differentiated]

    def _arguments(self, numbers: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments around fakes; let containers hold symbols of numbers."""
        pairs = zip(self._inputs.numbers, numbers, strict=True)
        stand_ins = [(place, _number(number, place.value)) for place, number in pairs]
        items = {place.path: n for place, n in stand_ins if isinstance(place, Item)}
        tensors = dict.fromkeys(id(item.value) for item in self._call.tensors)
        arguments = self._call.around([self._by_tensor[key] for key in tensors], items)
        _put_numbers(self._observation, stand_ins)
        return arguments

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Be what every operator goes through."""
        answers, direct = self._answers, operators_called_directly
        substitution = Substitution(self._by_tensor, answers, self._known)
        with (
            in_this_thread(),
            fakes_as_tensors(),
            direct(_call_directly),
            self._tracer,
            substitution,
            fake_tolist(answers.tolist),
            checkpoints_replaced(self._checkpoints),
        ):
            yield


def _call_directly(function: Callable[..., Any], args: tuple[Any, ...], _original: Any) -> Any:
    return function(*args)


def _put_numbers(observation: Observation, stand_ins: Sequence[tuple[Item | Reading, Any]]) -> None:
    """Let containers hold the symbols of their numbers while the call is traced."""
    holders = {id(holder.container): holder for holder in observation.watched}
    for place, number in stand_ins:
        if isinstance(place, Reading):
            put(holders[id(place.holder)], place.key, number)


def _number(stand_in: Any, value: float) -> Any:
    """Return the symbol of a number, read from the tensor that holds it if it is a float."""
    if isinstance(value, int):
        return stand_in
    number = torch.ops.aten._local_scalar_dense(stand_in)  # noqa: SLF001 - an operator's name
    bind(number, value)
    return number
