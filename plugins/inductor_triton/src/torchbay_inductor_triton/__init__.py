"""Compiles a graph with Inductor: to C++ on CPU, to Triton on CUDA."""

from __future__ import annotations

from torchbay.plugin import Backend, hookimpl

__all__ = ["torchbay_make_backend"]


@hookimpl
def torchbay_make_backend() -> Backend:
    """Return the backend named ``inductor_triton``."""
    from ._backend import InductorBackend

    return InductorBackend()
