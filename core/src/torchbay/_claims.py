"""What a backend claims, held against a call before any work is done."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchbay._registry import backends, load
from torchbay.errors import BackendError
from torchbay.plugin import Capabilities

__all__ = ["able_backends", "complaint"]


def complaint(claims: Capabilities, tensors: Iterable[torch.Tensor]) -> str | None:
    """Return what about these tensors a backend does not claim to take, or None."""
    for tensor in tensors:
        if tensor.device.type not in claims.devices:
            return f"tensors on {tensor.device.type} are not among what it compiles for"
        if claims.dtypes is not None and tensor.dtype not in claims.dtypes:
            return f"{tensor.dtype} is not among the dtypes it takes"
    return None


def able_backends(tensors: list[torch.Tensor]) -> list[str]:
    """Return the installed backends that claim to take these tensors; loads them to ask."""
    return [
        listing.name
        for listing in backends()
        if listing.error is None and listing.state != "skipped" and _takes(listing.name, tensors)
    ]


def _takes(name: str, tensors: list[torch.Tensor]) -> bool:
    try:
        return complaint(load(name).capabilities, tensors) is None
    except BackendError:
        return False
