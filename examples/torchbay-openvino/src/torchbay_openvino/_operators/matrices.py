"""Products of matrices, and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from openvino import opset15 as ov

from torchbay_openvino._table import ANY, converts, declined

from .neural import softmax
from .operands import floats, integers, shape

aten = torch.ops.aten


@converts(aten.mm.default, aten.bmm.default)
def _product(a: Any, b: Any) -> Any:
    return ov.matmul(a, b, transpose_a=False, transpose_b=False)


@converts(aten.addmm.default, aten.baddbmm.default)
def _affine(bias: Any, a: Any, b: Any, beta: float, alpha: float) -> Any:
    product = _times(_product(a, b), alpha)
    return product if beta == 0 else ov.add(_times(bias, beta), product)


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1 else ov.multiply(x, floats(factor))


@converts(aten._scaled_dot_product_flash_attention_for_cpu.default, operands=ANY)
def _flash_attention(
    query: Any,
    key: Any,
    value: Any,
    dropout: float,
    causal: bool,
    mask: Any,
    scale: float | None,
) -> Any:
    return _attention(query, key, value, mask, dropout, causal, scale), None


@converts(aten.scaled_dot_product_attention.default, operands=ANY)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool = False,
) -> Any:
    if dropout or grouped:
        raise declined("OpenVINO's attention has no dropout and one query head a key head")
    scale = scale or shape(query)[-1] ** -0.5
    scores = _times(ov.matmul(query, key, transpose_a=False, transpose_b=True), scale)
    for bias in (_bias(mask), _triangle(scores) if causal else None):
        scores = scores if bias is None else ov.add(scores, bias)
    return _product(_attended(scores), value)


def _attended(scores: Any) -> Any:
    """Return the softmax of scores; PyTorch makes it 0 where all of a row is masked."""
    masked = ov.equal(scores, floats(-np.inf))
    row = ov.reduce_logical_and(masked, integers([-1]), keep_dims=True)
    return ov.select(row, floats(0.0), softmax(scores, -1))


def _bias(mask: Any) -> Any:
    if mask is None or mask.get_element_type().get_type_name() == "f32":
        return mask
    return ov.select(mask, floats(0.0), floats(-np.inf))


def _triangle(scores: Any) -> Any:
    """Return a mask of what lies behind each position."""
    rows, columns = shape(scores)[-2:]
    return ov.constant(np.triu(np.full((rows, columns), -np.inf, dtype=np.float32), 1))
