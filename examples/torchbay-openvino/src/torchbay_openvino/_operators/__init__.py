"""Conversions by family; importing this package fills the table."""

from __future__ import annotations

from . import creation, elementwise, matrices, neural, reductions, shapes

__all__ = ["creation", "elementwise", "matrices", "neural", "reductions", "shapes"]
