"""Symbols as the caller declares them, and what torch.export calls a dimension."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from torchbay._torch_symbols import is_number

__all__ = ["DimSpec", "declare", "declaring", "dim_spec", "fixing_line", "tie"]


def declare(size: Any, low: int | None, high: int | None, hint: int | None) -> None:
    """Keep a symbolic size in a range, and note the size that a backend is to tune for."""
    if not isinstance(size, torch.SymInt):
        return
    environment: Any = size.node.shape_env
    with declaring(environment):
        bool(low is None or size >= low)
        bool(high is None or size <= high)
    if hint is not None:
        environment.var_to_hint_override[size.node.expr] = hint


def tie(size: Any, other: Any) -> None:
    """Have two sizes be equal, one of which is symbolic, as they are in the observed run."""
    environment = next((s.node.shape_env for s in (size, other) if is_number(s)), None)
    if environment is not None:
        with declaring(environment):
            bool(size == other)


@contextlib.contextmanager
def declaring(environment: Any) -> Iterator[None]:
    """Let what is decided meanwhile be on the account of no line of the program."""
    environment.is_declaring = True
    try:
        yield
    finally:
        environment.is_declaring = False


def fixing_line(size: Any) -> str | None:
    """Return the line of the program that fixed a symbolic size, or None if none did."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node._expr
    environment: Any = size.node.shape_env
    if not environment.simplify(expression).is_number:
        return None
    about = [guard for guard in environment.guards if expression in guard.expr.free_symbols]
    return str(about[-1].sloc.framework_loc) if about else ""


@attrs.frozen
class DimSpec:
    """What one entry of torch.export's ``dynamic_shapes`` says, as `Declared` has it."""

    is_open: bool
    is_demanded: bool = False
    low: int | None = None
    high: int | None = None
    same: str = ""
    derived: Callable[[Any], Any] | None = None


def dim_spec(given: Any) -> DimSpec | None:
    """Read an entry of ``dynamic_shapes`` that is about one dimension, or return None."""
    from torch.export import Dim

    if type(given) is int:
        return DimSpec(is_open=False)
    kind = getattr(getattr(given, "type", None), "name", None)
    if type(given) is type(Dim.AUTO):
        return DimSpec(
            is_open=kind != "STATIC",
            is_demanded=kind == "DYNAMIC",
            low=given.min,
            high=given.max,
        )
    if not isinstance(given, Dim):
        return None
    root = getattr(given, "root", given)
    low, high = _bound(given.min), _bound(given.max)
    derived = getattr(given, "fn", None)
    return DimSpec(
        is_open=True, is_demanded=True, low=low, high=high, same=root.__name__, derived=derived
    )


def _bound(size: Any) -> int | None:
    return size if isinstance(size, int) else None
