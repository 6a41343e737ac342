"""Gradients that a call leaves on its inputs, as statements that leave the same there."""

from __future__ import annotations

from collections.abc import Iterator

from torchbay._observe import Observation
from torchbay._reason import CannotServe
from torchbay._trace._effects import Write
from torchbay._trace._inputs import Inputs

__all__ = ["GradientWriter"]


class GradientWriter:
    """Lets fakes hold the gradients that tensors held before the call, and sees what becomes of it."""

    def __init__(self, observation: Observation, inputs: Inputs) -> None:
        positions, by_tensor = inputs.positions, inputs.by_tensor
        self._paths, self._fakes = inputs.paths, inputs.fakes
        self._found = [
            (g, positions[id(g.tensor)], by_tensor[id(g.before)] if g.before is not None else None)
            for g in observation.gradients
            if id(g.tensor) in positions
        ]

    def hold(self) -> None:
        """Let the fakes hold what the tensors held."""
        for _, position, before in self._found:
            self._fakes[position].grad = before

    def writes(self) -> Iterator[Write]:
        """Yield the statements.

        Raises:
            CannotServe: The traced run left gradients elsewhere than the observed one.
        """
        for gradient, position, before in self._found:
            after, path = self._fakes[position].grad, f"{self._paths[position]}.grad"
            if (after is not before) is not (gradient.after is not gradient.before):
                raise CannotServe(f"{path} is changed in one run of the call and not in another")
            if after is not before:
                yield Write(path, f"inputs[{position}].grad = ", gradient.after, after)
