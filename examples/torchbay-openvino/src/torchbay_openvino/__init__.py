"""Compiles a graph with OpenVINO for the CPU."""

from __future__ import annotations

from torchbay.plugin import Backend, hookimpl

__all__ = ["torchbay_make_backend"]


@hookimpl
def torchbay_make_backend() -> Backend:
    """Return the backend named ``openvino``."""
    from ._backend import OpenVinoBackend

    return OpenVinoBackend()
