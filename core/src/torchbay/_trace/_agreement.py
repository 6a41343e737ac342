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
        if first is None or second is None or not _same(first, second):
            culprit = second or first
            raise CannotServe(
                f"two runs of the call differ: operator {position} is "
                f"{_show(first)} in the first and {_show(second)} in the second",
                where=culprit.where if culprit is not None else "",
            )


def _same(first: OpRecord, second: OpRecord) -> bool:
    return (
        first.name == second.name
        and len(first.outputs) == len(second.outputs)
        and all(
            dtype == other_dtype
            and len(sizes) == len(other_sizes)
            and _sizes_agree(sizes, other_sizes)
            for (dtype, sizes), (other_dtype, other_sizes) in zip(
                first.outputs, second.outputs, strict=True
            )
        )
    )


def _sizes_agree(first: Sequence[int | None], second: Sequence[int | None]) -> bool:
    return all(a == b or b is None for a, b in zip(first, second, strict=True))


def _show(record: OpRecord | None) -> str:
    if record is None:
        return "missing"
    shapes = ", ".join(f"{dtype}{list(sizes)}" for dtype, sizes in record.outputs)
    return f"{record.name} -> {shapes}"
