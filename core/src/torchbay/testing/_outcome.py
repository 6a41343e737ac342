"""The ways a test of the kit can end, and marks that change which are allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import attrs

__all__ = ["OUTCOMES", "Outcome", "Result", "never_refused"]

Outcome = Literal["passed", "refused", "known failure", "wrong", "not offered"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "refused", "known failure", "wrong", "not offered")

Test = TypeVar("Test", bound=Callable[..., Any])


def never_refused(test: Test) -> Test:
    """Mark a test that a backend cannot decline."""
    test.never_refused = True  # type: ignore[attr-defined]
    return test


@attrs.frozen(kw_only=True)
class Result:
    """How one test ended.

    Attributes:
        suite: The class it belongs to, as pytest names it.
        family: What it is about.
        test: The test's name without parameters.
        case: Its parameters, e.g. the operator.
        outcome: How it ended.
        detail: Why it was refused, or what was wrong.
        link: Where a known failure is explained.
        seconds: How long it took. The first of a group compiles for all.
    """

    suite: str
    family: str
    test: str
    case: str
    outcome: Outcome
    detail: str = ""
    link: str = ""
    seconds: float = 0.0
