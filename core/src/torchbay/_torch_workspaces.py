"""Operators that keep memory for their backward in ways that no graph could repeat as they are.

How much it is, their libraries alone know: PyTorch's fake kernels say zero. And while autograd is
off, as it is in a graph, some keep none. Operators of our own stand for them in graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["keeping_workspace"]

aten = torch.ops.aten

_STANDING_FOR = {
    aten.mkldnn_rnn_layer.default: "mkldnn_rnn_layer",
    aten._cudnn_rnn.default: "cudnn_rnn",
}


def keeping_workspace(operator: Any, args: Sequence[Any]) -> Any:
    """Return what is to stand in a graph for an operator that is called while gradients are wanted.

    Sizes that are symbols leave the operator as it is: nothing can tell the size of its workspace.
    """
    if operator not in _STANDING_FOR or not torch.is_grad_enabled() or _is_symbolic(args):
        return operator
    return _registered()[operator]


@functools.cache
def _registered() -> dict[Any, Any]:
    """Register the operators; return them by what they stand for."""
    library = torch.library.Library("torchbay", "FRAGMENT")
    _libraries.append(library)
    return {operator: _register(library, operator) for operator in _STANDING_FOR}


# A library takes its operators along when it goes.
_libraries: list[torch.library.Library] = []


def _register(library: torch.library.Library, operator: Any) -> Any:
    name = _STANDING_FOR[operator]
    arguments = str(operator._schema).partition("(")[2]
    library.define(f"{name}({arguments}")
    library.impl(name, _with_workspace(operator), "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchbay::{name}", _fake_of(operator), lib=library)
    return getattr(torch.ops.torchbay, name).default


def _with_workspace(operator: Any) -> Callable[..., Any]:
    """Return the operator as it is when autograd is on, though nothing is recorded."""

    def run(*args: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            results = operator(*args)
        return tuple(torch.empty(0) if r is None else r for r in results)

    return run


def _fake_of(operator: Any) -> Callable[..., Any]:
    """Return a fake kernel that runs the operator on zeros, for the sizes of what it returns."""
    run = _with_workspace(operator)

    def fake(*args: Any) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            results = run(*map(_zeros, args))
            forms = [(r.size(), r.stride(), r.dtype, r.device) for r in results]
        return tuple(
            torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            for sizes, strides, dtype, device in forms
        )

    return fake


def _is_symbolic(args: Sequence[Any]) -> bool:
    tensors = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
    return any(
        isinstance(size, torch.SymInt)
        for tensor in tensors
        for size in getattr(tensor, "shape", ())
    )


def _zeros(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_zeros, value))
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = value.size(), value.stride()
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device).zero_()
