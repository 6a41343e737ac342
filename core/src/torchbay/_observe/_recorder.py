"""The mode that is active while a call runs for real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchbay._control_flow import is_control_flow, is_kept
from torchbay._observe._branches import rehearse_branches
from torchbay._observe._inside import Inside
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
from torchbay._torch_compat import (
    ObservingDispatchMode,
    has_effect_token,
    lazy_signs_resolved,
    leave_mode,
)
from torchbay._torch_optim import is_fused_step

__all__ = ["OpRecorder"]


class OpRecorder(ObservingDispatchMode):
    """Logs every dispatched operator, and the outcome of every data-dependent read.

    Attributes:
        ops: The operators.
        gates: The reads.
        obstacles: What no graph can do.
        used: Identities of the tensors that operators were given; others may have got them since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.gates: list[Gate] = []
        self.obstacles: list[Reason] = []
        self.used: set[int] = set()
        self.inside = Inside()
        self.has_left = False
        self.is_rehearsed = False
        self._asides = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with self.inside.operator(), lazy_signs_resolved():
            result = func(*args, **(kwargs or {}))
            if func is PACK and not self._asides:
                self.gates.append(Gate(elements, (), elements(args[1]), user_line()))
        if self._asides:
            return result
        try:
            self._record(func, args, kwargs or {}, result)
        except Exception as error:  # noqa: BLE001 - the call goes on, whatever happens here
            self.obstacles.append(Reason(f"observing {func} raised {error!r}", user_line()))
        return result

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run what is not to be recorded."""
        self._asides += 1
        try:
            yield
        finally:
            self._asides -= 1

    def leave(self) -> None:
        """Stop recording before the ``with`` block ends."""
        leave_mode(self)
        self.has_left = True

    def __exit__(self, *exception: object) -> None:
        if not self.has_left:
            super().__exit__(*exception)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        where = user_line()
        self.used.update(map(id, _tensors((*args, *kwargs.values()))))
        if is_control_flow(func):
            self._record_control_flow(func, args, where)
        if is_fused_step(func):
            remedy = "Make the optimizer with fused=False"
            self.obstacles.append(Reason(f"no graph can hold {func}", where, remedy))
        if has_effect_token(func):
            self.obstacles.append(Reason(f"{func} has an effect that no graph can hold", where))
        elif func in GATES:
            extras = tuple(a for a in args if not isinstance(a, torch.Tensor))
            self.gates.append(Gate(func, extras, result, where))
        elif is_compared(func):
            self.ops.append(record_of(func, args, kwargs, result, where))

    def _record_control_flow(self, func: Any, args: tuple[Any, ...], where: str) -> None:
        if not is_kept(func):
            self.obstacles.append(Reason(f"{func} is a higher-order operator", where))
        elif not self.is_rehearsed and (problem := rehearse_branches(func, args, self.inside)):
            self.obstacles.append(Reason(f"{func}: {problem}", where))


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments, and in lists of them."""
    for value in arguments:
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor):
                yield part
