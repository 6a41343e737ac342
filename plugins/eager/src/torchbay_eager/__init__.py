"""Runs a graph with plain PyTorch: the reference every other backend is compared to."""

from __future__ import annotations

from torchbay.plugin import Backend, hookimpl

__all__ = ["torchbay_make_backend"]


@hookimpl
def torchbay_make_backend() -> Backend:
    """Return the backend named ``eager``."""
    from ._backend import EagerBackend

    return EagerBackend()
