"""Which changes to Python state are effects, and which happen on a first call only."""

from __future__ import annotations

from collections.abc import Sequence

from torchbay._observe._snapshot import Change
from torchbay._reason import CannotServe

__all__ = ["EffectHistory"]

_PATIENCE = 4


class EffectHistory:
    """Remembers what earlier observed calls of one callable changed.

    State written on the first call only (a lazily built mask, a warned-once flag) is no effect: a
    change counts when an observed call shows it again.
    """

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._unsettled = 0

    def is_settled(self, changes: Sequence[Change]) -> bool:
        """Whether a call with these changes may be captured; if not, the next one decides.

        Raises:
            CannotServe: The call changes Python state every time.
        """
        if not changes:
            self._unsettled = 0
            return True
        repeated = next((c for c in changes if c.path in self._changed), None)
        self._unsettled += 1
        if repeated is not None or self._unsettled >= _PATIENCE:
            raise CannotServe(
                f"every call changes Python state: {repeated or changes[0]}",
                remedy="Return the value instead of storing it, or keep it in a tensor",
            )
        self._changed.update(change.path for change in changes)
        return False
