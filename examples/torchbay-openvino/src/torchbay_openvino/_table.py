"""The table of conversions: what each operator of PyTorch is in OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from torchbay.plugin import UnsupportedGraph

__all__ = ["ANY", "BOOL", "FLOAT", "TABLE", "Conversion", "converts", "declined"]

FLOAT = frozenset({torch.float32})
BOOL = frozenset({torch.bool})
ANY = FLOAT | BOOL

Build = Callable[..., Any]


@attrs.frozen
class Conversion:
    """One operator's conversion.

    Attributes:
        build: Takes the operator's arguments in the order of its schema, tensors as outputs of
            OpenVINO's operators; returns the result, or a tuple with None for what it cannot make.
        operands: The element types its tensors may have. OpenVINO computes integers of 64 bits in
            32, and compares those of 32 bits as floats, so integers are never among them.
        index: Which argument is a tensor of integers that select rows of the first argument.
    """

    build: Build
    operands: frozenset[torch.dtype]
    index: int | None


TABLE: dict[object, Conversion] = {}


def converts(
    *targets: object, operands: frozenset[torch.dtype] = FLOAT, index: int | None = None
) -> Callable[[Build], Build]:
    """Enter the decorated function into the table."""

    def enter(build: Build) -> Build:
        TABLE.update(dict.fromkeys(targets, Conversion(build, operands, index)))
        return build

    return enter


def declined(reason: str) -> UnsupportedGraph:
    """Return the error that leaves a node to the caller's fallback."""
    return UnsupportedGraph(
        reason,
        account="torchbay-openvino",
        remedy="Allow a fallback, or use another backend for this function",
    )
