"""Checkpoints while a call is observed: they run for real, and what they repeat is not recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchbay._observe._recorder import OpRecorder
from torchbay._torch_checkpoint import Around, replays_context

__all__ = ["RealCheckpoints"]


class RealCheckpoints:
    """Has a recorder leave out what checkpoints do besides running their functions once.

    In the trace they run them once and do nothing else.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder

    def around(
        self,
        original: Callable[..., Around],
        function: Any,
        preserves: bool,  # noqa: FBT001 - as torch passes it
        context: Any,
        /,
        *rest: Any,
        **kwargs: Any,
    ) -> Around:
        """Run around a function that the caller runs; it is given to be run again."""
        if replays_context(context):
            yield from original(function, preserves, context, *rest, **kwargs)
            return
        again = self._aside(function)
        around = original(again, preserves, context, *rest, **kwargs)
        self._aside(next)(around)
        try:
            yield
        except BaseException as error:
            around.throw(error)
            raise
        self._aside(next)(around, None)

    def apply(
        self,
        original: Callable[..., Any],
        function: Any,
        preserves: bool,  # noqa: FBT001 - as torch passes it
        *args: Any,
    ) -> Any:
        """Run a function, and run it again in its backward."""
        again = self._aside(function)
        runs = iter([function])

        def run(*given: Any) -> Any:
            return next(runs, again)(*given)

        return original(run, preserves, *args)

    def _aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.aside():
                return function(*args, **kwargs)

        return run
