"""Lets failing asserts of the kit show their values, in every author's pytest."""

from __future__ import annotations

__all__ = ["rewrite_asserts"]

_MODULES = (
    "_artifacts",
    "_claims",
    "_contract",
    "_groups",
    "_lifecycle",
    "_models",
    "_numerics",
    "_operators",
    "tolerance",
)


def rewrite_asserts() -> None:
    """Register the modules of the kit that assert. Called before the first of them is imported."""
    try:
        import pytest
    except ModuleNotFoundError as error:
        message = "the conformance kit needs pytest: pip install 'torchbay[testing]'"
        raise ModuleNotFoundError(message, name="pytest") from error
    pytest.register_assert_rewrite(*(f"torchbay.testing.{name}" for name in _MODULES))
