"""Operators that move elements and change none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from openvino import opset15 as ov

from torchbay_openvino._table import ANY, converts, declined

from .operands import axes, floats, integers, rank, shape

aten = torch.ops.aten

_moves: Callable[..., Callable[[Any], Any]] = functools.partial(converts, operands=ANY)


def _reshaped(x: Any, sizes: Sequence[int]) -> Any:
    return ov.reshape(x, integers(sizes), special_zero=False)


@_moves(aten.view.default, aten._unsafe_view.default)
def _view(x: Any, sizes: Sequence[int]) -> Any:
    if -1 in sizes:
        known = -functools.reduce(int.__mul__, sizes, 1)
        total = functools.reduce(int.__mul__, shape(x), 1)
        sizes = [total // known if size == -1 else size for size in sizes]
    return _reshaped(x, sizes)


@_moves(aten.permute.default)
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return ov.transpose(x, integers(axes(x, dims))) if dims else x


@_moves(aten.transpose.int)
def _transpose(x: Any, first: int, second: int) -> Any:
    order = list(range(rank(x)))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permute(x, order)


@_moves(aten.t.default)
def _t(x: Any) -> Any:
    return _permute(x, list(reversed(range(rank(x)))))


@_moves(aten.expand.default)
def _expand(x: Any, sizes: Sequence[int], *_: Any) -> Any:
    missing = len(sizes) - rank(x)
    own = (1,) * missing + shape(x)
    return ov.broadcast(x, integers([o if s == -1 else s for s, o in zip(sizes, own, strict=True)]))


@_moves(aten.repeat.default)
def _repeat(x: Any, times: Sequence[int]) -> Any:
    if not rank(x):
        raise declined("OpenVINO repeats a tensor without dimensions wrongly")
    return ov.tile(x, integers(times))


@_moves(aten.unsqueeze.default)
def _unsqueeze(x: Any, dim: int) -> Any:
    sizes = list(shape(x))
    sizes.insert(dim % (len(sizes) + 1), 1)
    return _reshaped(x, sizes)


@_moves(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(x: Any, dims: int | Sequence[int] | None = None) -> Any:
    gone = axes(x, dims)
    sizes = [size for at, size in enumerate(shape(x)) if size != 1 or at not in gone]
    return _reshaped(x, sizes)


@_moves(aten.select.int)
def _select(x: Any, dim: int, index: int) -> Any:
    return ov.gather(x, integers(index % shape(x)[dim]), integers(dim))


@_moves(aten.slice.Tensor)
def _slice(x: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    first, last, stride = slice(start, end, step).indices(shape(x)[dim])
    bounds = (integers([first]), integers([max(first, last)]), integers([stride]))
    return ov.slice(x, *bounds, integers([dim]))


@_moves(aten.cat.default)
def _cat(parts: Sequence[Any], dim: int) -> Any:
    return ov.concat(list(parts), dim)


@_moves(aten.stack.default)
def _stack(parts: Sequence[Any], dim: int) -> Any:
    at = dim % (rank(parts[0]) + 1)
    return ov.concat([_unsqueeze(part, at) for part in parts], at)


@_moves(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(x: Any, size: int, dim: int) -> Any:
    total = shape(x)[dim]
    return _split_with_sizes(x, [min(size, total - at) for at in range(0, total, size)], dim)


@_moves(aten.split_with_sizes.default)
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int) -> Any:
    return tuple(ov.variadic_split(x, integers(dim), integers(sizes)).outputs())


@_moves(aten.unbind.int)
def _unbind(x: Any, dim: int) -> Any:
    return tuple(_select(x, dim, at) for at in range(shape(x)[dim]))


@converts(aten.constant_pad_nd.default)
def _pad(x: Any, widths: Sequence[int], value: float) -> Any:
    if any(width < 0 for width in widths):
        raise declined("only padding that adds is converted")
    untouched = [0] * (rank(x) - len(widths) // 2)
    before = untouched + list(reversed(widths[::2]))
    after = untouched + list(reversed(widths[1::2]))
    return ov.pad(x, integers(before), integers(after), "constant", floats(value))
