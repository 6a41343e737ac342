"""Tensors made from nothing: constants of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from openvino import opset15 as ov

from torchbay_openvino._table import ANY, converts, declined

from .operands import shape

aten = torch.ops.aten

_TYPES: dict[torch.dtype | None, type[np.generic]] = {
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


@converts(aten.scalar_tensor.default)
def _scalar_tensor(value: float, dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled((), value, dtype)


@converts(aten.full.default)
def _full(sizes: Sequence[int], value: float, dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled(sizes, value, dtype or torch.tensor(value).dtype)


@converts(aten.zeros.default)
def _zeros(sizes: Sequence[int], dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled(sizes, 0, dtype or torch.float32)


@converts(aten.ones.default)
def _ones(sizes: Sequence[int], dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled(sizes, 1, dtype or torch.float32)


@converts(aten.full_like.default, operands=ANY)
def _full_like(x: Any, value: float, dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled(shape(x), value, dtype or _own(x))


@converts(aten.zeros_like.default, operands=ANY)
def _zeros_like(x: Any, dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled(shape(x), 0, dtype or _own(x))


@converts(aten.ones_like.default, operands=ANY)
def _ones_like(x: Any, dtype: torch.dtype | None, *_: Any) -> Any:
    return _filled(shape(x), 1, dtype or _own(x))


def _own(x: Any) -> torch.dtype:
    return torch.float32 if x.get_element_type().get_type_name() == "f32" else torch.bool


def _filled(sizes: Sequence[int], value: float, dtype: torch.dtype | None) -> Any:
    if dtype not in _TYPES:
        raise declined(f"OpenVINO is given no {dtype}")
    with np.errstate(over="ignore"):
        return ov.constant(np.full(tuple(sizes), value, dtype=_TYPES[dtype]))
