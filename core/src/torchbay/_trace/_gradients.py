"""Gradients that a call leaves on its inputs, as statements that leave the same there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchbay._observe import Observation
from torchbay._reason import CannotServe
from torchbay._trace._effects import Write

__all__ = ["GradientWriter"]


class GradientWriter:
    """Lets fakes hold the gradients that tensors held before the call, and sees what becomes of it."""

    def __init__(
        self,
        observation: Observation,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[str],
        fakes: Sequence[torch.Tensor],
    ) -> None:
        by_tensor = {id(tensor): fake for tensor, fake in zip(tensors, fakes, strict=True)}
        positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        known = [g for g in observation.gradients if id(g.tensor) in positions]
        self._found = [
            (
                g,
                positions[id(g.tensor)],
                by_tensor.get(id(g.before)) if g.before is not None else None,
            )
            for g in known
        ]
        self._paths = paths
        self._fakes = fakes

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
