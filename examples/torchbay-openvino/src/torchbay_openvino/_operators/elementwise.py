"""Arithmetic, comparisons and activations, element by element."""

from __future__ import annotations

from typing import Any

import torch
from openvino import opset15 as ov

from torchbay_openvino._table import ANY, BOOL, converts, declined

from .operands import floats, keep_nan

aten = torch.ops.aten

_UNARY = {
    aten.abs.default: ov.abs,
    aten.neg.default: ov.negative,
    aten.log.default: ov.log,
    aten.sqrt.default: ov.sqrt,
    aten.sin.default: ov.sin,
    aten.cos.default: ov.cos,
    aten.tanh.default: ov.tanh,
    aten.sigmoid.default: ov.sigmoid,
    aten.erf.default: ov.erf,
    aten.floor.default: ov.floor,
    aten.ceil.default: ov.ceiling,
    aten.silu.default: ov.swish,
}

for _target, _build in _UNARY.items():
    converts(_target)(_build)


@converts(aten.exp.default)
def _exp(x: Any) -> Any:
    return keep_nan(x, ov.exp(x))


@converts(aten.rsqrt.default)
def _rsqrt(x: Any) -> Any:
    return ov.divide(floats(1.0), ov.sqrt(x))


@converts(aten.reciprocal.default)
def _reciprocal(x: Any) -> Any:
    return ov.divide(floats(1.0), x)


@converts(aten.round.default)
def _round(x: Any) -> Any:
    return ov.round(x, "half_to_even")


@converts(aten.relu.default)
def _relu(x: Any) -> Any:
    return _at_least(x, 0.0)


@converts(aten.gelu.default)
def _gelu(x: Any, approximate: str) -> Any:
    return ov.gelu(x, "tanh" if approximate == "tanh" else "erf")


@converts(aten.leaky_relu.default)
def _leaky_relu(x: Any, slope: float) -> Any:
    return ov.select(ov.less(x, floats(0.0)), ov.multiply(x, floats(slope)), x)


@converts(aten.elu.default)
def _elu(x: Any, alpha: float, scale: float, input_scale: float) -> Any:
    below = ov.multiply(
        ov.subtract(_exp(ov.multiply(x, floats(input_scale))), floats(1.0)), floats(alpha)
    )
    return ov.multiply(ov.select(ov.less(x, floats(0.0)), below, x), floats(scale))


@converts(aten.clamp.default, aten.hardtanh.default)
def _clamp(x: Any, low: float | None, high: float | None) -> Any:
    x = x if low is None else _at_least(x, low)
    return x if high is None else _at_most(x, high)


@converts(aten.clamp_min.default)
def _at_least(x: Any, low: float) -> Any:
    return ov.select(ov.less(x, floats(low)), floats(low), x)


@converts(aten.clamp_max.default)
def _at_most(x: Any, high: float) -> Any:
    return ov.select(ov.less(floats(high), x), floats(high), x)


@converts(aten.hardswish.default)
def _hardswish(x: Any) -> Any:
    gate = _clamp(ov.add(x, floats(3.0)), 0.0, 6.0)
    return ov.divide(ov.multiply(x, gate), floats(6.0))


@converts(aten.maximum.default)
def _maximum(x: Any, y: Any) -> Any:
    return keep_nan(y, ov.select(ov.less(x, y), y, x))


@converts(aten.minimum.default)
def _minimum(x: Any, y: Any) -> Any:
    return keep_nan(y, ov.select(ov.less(y, x), y, x))


@converts(aten.add.Tensor, aten.add.Scalar)
def _add(x: Any, y: Any, alpha: float) -> Any:
    return ov.add(x, _scaled(y, alpha))


@converts(aten.sub.Tensor, aten.sub.Scalar)
def _sub(x: Any, y: Any, alpha: float) -> Any:
    return ov.subtract(x, _scaled(y, alpha))


@converts(aten.rsub.Scalar)
def _rsub(x: Any, y: Any, alpha: float) -> Any:
    return ov.subtract(floats(y), _scaled(x, alpha))


@converts(aten.mul.Tensor, aten.mul.Scalar)
def _mul(x: Any, y: Any) -> Any:
    return ov.multiply(x, floats(y))


@converts(aten.div.Tensor, aten.div.Scalar)
def _div(x: Any, y: Any) -> Any:
    return ov.divide(x, floats(y))


@converts(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def _pow(x: Any, exponent: Any) -> Any:
    return ov.power(x, floats(exponent))


def _scaled(x: Any, factor: float) -> Any:
    x = floats(x)
    return x if factor == 1 else ov.multiply(x, floats(factor))


@converts(aten.isnan.default)
def _isnan(x: Any) -> Any:
    return ov.not_equal(x, x)


@converts(aten.eq.Tensor, aten.eq.Scalar)
def _eq(x: Any, y: Any) -> Any:
    return ov.equal(x, floats(y))


@converts(aten.ne.Tensor, aten.ne.Scalar)
def _ne(x: Any, y: Any) -> Any:
    return ov.not_equal(x, floats(y))


@converts(aten.lt.Tensor, aten.lt.Scalar)
def _lt(x: Any, y: Any) -> Any:
    return ov.less(x, floats(y))


@converts(aten.gt.Tensor, aten.gt.Scalar)
def _gt(x: Any, y: Any) -> Any:
    return ov.less(floats(y), x)


# Of OpenVINO's own orders only `less` is false for NaN.
@converts(aten.le.Tensor, aten.le.Scalar)
def _le(x: Any, y: Any) -> Any:
    return ov.logical_or(_lt(x, y), _eq(x, y))


@converts(aten.ge.Tensor, aten.ge.Scalar)
def _ge(x: Any, y: Any) -> Any:
    return ov.logical_or(_gt(x, y), _eq(x, y))


@converts(aten.logical_not.default, aten.bitwise_not.default, operands=BOOL)
def _not(x: Any) -> Any:
    return ov.logical_not(x)


@converts(aten.logical_and.default, aten.bitwise_and.Tensor, operands=BOOL)
def _and(x: Any, y: Any) -> Any:
    return ov.logical_and(x, y)


@converts(aten.logical_or.default, aten.bitwise_or.Tensor, operands=BOOL)
def _or(x: Any, y: Any) -> Any:
    return ov.logical_or(x, y)


@converts(aten.logical_xor.default, aten.bitwise_xor.Tensor, operands=BOOL)
def _xor(x: Any, y: Any) -> Any:
    return ov.logical_xor(x, y)


@converts(aten.where.self, operands=ANY)
def _where(condition: Any, x: Any, y: Any) -> Any:
    return ov.select(condition, x, y)


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor, operands=ANY)
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return ov.select(mask, floats(value), x)


@converts(aten.clone.default, aten.detach.default, aten.alias.default, operands=ANY)
def _same(x: Any, *_: Any) -> Any:
    return x


@converts(aten._to_copy.default, operands=ANY)
def _to_copy(x: Any, dtype: torch.dtype | None, *_: Any) -> Any:
    kind = x.get_element_type().get_type_name()
    if dtype is None or _NAMES.get(dtype) == kind:
        return x
    if dtype is torch.bool:
        return ov.not_equal(x, floats(0.0))
    if dtype is torch.float32:
        return ov.convert(x, "f32")
    raise declined(f"OpenVINO is given no {dtype}")


_NAMES = {torch.float32: "f32", torch.bool: "boolean"}
