"""Why a call cannot be served from a graph."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any

import attrs

__all__ = ["CannotServe", "Reason", "Unsettled"]


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


class Unsettled(CannotServe):
    """It takes another call to tell: code was met whose globals nobody has looked at yet."""

    def __init__(self, codes: Mapping[CodeType, dict[str, Any]]) -> None:
        super().__init__("its backward runs code that has yet to be looked at")
        self.codes = codes
