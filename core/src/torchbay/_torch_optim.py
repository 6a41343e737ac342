"""PyTorch's private names about optimizers, all of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["global_optimizer_hooks", "is_fused_step", "plain_optimizers"]


def global_optimizer_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks around the steps of every optimizer, the same tuple every time."""
    return _GLOBAL_HOOKS


_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def is_fused_step(operator: Any) -> bool:
    """Whether an operator is the whole step of an optimizer, which writes lists of tensors."""
    return operator in _FUSED


_FUSED = frozenset(
    overload
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    for packet in [getattr(torch.ops.aten, name)]
    for overload in [getattr(packet, overload) for overload in packet.overloads()]
)


@contextlib.contextmanager
def plain_optimizers() -> Iterator[None]:
    """Have optimizers compute as in eager while ``torch.compiler.is_compiling()`` is true.

    For compilers they compute bias corrections in float32 rather than in Python's floats, and
    some of them raise. What they ask is replaced for all threads, counted, and put back when the
    last user leaves.
    """
    _add_user(1)
    try:
        yield
    finally:
        _add_user(-1)


def _add_user(count: int) -> None:
    global _users
    with _lock:
        _users += count
        for module, name, original in _PLACES:
            setattr(module, name, _PLAIN[name] if _users else original)


def _number_of(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _as_it_is(values: Any) -> Any:
    return values


_lock = threading.Lock()
_users = 0
_PLAIN = {"_get_value": _number_of, "_stack_if_compiling": _as_it_is}
# It makes tensors of such numbers, which would fix them.
_ABOUT_TENSORS = "torch.optim.asgd"
_PLACES = [
    (module, name, vars(module)[name])
    for key, module in sys.modules.items()
    if key.startswith("torch.optim.") and key != _ABOUT_TENSORS
    for name in _PLAIN
    if name in vars(module)
]
