"""Guards as data: to print, to dump and to compare."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from torchbay._guards import GuardFunction, kind_of

__all__ = ["GuardReport", "differences", "reports_of"]


@attrs.frozen
class GuardReport:
    """One guard.

    Attributes:
        kind: What it compares, such as ``"value"`` or ``"tensor"``.
        path: What it is about, as a user would write it.
        expected: What was there when the graph was captured.
        source: The check as Python source.
    """

    kind: str
    path: str
    expected: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}: {self.expected}"

    def as_dict(self) -> dict[str, str]:
        """Return the same as a dict of strings."""
        return attrs.asdict(self)


def reports_of(guards: GuardFunction) -> tuple[GuardReport, ...]:
    """Return the guards of a specialization, in the order they are checked."""
    return tuple(
        GuardReport(kind_of(guard), guard.path, guard.expected, source)
        for guard, source in zip(guards.guards, guards.sources, strict=True)
    )


def differences(here: Sequence[GuardReport], there: Sequence[GuardReport]) -> list[str]:
    """Return one line for each path that is guarded in another way here than there."""
    ours, theirs = _by_path(here), _by_path(there)
    return [
        f"{path}: {_side(ours.get(path), 'here')}, {_side(theirs.get(path), 'there')}"
        for path in {**ours, **theirs}
        if ours.get(path) != theirs.get(path)
    ]


def _by_path(guards: Sequence[GuardReport]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for guard in guards:
        found.setdefault(guard.path, []).append(guard.expected)
    return found


def _side(expected: list[str] | None, side: str) -> str:
    return f"not guarded {side}" if expected is None else f"{' and '.join(expected)} {side}"
