"""Sums, means and norms over dimensions.

Extremes are left out: OpenVINO's pass over NaN and know no infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from openvino import opset15 as ov

from torchbay_openvino._table import BOOL, converts, declined

from .operands import axes, integers

aten = torch.ops.aten


@converts(aten.sum.default)
def _sum_all(x: Any, dtype: torch.dtype | None) -> Any:
    return _sum(x, None, keepdim=False, dtype=dtype)


@converts(aten.sum.dim_IntList)
def _sum(x: Any, dims: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    return _reduced(ov.reduce_sum, x, dims, keepdim, dtype)


@converts(aten.mean.default)
def _mean_all(x: Any, dtype: torch.dtype | None) -> Any:
    return _mean(x, None, keepdim=False, dtype=dtype)


@converts(aten.mean.dim)
def _mean(x: Any, dims: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    return _reduced(ov.reduce_mean, x, dims, keepdim, dtype)


@converts(aten.linalg_vector_norm.default)
def _vector_norm(x: Any, order: float, dims: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    if order == 1:
        return _reduced(ov.reduce_l1, x, dims, keepdim, dtype)
    if order == 2:
        return _reduced(ov.reduce_l2, x, dims, keepdim, dtype)
    raise declined(f"OpenVINO has no norm of order {order}")


@converts(aten.any.default, operands=BOOL)
def _any_all(x: Any) -> Any:
    return _any(x, None, keepdim=False)


@converts(aten.any.dim, aten.any.dims, operands=BOOL)
def _any(x: Any, dims: Any, keepdim: bool) -> Any:
    return _reduced(ov.reduce_logical_or, x, dims, keepdim, None)


@converts(aten.all.default, operands=BOOL)
def _all_all(x: Any) -> Any:
    return _all(x, None, keepdim=False)


@converts(aten.all.dim, aten.all.dims, operands=BOOL)
def _all(x: Any, dims: Any, keepdim: bool) -> Any:
    return _reduced(ov.reduce_logical_and, x, dims, keepdim, None)


def _reduced(
    reduce: Callable[..., Any], x: Any, dims: Any, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    if dtype not in (None, torch.float32):
        raise declined(f"OpenVINO is given no {dtype}")
    wanted = axes(x, dims)
    return reduce(x, integers(wanted), keepdim) if wanted else x
