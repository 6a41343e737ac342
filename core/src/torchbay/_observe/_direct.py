"""``torch.cond`` and its like while a call is observed: run for real, without torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from torchbay._observe._branches import rehearse_branches
from torchbay._observe._profile import ProfileRecorder
from torchbay._observe._reach import Reach
from torchbay._observe._recorder import OpRecorder
from torchbay._observe._rehearsal import python_randomness_kept
from torchbay._observe._snapshot import Snapshot
from torchbay._reason import Reason
from torchbay._source import user_line

__all__ = ["DirectCalls"]


@attrs.define(eq=False)
class DirectCalls:
    """Decides for each call of such an operator whether a graph can hold it.

    If it can, the operator itself is called. If not, observing ends, and the call happens the way
    it does in eager execution: with the same result, or the same error.
    """

    _recorder: OpRecorder
    _profile: ProfileRecorder
    _reach: Reach
    _is_rehearsing: bool = False

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], original: Callable[[], Any]
    ) -> Any:
        """Run an operator."""
        if self._recorder.has_left:
            return original()
        if self._is_rehearsing or self._recorder.is_rehearsed:
            return function(*args)
        if problem := self._problem_of(function, args):
            self._profile.give_up(Reason(f"{_name(function)}: {problem}", user_line()))
            return original()
        self._recorder.is_rehearsed = True
        try:
            return function(*args)
        finally:
            self._recorder.is_rehearsed = False

    def _problem_of(self, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
        """Run the functions on fakes, under the profile, and undo what they do to Python state."""
        snapshot, noted = Snapshot.of(self._reach), self._noted()
        self._is_rehearsing = True
        try:
            with python_randomness_kept():
                problem = rehearse_branches(function, args, self._recorder.inside)
            changes = [change for effect in snapshot.effects() for change in effect.changes]
        finally:
            self._is_rehearsing = False
            snapshot.restore()
        if not problem and changes:
            problem = f"a function given to it changes Python state: {changes[0]}"
        if not problem and self._noted() > noted:
            problem = "a function given to it does what no graph can do"
        return problem

    def _noted(self) -> int:
        return len(self._profile.obstacles) + len(self._profile.effects)


def _name(function: Callable[..., Any]) -> str:
    """Return what the user called, from the name of the function that torch makes around it."""
    name = function.__name__.removeprefix("run_flattened_").removesuffix("_op_wrapper")
    return f"the operator {name.removeprefix('_').removeprefix('flat_')}"
