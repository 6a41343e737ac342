"""Convolutions, pooling, normalizations, softmax and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from openvino import opset15 as ov

from torchbay_openvino._table import converts, declined

from .operands import axes, floats, integers, rank, shape

__all__ = ["softmax"]

aten = torch.ops.aten


@converts(aten.embedding.default, index=1)
def _embedding(weight: Any, index: Any, *_: Any) -> Any:
    return ov.gather(weight, index, integers(0))


@converts(aten._softmax.default)
def _softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    if half_to_float:
        raise declined("OpenVINO is given no torch.float16")
    return softmax(x, dim)


def softmax(x: Any, dim: int) -> Any:
    """Return a softmax that is NaN in all of a row with a NaN in it."""
    if rank(x) == 0:
        raise declined("OpenVINO has no softmax of a number")
    result = ov.softmax(x, dim)
    total = ov.reduce_sum(result, integers([dim]), keep_dims=True)
    return ov.add(result, ov.multiply(total, floats(0.0)))


@converts(aten._log_softmax.default)
def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    if half_to_float or rank(x) == 0:
        raise declined("OpenVINO's log_softmax takes float32 with a dimension")
    result = ov.log_softmax(x, dim)
    total = ov.reduce_sum(ov.exp(result), integers([dim]), keep_dims=True)
    return ov.add(result, ov.multiply(total, floats(0.0)))


@converts(aten.native_layer_norm.default)
def _layer_norm(x: Any, sizes: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Any:
    dims = axes(x, range(-len(sizes), 0))
    result = ov.mvn(x, integers(dims), normalize_variance=True, eps=epsilon, eps_mode="INSIDE_SQRT")
    return _affine(result, weight, bias), None, None


@converts(aten.native_group_norm.default)
def _group_norm(
    x: Any,
    weight: Any,
    bias: Any,
    count: int,
    channels: int,
    area: int,
    groups: int,
    epsilon: float,
) -> Any:
    grouped = ov.reshape(
        x, integers([count, groups, channels // groups * area]), special_zero=False
    )
    normal = ov.mvn(
        grouped, integers([2]), normalize_variance=True, eps=epsilon, eps_mode="INSIDE_SQRT"
    )
    result = ov.reshape(normal, integers(shape(x)), special_zero=False)
    return _affine(result, _of_channels(weight, x), _of_channels(bias, x)), None, None


@converts(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, _momentum: float, epsilon: float
) -> Any:
    centered = ov.subtract(x, _of_channels(mean, x))
    deviation = ov.sqrt(ov.add(_of_channels(variance, x), floats(epsilon)))
    result = ov.divide(centered, deviation)
    return _affine(result, _of_channels(weight, x), _of_channels(bias, x)), None, None


@converts(aten.native_batch_norm.default)
def _native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Any:
    if training:
        raise declined("OpenVINO has no statistics of a batch")
    return _batch_norm(x, weight, bias, mean, variance, momentum, epsilon)


@converts(aten.convolution.default)
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
) -> Any:
    if transposed or rank(x) != len(stride) + 2:
        raise declined("only ordinary convolutions of batches are converted")
    if groups == 1:
        result = ov.convolution(x, weight, stride, padding, padding, dilation)
    else:
        first, *rest = shape(weight)
        grouped = ov.reshape(weight, integers([groups, first // groups, *rest]), special_zero=False)
        result = ov.group_convolution(x, grouped, stride, padding, padding, dilation)
    return _affine(result, None, _of_channels(bias, result))


@converts(aten.avg_pool2d.default)
def _avg_pool(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> Any:
    if rank(x) != 4 or ceil_mode or divisor is not None:
        raise declined("only ordinary average pooling of batches is converted")
    kernel, padding = _pair(kernel), _pair(padding)
    stride = _pair(stride or kernel)
    return ov.avg_pool(x, stride, padding, padding, kernel, not count_padding)


@converts(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool(x: Any, sizes: Sequence[int]) -> Any:
    if list(sizes) != [1, 1] or rank(x) != 4:
        raise declined("only global average pooling of batches is converted")
    return ov.reduce_mean(x, integers([2, 3]), keep_dims=True)


def _pair(values: Sequence[int]) -> list[int]:
    return list(values) * 2 if len(values) == 1 else list(values)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else ov.multiply(x, weight)
    return x if bias is None else ov.add(x, bias)


def _of_channels(values: Any, x: Any) -> Any:
    """Return one value per channel such that it spreads over the rest of ``x``."""
    if values is None:
        return None
    sizes = [1, shape(x)[1]] + [1] * (rank(x) - 2)
    return ov.reshape(values, integers(sizes), special_zero=False)
