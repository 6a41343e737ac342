"""The mode that is active while a call runs for real."""

from __future__ import annotations

from typing import Any

import torch

from torchbay._observe._ops import (
    GATES,
    PACK,
    Gate,
    OpRecord,
    elements,
    is_compared,
    record_of,
)
from torchbay._reason import Reason
from torchbay._source import user_line
from torchbay._torch_compat import ObservingDispatchMode, OpOverload, leave_mode

__all__ = ["OpRecorder"]


class OpRecorder(ObservingDispatchMode):
    """Logs every dispatched operator, and the outcome of every data-dependent read."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.gates: list[Gate] = []
        self.obstacles: list[Reason] = []
        self.is_inside_operator = False
        self._has_left = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.is_inside_operator = True
        try:
            result = func(*args, **(kwargs or {}))
            if func is PACK:
                self.gates.append(Gate(elements, (), elements(args[1]), user_line()))
        finally:
            self.is_inside_operator = False
        try:
            self._record(func, args, kwargs or {}, result)
        except Exception as error:  # noqa: BLE001 - the call goes on, whatever happens here
            self.obstacles.append(Reason(f"observing {func} raised {error!r}", user_line()))
        return result

    def leave(self) -> None:
        """Stop recording before the ``with`` block ends."""
        leave_mode(self)
        self._has_left = True

    def __exit__(self, *exception: object) -> None:
        if not self._has_left:
            super().__exit__(*exception)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        where = user_line()
        if not isinstance(func, OpOverload):
            self.obstacles.append(Reason(f"{func} is a higher-order operator", where))
        elif func in GATES:
            extras = tuple(a for a in args if not isinstance(a, torch.Tensor))
            self.gates.append(Gate(func, extras, result, where))
        elif is_compared(func):
            self.ops.append(record_of(func, args, kwargs, result, where))
