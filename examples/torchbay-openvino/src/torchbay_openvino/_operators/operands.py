"""OpenVINO operands: constants, shapes, and values that pass NaN on as PyTorch does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from openvino import opset15 as ov

__all__ = ["axes", "floats", "integers", "keep_nan", "rank", "shape"]


def floats(value: Any) -> Any:
    """Return a number as a constant; anything else as it is."""
    if not isinstance(value, bool | int | float):
        return value
    with np.errstate(over="ignore"):
        return ov.constant(np.float32(value))


def integers(values: int | Sequence[int]) -> Any:
    """Return sizes, axes or positions as a constant."""
    return ov.constant(np.array(values, dtype=np.int64))


def shape(value: Any) -> tuple[int, ...]:
    """Return the sizes of an operand."""
    output = value.output(0) if hasattr(value, "output") else value
    return tuple(output.get_shape())


def rank(value: Any) -> int:
    """Return the number of an operand's dimensions."""
    return len(shape(value))


def axes(value: Any, dims: int | Sequence[int] | None) -> list[int]:
    """Return dimensions counted from the front; all of them for none, as reductions have it."""
    count = rank(value)
    wanted = [dims] if isinstance(dims, int) else list(dims or range(count))
    return [dim % count for dim in wanted if count]


def keep_nan(source: Any, result: Any) -> Any:
    """Return ``result``, with NaN wherever ``source`` is NaN."""
    return ov.select(ov.not_equal(source, source), source, result)
