"""What a backend claims, held against a call before any work is done."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchbay._registry import backends, load
from torchbay.errors import BackendError, InvalidArgument
from torchbay.plugin import Backend, Capabilities

__all__ = ["able_backends", "check_sizes", "complaint", "training_backends"]


def complaint(claims: Capabilities, tensors: Iterable[torch.Tensor]) -> str | None:
    """Return what about these tensors a backend does not claim to take, or None."""
    for tensor in tensors:
        if tensor.device.type not in claims.devices:
            return f"tensors on {tensor.device.type} are not among what it compiles for"
        if claims.dtypes is not None and tensor.dtype not in claims.dtypes:
            return f"{tensor.dtype} is not among the dtypes it takes"
    return None


def check_sizes(backend: Backend, asked_for: str, where: str = "") -> None:
    """Refuse a backend that does not claim graphs with symbolic sizes.

    Raises:
        InvalidArgument: It does not; names those that do.
    """
    if backend.capabilities.dynamic_shapes:
        return
    able = _claiming("dynamic_shapes")
    raise InvalidArgument(
        f"backend {backend.name!r} takes fixed sizes only, and {asked_for} asks for symbolic ones",
        account=where,
        remedy=f"Backends that take them: {', '.join(able) or 'none installed'}",
    )


def training_backends() -> list[str]:
    """Return the installed backends that claim to train; loads them to ask."""
    return _claiming("training")


def _claiming(ability: str) -> list[str]:
    """Return the installed backends that claim something; loads them to ask."""
    return [name for name in _loadable() if _claims(name, ability)]


def _claims(name: str, ability: str) -> bool:
    try:
        return bool(getattr(load(name).capabilities, ability))
    except BackendError:
        return False


def _loadable() -> list[str]:
    return [
        listing.name
        for listing in backends()
        if listing.error is None and listing.state != "skipped"
    ]


def able_backends(tensors: list[torch.Tensor]) -> list[str]:
    """Return the installed backends that claim to take these tensors; loads them to ask."""
    return [name for name in _loadable() if _takes(name, tensors)]


def _takes(name: str, tensors: list[torch.Tensor]) -> bool:
    try:
        return complaint(load(name).capabilities, tensors) is None
    except BackendError:
        return False
