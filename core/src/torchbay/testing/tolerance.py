"""How far a result may lie from the truth: one table for every test of the kit.

The truth is the same computation in float64 on the same inputs. What a backend may be off by is a
multiple of what PyTorch's eager execution is off by in the dtype under test, plus a floor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["FACTOR", "FLOOR", "complaint", "precise"]

FACTOR = 10.0
"""How many times eager's own largest error is allowed."""

FLOOR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex128: 1e-12,
    torch.complex64: 1e-5,
    torch.complex32: 4e-3,
}
"""What is always allowed, relative to a value, or to the largest one where that is below 1."""


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64 or complex128; integers and booleans stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def complaint(
    actual: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
) -> str:
    """Say what is wrong with results, or return an empty string.

    Args:
        actual: What the backend computed.
        eager: What PyTorch computes in the same dtypes.
        truth: What PyTorch computes in float64.
    """
    if len(actual) != len(eager):
        return f"{len(actual)} values instead of {len(eager)}"
    for position, values in enumerate(zip(actual, eager, truth, strict=True)):
        if wrong := _kind(*values[:2]) or _values(*values):
            return f"value {position} {wrong}"
    return ""


def _kind(actual: object, eager: torch.Tensor) -> str:
    if not isinstance(actual, torch.Tensor):
        return f"is a {type(actual).__name__}, not a tensor"
    for what in ("dtype", "shape", "device"):
        seen, expected = getattr(actual, what), getattr(eager, what)
        if seen != expected:
            return f"has {what} {seen}, not {expected}"
    return ""


def _values(actual: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> str:
    if not eager.numel():
        return ""
    if eager.dtype not in FLOOR:
        wrong = (actual != eager) & (actual != truth.to(eager.dtype))
        return _worst(wrong, (actual != eager).to(torch.float64), 0.0)
    floor = FLOOR[eager.dtype]
    actual, eager, truth = map(_real, (actual, eager, truth))
    error = (eager - truth).abs()
    largest = error[error.isfinite()].max().item() if error.isfinite().any() else 0.0
    allowed = FACTOR * largest + floor * _scale(truth)
    off = (actual - truth).abs()
    agrees = _same_special(actual, eager) | (off <= allowed)
    return _worst(~agrees, off, FACTOR * largest + floor)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = precise(tensor.detach().resolve_conj().resolve_neg())
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _scale(truth: torch.Tensor) -> torch.Tensor:
    size = truth.abs().nan_to_num(0.0, 0.0, 0.0)
    return size + size.max().clamp(max=1.0)


def _same_special(actual: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Tell where both are NaN, or the same infinity."""
    both_nan = actual.isnan() & eager.isnan()
    return both_nan | (eager.isinf() & (actual == eager))


def _worst(wrong: torch.Tensor, off: torch.Tensor, allowed: float) -> str:
    if not wrong.any():
        return ""
    error = off.masked_fill(~wrong, -1.0).nan_to_num(torch.inf)
    index = int(error.argmax())
    share = f"{int(wrong.sum())} of {wrong.numel()} elements"
    return f"is wrong in {share}, most at {index}: off by {off.flatten()[index]:.3g}, allowed {allowed:.3g}"
