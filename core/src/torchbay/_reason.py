"""Why a call cannot be served from a graph."""

from __future__ import annotations

import attrs

__all__ = ["CannotServe", "Reason"]


@attrs.frozen
class Reason:
    """What stands in the way, where in the user's code, and what the user can do."""

    what: str
    where: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.what}{where}{remedy}"


class CannotServe(Exception):
    """Raised inside the stages to give up on a graph; never leaves the core."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.reason = Reason(what, where, remedy)
        super().__init__(str(self.reason))
