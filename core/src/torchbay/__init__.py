"""A compiler framework for PyTorch with a small core and backends that plug in."""

from __future__ import annotations

from torchbay import errors
from torchbay._compiled import compile  # noqa: A004 - named as torch.compile is
from torchbay._explain import explain
from torchbay._registry import BackendListing, backends, set_default_backend
from torchbay._reset import reset

__all__ = [
    "BackendListing",
    "__version__",
    "backends",
    "compile",
    "errors",
    "explain",
    "reset",
    "set_default_backend",
]

__version__ = "0.1.0"
