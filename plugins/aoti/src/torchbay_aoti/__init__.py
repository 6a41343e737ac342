"""Compiles a graph ahead of time with AOTInductor, and loads the machine code at once."""

from __future__ import annotations

from torchbay.plugin import Backend, hookimpl

__all__ = ["torchbay_make_backend"]


@hookimpl
def torchbay_make_backend() -> Backend:
    """Return the backend named ``aoti``."""
    from ._backend import AotiBackend

    return AotiBackend()
