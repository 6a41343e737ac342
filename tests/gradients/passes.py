"""The ways in which gradients of a call's results are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_leaves

__all__ = [
    "EXPANDED",
    "FEW",
    "PASSES",
    "STRIDED",
    "TWICE",
    "WITHOUT_FIRST",
    "WITHOUT_LAST",
    "Pass",
    "leaves_among",
    "tensors_among",
]

Tangent = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def dense(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers in one block of memory."""
    return torch.randn(output.shape, dtype=output.dtype, generator=generator)


def strided(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers in reverse order of dimensions, with gaps between them."""
    sizes = [*reversed(output.shape), 2]
    gapped = torch.randn(sizes, dtype=output.dtype, generator=generator)[..., 0]
    return gapped.permute([*reversed(range(output.dim()))])


def expanded(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return one random number everywhere, as the backward pass of ``sum`` does."""
    return torch.randn((), dtype=output.dtype, generator=generator).expand(output.shape)


def lazy(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return numbers that are yet to be conjugated, or negated."""
    if output.is_complex():
        return dense(output, generator).conj()
    return torch._neg_view(dense(output, generator))


@attrs.frozen
class Pass:
    """One backward pass.

    Attributes:
        tangent: Makes what comes back to an output.
        outputs: Which outputs of those that have gradients are in the loss; all, if that is none.
        leaves: Which leaves get gradients; all those reached, if None.
        times: How often it runs over the same graph.
    """

    tangent: Tangent = dense
    outputs: slice = slice(None)
    leaves: slice | None = None
    times: int = 1

    def run(self, result: Any, arguments: Any, seed: int) -> None:
        """Write the gradients of a result where they belong."""
        outputs = [tensor for tensor in tensors_among(result) if tensor.requires_grad]
        kept = outputs[self.outputs] or outputs
        generator = torch.Generator().manual_seed(seed)
        tangents = [self.tangent(output, generator) for output in kept]
        wanted = leaves_among(arguments)[self.leaves] if self.leaves else None
        for last in range(self.times)[::-1] if kept else ():
            torch.autograd.backward(kept, tangents, retain_graph=last > 0, inputs=wanted or None)


STRIDED, EXPANDED = Pass(strided), Pass(expanded)
WITHOUT_FIRST, WITHOUT_LAST = Pass(outputs=slice(1, None)), Pass(outputs=slice(-1))
TWICE = Pass(times=2)

FEW = (Pass(), Pass(), STRIDED, EXPANDED)
"""A call each. The first is observed; the second shows whether calls of its kind hit a graph."""

PASSES = (
    *FEW,
    Pass(lazy),
    WITHOUT_FIRST,
    WITHOUT_LAST,
    Pass(leaves=slice(1)),
    TWICE,
)
"""All there are."""


def tensors_among(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def leaves_among(value: Any) -> list[torch.Tensor]:
    """Return those that gradients are written to."""
    return [tensor for tensor in tensors_among(value) if tensor.requires_grad and tensor.is_leaf]
