"""What surrounds the graph: the statements and the expression that follow it on every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchbay._access import Access
from torchbay._call import Call
from torchbay._observe import ABSENT, Observation, Snapshot, argument_holders
from torchbay._source import Names
from torchbay._trace._effects import EffectWriter, Twins
from torchbay._trace._gradients import GradientWriter
from torchbay._trace._result import ResultReader

__all__ = ["Epilogue"]


class Epilogue:
    """The effects of a call, then its result, as source.

    Attributes:
        effects: Statements that leave in containers what the call left there.
        result: An expression that makes the result.
    """

    def __init__(
        self,
        call: Call,
        observation: Observation,
        positions: Mapping[int, int],
        names: Names,
        gradients: GradientWriter,
    ) -> None:
        self.result = ""
        self.effects: tuple[str, ...] = ()
        self._call = call
        self._observation = observation
        self._gradients = gradients
        self._twins = Twins(call, call)
        self._passed = Snapshot(())
        access = Access(names, observation.watched, call)
        self._writer = EffectWriter(observation, positions, access, names)
        self._reader = ResultReader(call, positions, names, access, self._writer.bound)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The new tensors, in the order of the graph's outputs."""
        return self._reader.tensors

    def expect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of the traced call before it runs."""
        again = Call.of(self._call.function, args, kwargs)
        self._twins = Twins(self._call, again)
        self._passed = Snapshot(argument_holders(again))

    def read(self, result: Any) -> None:
        """Compare what the traced call left and returned with what the observed call did."""
        traced = [*self._observation.before.effects(), *self._passed.effects()]
        writes = [*self._writer.writes(traced, self._twins), *self._gradients.writes()]
        values = [(w.path, w.observed, w.traced) for w in writes if w.observed is not ABSENT]
        *sources, self.result = self._reader.expressions(
            [*values, ("result", self._observation.result, result)]
        )
        found = iter(sources)
        lines = [f"{w.head}{'' if w.observed is ABSENT else next(found)}{w.tail}" for w in writes]
        self.effects = (*self._writer.bindings, *lines)
