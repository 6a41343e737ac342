"""The strides that outputs are promised to have.

For a view of a result that it pads, Inductor keeps the order of the strides and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["as_promised", "broken_promises"]

_Run = Callable[[list[Any]], Sequence[Any]]
_Strides = Sequence[Any] | None


def broken_promises(
    fakes: Sequence[torch.Tensor], chosen: Sequence[_Strides], free: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Return the strides of the outputs for which others were chosen.

    Args:
        fakes: The outputs as the graph has them.
        chosen: The strides that Inductor chose.
        free: The outputs whose strides it may choose.
    """
    pairs = enumerate(zip(fakes, chosen, strict=True))
    return {
        position: tuple(fake.stride())
        for position, (fake, found) in pairs
        if position not in free and found is not None and _differ(fake, found)
    }


def _differ(fake: torch.Tensor, strides: Sequence[Any]) -> bool:
    # Nothing is decided about symbols: those that differ were not padded.
    return any(
        isinstance(expected, int)
        and isinstance(found, int)
        and expected != found
        and not (isinstance(size, int) and size == 1)
        for size, expected, found in zip(fake.shape, fake.stride(), strides, strict=True)
    )


def as_promised(run: _Run, strides: Mapping[int, tuple[int, ...]]) -> _Run:
    """Return ``run`` with some of its outputs copied to where they have these strides."""
    if not strides:
        return run

    def run_and_copy(inputs: list[Any]) -> Sequence[Any]:
        outputs = list(run(inputs))
        for position, wanted in strides.items():
            found = outputs[position]
            made = torch.empty_strided(found.size(), wanted, dtype=found.dtype, device=found.device)
            outputs[position] = made.copy_(found)
        return outputs

    return run_and_copy
