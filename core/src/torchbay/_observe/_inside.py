"""Whose code runs: the program's, which is observed, or that of an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Inside"]


class Inside:
    """Knows whether an operator's own Python code runs, which is the operator's business."""

    def __init__(self) -> None:
        self.is_operator = False

    @contextmanager
    def operator(self) -> Iterator[None]:
        """Run an operator."""
        yield from self._while(is_operator=True)

    @contextmanager
    def program(self) -> Iterator[None]:
        """Run a function of the program that an operator was given."""
        yield from self._while(is_operator=False)

    def _while(self, *, is_operator: bool) -> Iterator[None]:
        before, self.is_operator = self.is_operator, is_operator
        try:
            yield
        finally:
            self.is_operator = before
