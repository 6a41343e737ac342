"""A compiler framework for PyTorch with a small core and backends that plug in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchbay import errors
from torchbay._registry import BackendListing, backends, set_default_backend

if TYPE_CHECKING:
    from torchbay._compiled import compile  # noqa: A004 - named as torch.compile is
    from torchbay._explain import explain
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

# Imported on first use, for they bring torch: listing backends needs none.
_HOMES = {"compile": "_compiled", "explain": "_explain", "reset": "_reset"}


def __getattr__(name: str) -> Any:
    if name == "plugin":
        return import_module("torchbay.plugin")
    if name not in _HOMES:
        raise AttributeError(f"module 'torchbay' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"torchbay.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
