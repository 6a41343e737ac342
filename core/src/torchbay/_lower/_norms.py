"""Norms whose weights are more precise than what they scale, as under autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchbay.plugin import Decompositions

__all__ = ["with_precise_statistics"]

aten = torch.ops.aten

_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,  # noqa: SLF001 - an operator's name
    aten._native_batch_norm_legit_functional.default,  # noqa: SLF001 - an operator's name
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
)


def with_precise_statistics(table: Decompositions) -> Decompositions:
    """Return decompositions that keep a norm's statistics as precise as the CPU's kernels do.

    PyTorch's round them to the type of the input, and gradients are computed from those.
    """
    return {**table, **{norm: _precise(table[norm]) for norm in _NORMS if norm in table}}


def _precise(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if x.device.type != "cpu" or weight is None or weight.dtype is x.dtype:
            return rule(x, *args, **kwargs)
        result, *statistics = rule(x.to(weight.dtype), *args, **kwargs)
        return result.to(x.dtype), *statistics

    return run
