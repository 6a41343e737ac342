"""Whether the observed run and the traced run did the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torchbay._observe import OpRecord
from torchbay._reason import CannotServe

__all__ = ["check_agreement"]


def check_agreement(observed: Sequence[OpRecord], traced: Sequence[OpRecord]) -> None:
    """Raise CannotServe, naming the first operator that differs and its line, if any does.

    A program whose runs differ is not a function of what was recorded: an iterator was used up,
    a memo was hit, time or Python's randomness decided.
    """
    for position, (first, second) in enumerate(zip_longest(observed, traced)):
        if first is None or second is None or not first.agrees_with(second):
            raise CannotServe(
                f"two runs of the call differ: operator {position} is "
                f"{_show(first)} in the first and {_show(second)} in the second",
                where=(second or first).where,
            )


def _show(record: OpRecord | None) -> str:
    return "missing" if record is None else f"{record} with {record.values}"
